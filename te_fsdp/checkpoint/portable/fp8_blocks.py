"""Hugging Face weights in FP8 with one scale per 128 x 128 block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_fsdp.checkpoint.lazy_tensors import InMemory, Lazy
from te_fsdp.checkpoint.model_state import OwnedTensor
from te_fsdp.checkpoint.portable.huggingface_map import Group, WeightMap
from te_fsdp.checkpoint.portable.huggingface_model import Share, TeNames, given_or_default
from te_fsdp.errors import PlacementError
from te_fsdp.quantized.components import components_of
from te_fsdp.upstream import te as _te

#: Rows and columns that share a scale, as vLLM, SGLang and transformers read FP8 weights.
BLOCK = 128
#: The largest finite value of ``torch.float8_e4m3fn``.
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a (rows, columns) weight with one scale per 128 x 128 block. Local operation.

    Returns:
        The weight in float8_e4m3fn, and fp32 factors (rows / 128, columns / 128), rounded up, that multiply it back.
    """
    rows, columns = weight.shape
    scales = torch.empty((-(-rows // BLOCK), -(-columns // BLOCK)), dtype=torch.float32, device=weight.device)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    height = BLOCK * max(1, rows // (8 * BLOCK))  # an eighth of the rows at a time bounds the memory
    for first in range(0, rows, height):
        strip = weight[first : first + height]
        pad = (0, -columns % BLOCK, 0, -len(strip) % BLOCK)
        padded = torch.nn.functional.pad(strip.float(), pad)
        blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        amax = blocks.abs().amax(dim=(1, 3))
        # On a GPU torch multiplies by the reciprocal of a number, which rounds twice.
        scale = torch.where(amax > 0, amax / torch.full_like(amax, _LARGEST), 1.0)
        quantized = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        values[first : first + height] = quantized.flatten(2).flatten(0, 1)[: len(strip), :columns]
        scales[first // BLOCK : first // BLOCK + len(scale)] = scale
    return values, scales


def scale_name(name: str) -> str:
    """Return the name of the scales of an FP8 weight."""
    return name.removesuffix("weight") + "weight_scale_inv"


def quantization_config(config: Any, *, names: TeNames | None = None) -> dict[str, Any]:
    """Return ``quantization_config`` of ``config.json`` for weights in the format ``"fp8-block"``. Local operation.

    ``config`` is the model's description, as for :func:`te_fsdp.checkpoint.save_huggingface`.
    """
    weights, names = WeightMap.build(config, names=names), given_or_default(names, TeNames)
    kept = [
        name.removesuffix(".weight")
        for group in weights.groups
        for name, shape in group.shapes(te=False).items()
        if len(shape) == 2 and not is_linear(group, names) and names.embedding not in group.te.names
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept or ["lm_head"],
    }


def is_linear(group: Group, names: TeNames) -> bool:
    """Return whether a group is weights of linear layers that ``fp8-block`` quantizes."""
    others = (names.embedding, names.positions, names.head)
    suffixes = (names.router, names.shared_gate)
    return len(group.parts[0]) == 2 and not any(
        name in others or name.endswith(suffixes) for name in group.te.names
    )


def has_whole_blocks(group: Group) -> bool:
    """Return whether TE's tensors consist of whole 128-row blocks of Hugging Face's."""
    if group.te.zero_centered != group.huggingface.zero_centered or group.huggingface.transposed:
        return False
    is_one = len(group.te.names) == len(group.parts)
    return is_one or all(part[0] % (BLOCK * group.te.groups) == 0 for part in group.parts)


def block_shares(owned: OwnedTensor) -> dict[str, Share]:
    """Return this rank's FP8 bytes and scales of a weight with one scale per 128 x 128 block; empty for others."""
    local: Any = owned.local
    if owned.is_grouped or str(_te.format_of(local)) != "float8-block":
        return {}
    if getattr(local.get_metadata()["fp8_dtype"], "name", "") != "kFloat8E4M3":
        return {}
    parts = {one.name: one for one in components_of(local, owned.fqn)}
    found = {}
    for kind, name in (("data", "rowwise_data"), ("scale", "rowwise_scale_inv")):
        if name not in parts:
            return {}
        part, original = parts[name], owned.info.original_shape
        try:
            boxes = part.boxes(owned.info.boxes, owned.fqn, original)
        except PlacementError:  # a shard that ends within a block
            return {}
        held: list[tuple[tuple[int, ...], Lazy]] = [
            (box.original, InMemory(part.tensor[box.local_slices()])) for box in boxes
        ]
        dtype = part.tensor.dtype
        found[kind] = Share(part.shape(original), dtype, dtype, held)
    return found


def repack(group: Group, tensors: Mapping[str, torch.Tensor], block: int) -> dict[str, torch.Tensor]:
    """Return Hugging Face's tensors of elements that each cover ``block`` rows and columns of a weight."""
    parts = [tuple(-(-size // block) for size in part) for part in group.parts]
    return group.huggingface.pack(group.te.unpack(tensors, parts))
