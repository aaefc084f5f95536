"""Quantized weights through FSDP2's ``fully_shard``: checked before, kept quantized after.

FSDP2 splits parameters with tensor operations for which TE's block formats have no quantized answer:
float8-block and NVFP4 weights come out dequantized, MXFP8 ones raise or dequantize (TE 2.20.2). te_fsdp hands
FSDP2 the high-precision values instead, quantizes each shard afterwards, and copies the whole weight's bytes into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _torch
from te_fsdp.binding import Binding, binding_of
from te_fsdp.errors import PlacementError, message
from te_fsdp.layout.boxes import Box
from te_fsdp.quantized.amax import quantize_shard
from te_fsdp.quantized.components import components_of

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.layout.rules import Layout

__all__ = ["BLOCK_ROWS", "check_shardable", "restore_quantized", "stash_quantized"]

#: Rows (and columns) that one scale spans: a shard must hold whole blocks. Float8 has one scale per tensor.
BLOCK_ROWS = {"float8": 1, "mxfp8": 32, "float8-block": 128, "nvfp4": 16}


@dataclass(frozen=True)
class Stashed:
    """A quantized weight on its way through ``fully_shard``.

    Attributes:
        module: Owner.
        name: Parameter name in the owner.
        quantizer: The weight's own quantizer.
        whole: The tp-local quantized weight, whose bytes the shards take over.
        keep_high_precision: Whether the shard shall keep its high-precision value, as the whole weight did.
    """

    module: nn.Module
    name: str
    quantizer: Any
    whole: torch.Tensor
    keep_high_precision: bool


def check_shardable(weights: Iterable[tuple[str, nn.Module, str, Layout]], fsdp_size: int) -> None:
    """Raise, before anything is changed, if a weight that is or will be quantized would get unfit shards.

    Local operation; every rank sees the same shapes and raises the same.

    Args:
        weights: Label, owner, name, layout of each weight that TE may hold quantized; tp-local, not yet cut.
        fsdp_size: Ranks that FSDP2 will shard over.

    Raises:
        PlacementError: Names the parameter, its tp-local shape, and the smallest size that fits.
    """
    for label, module, name, layout in weights:
        parameter, quantizer = module._parameters[name], _te.weight_quantizer(module, name)
        if parameter is not None and quantizer is not None:
            shape = tuple(_torch.local_of(parameter).shape)
            fmt = _te.format_of_quantizer(quantizer)
            _check_blocks(label, shape, fmt, fsdp_size)
            _check_stacked(label, shape, fmt, layout)


def _check_stacked(label: str, shape: tuple[int, ...], fmt: str, layout: Layout) -> None:
    """No scale may span two of the tensors that are stacked in one weight: in the original they lie apart."""
    block, parts = BLOCK_ROWS.get(fmt, 1), layout.blocks
    heights = [shape[0] * part // sum(parts) for part in parts]
    if not layout.is_stacked or all(height % block == 0 for height in heights):
        return
    raise PlacementError(
        message(
            f"{label}: stacked {fmt} weight of tp-local shape {shape}",
            expected=f"each of the {len(parts)} tensors stacked in it to have a multiple of {block} rows",
            got=f"{heights} rows",
            why="A scale would span rows that lie apart in the unsharded weight, and no checkpoint could hold it",
            fix="use fewer tp ranks, wider heads or MLP, or high-precision weights",
        )
    )


def _check_blocks(label: str, shape: tuple[int, ...], fmt: str, fsdp_size: int) -> None:
    """Rows must divide over the FSDP axis into whole blocks, columns must hold whole blocks."""
    block = BLOCK_ROWS.get(fmt, 1)
    rows, columns = shape[0], math.prod(shape[1:])
    if rows % (fsdp_size * block) == 0 and columns % block == 0:
        return
    fit = math.ceil(rows / (fsdp_size * block)) * fsdp_size * block
    raise PlacementError(
        message(
            f"{label}: shards of a {fmt} weight of tp-local shape {shape} over {fsdp_size} FSDP rank(s)",
            expected=f"rows divisible by {fsdp_size} * {block} and columns divisible by {block}",
            got=f"{rows} rows and {columns} columns",
            why=f"One scale spans {block} row(s) and column(s); a cut through a block has no right scale"
            if block > 1
            else "FSDP2 cannot gather uneven shards of a quantized weight",
            fix=f"use {fit} rows per tp rank, fewer FSDP or tp ranks, or high-precision weights",
        )
    )


def stash_quantized(model: nn.Module) -> list[Stashed]:
    """Replace quantized weights on the device by their high-precision values. Local operation.

    Returns:
        What :func:`restore_quantized` needs.
    """
    stashed = []
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            binding = binding_of(module)
            if parameter is None or binding is None:
                continue
            local = _torch.local_of(parameter)
            if local.is_meta or not _te.is_quantized(local):
                continue
            kept = _te.high_precision_value(local)
            value = local.dequantize() if kept is None else kept.to(local.device)
            stashed.append(Stashed(module, name, _te.quantizer_of(local).copy(), local, kept is not None))
            module._parameters[name] = _replace(parameter, value)
            binding.requantizes = True
    return stashed


def restore_quantized(model: nn.Module, stashed: list[Stashed]) -> None:
    """Quantize the shards of stashed weights: each is its part of the whole weight, to the byte.

    Collective over the weight mesh for formats with one scale per tensor.
    """
    for item in stashed:
        parameter = item.module._parameters[item.name]
        binding = binding_of(item.module)
        assert parameter is not None and binding is not None
        value = _torch.local_of(parameter).detach()
        local = quantize_shard(value, item.quantizer, binding)
        _copy_bytes(item, parameter, local, binding)
        if item.keep_high_precision:
            _te.attach_high_precision_value(local, value.cpu())
        item.module._parameters[item.name] = _replace(parameter, local)
        binding.requantizes = False


def _copy_bytes(item: Stashed, parameter: torch.Tensor, local: torch.Tensor, binding: Binding) -> None:
    """Overwrite a fresh shard with its rows of the tp-local weight. Local operation.

    Quantizing dequantized values gives the same values, but not always the same bytes: MXFP8 rounds the amax of a
    block up to a power of two, and the dequantized amax may lie below one that the original exceeded; its columnwise
    bytes come from the original values, not from the rowwise ones.
    """
    if _te.format_of(local) not in BLOCK_ROWS:
        return  # hybrids: no table of their buffers
    mesh = parameter.device_mesh  # type: ignore[missing-attribute]
    axis = mesh.ndim - (2 if binding.tp_mesh is not None else 1)
    shape = tuple(local.shape)
    start = mesh.get_coordinate()[axis] * shape[0]
    box = Box((start,) + (0,) * (len(shape) - 1), (0,) * len(shape), shape)
    label = binding.label(item.name)
    sources = {component.name: component for component in components_of(item.whole, label)}
    for target in components_of(local, label):
        if target.name in sources:
            source, (part,) = sources[target.name], target.boxes([box], label)
            target.tensor[part.local_slices()].copy_(source.tensor[part.original_slices()])
    _te.forget_transpose(local)


def _replace(parameter: torch.nn.Parameter, local: torch.Tensor) -> torch.nn.Parameter:
    """A parameter like the given one around another local tensor."""
    if hasattr(parameter, "placements"):
        return _torch.with_local(local, parameter, requires_grad=parameter.requires_grad)  # type: ignore[arg-type]
    return torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
