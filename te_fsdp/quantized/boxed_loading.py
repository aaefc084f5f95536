"""Finish loads into quantized weights: quantize values that need the amax of all ranks, and drop derived data.

:mod:`te_fsdp.quantized.boxed` describes what DCP reads and writes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp.boxed_dtensor import wrap_reading
from te_fsdp.quantized.boxed import (
    QuantizedDTensor,
    QuantizedSlice,
    drop_derived,
    take_written,
    values_of,
    waiting_values,
    weights_of,
)
from te_fsdp.quantized.components import components_of, drop_derived_state
from te_fsdp.quantized.shards import quantize_with_shared_scale
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn


def quantize_pending(module: nn.Module, state_dict: Any, prefix: str) -> None:
    """Quantize values that wait for their scale, with the amax of the whole weight.

    Collective over the weight mesh of each such weight: all ranks load the same ones, in the order of the model.
    """
    for path, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            key = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
            value = state_dict.get(key)
            # The state dict may contain fewer entries than the model (a partial load), or copies instead of
            # the model's tensors.
            if parameter is None or not isinstance(value, torch.Tensor):
                continue
            held, local = _torch.local_of(value), _torch.local_of(parameter)
            if not _te.is_quantized(held):
                if _te.is_quantized(local):
                    # The load overwrites them. `copy_` would change what waits, and leave the bytes.
                    waiting_values(local, take=True)
                    if held.device != local.device and isinstance(value, DTensor):
                        state_dict[key] = _torch.with_local(held.to(local.device), value, requires_grad=False)
                continue
            # A parameter in high precision or another format gets the values that wait by `copy_`.
            if _te.format_of(local) is not _te.format_of(held):
                continue
            values = waiting_values(held, take=True)
            # Delayed scaling, too, takes the scale of these values: that of the previous ones would clip larger ones.
            _finish((state_dict, key), held, (owner, name), values)


def _finish(
    entry: tuple[Any, Any],
    held: torch.Tensor,
    place: tuple[nn.Module, str],
    values: torch.Tensor | None,
) -> None:
    """Drop what a weight derived from overwritten bytes, and quantize values that wait. Collective if there are values.

    ``entry`` is the container and key of the tensor ``held``, ``place`` the owner and name of the parameter.
    """
    (container, key), (module, name) = entry, place
    parameter = module._parameters[name]
    assert parameter is not None
    local = _torch.local_of(parameter)
    is_quantized = _te.is_quantized(local)
    if take_written(held) and is_quantized:
        drop_derived(held)  # both have the same memory, and derived data of their own
        drop_derived(local)
    if values is not None and is_quantized:
        quantize_with_shared_scale(module, name, local, values)
        if _te.is_grouped(held):
            held.copy_(local)
        else:
            for mine, theirs in zip(_te.storage_parts_of(held), _te.storage_parts_of(local), strict=True):
                plain, precise = _te.high_precision_part(mine), _te.high_precision_part(theirs)
                if plain is not None and precise is not None:
                    plain.copy_(precise)
                    continue
                # Components that share their memory with the weight are already written.
                own = {component.name: component.tensor for component in components_of(theirs, "weight")}
                for one in components_of(mine, "weight"):
                    if one.name in own and one.tensor.data_ptr() != own[one.name].data_ptr():
                        one.tensor.copy_(own[one.name])
            drop_derived_state(held)
        container[key] = parameter.detach()  # of the same buffers as the parameter


@torch.no_grad()
def finish_load(state_dict: Any) -> None:
    """Quantize the values that ``dcp.load`` has read into a state dict. Collective over ranks that shard a weight."""
    # Scripts may omit ``load_state_dict``, because DCP writes into the model's own tensors. If one rank has values for
    # a weight, all of them quantize, because they share the scale.
    found = [
        (container, key, value)
        for container, key, value in _entries(state_dict)
        if isinstance(value, QuantizedDTensor) and _te.is_quantized(_torch.local_of(value))
    ]
    # One all-reduce per mesh and dim, not one per weight.
    for mesh in dict.fromkeys(value.device_mesh for _, _, value in found):
        group = [one for one in found if one[2].device_mesh == mesh]
        waits = torch.tensor(
            [waiting_values(_torch.local_of(value)) is not None for _, _, value in group],
            dtype=torch.int32,
            device=mesh.device_type,
        )
        for dim in range(mesh.ndim):  # replicas may load alone
            cut = any(_torch.shard_dim_of(value.placements[dim]) is not None for _, _, value in group)
            if cut and mesh.size(dim) > 1:
                dist.all_reduce(waits, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for (container, key, value), waiting in zip(group, waits.tolist(), strict=True):
            held = _torch.local_of(value)
            owner, name = value.__dict__[_torch.BOXES].owner or (lambda: None, "")
            module = owner()
            parameter = None if module is None else module._parameters.get(name)
            local = None if parameter is None else _torch.local_of(parameter)
            if module is None or local is None or not _te.is_quantized(local):
                continue
            memory, own = (
                {
                    (c.name, c.tensor.data_ptr())
                    for one in weights_of(t)[:1]
                    for c in components_of(one, "weight")
                }
                for t in (held, local)
            )
            # An entry with other memory is a copy, which load_state_dict takes.
            if memory.isdisjoint(own):
                continue
            values = waiting_values(held, take=True) if waiting else None
            values = values_of(held) if waiting and values is None else values
            _finish((container, key), held, (module, name), values)


def _entries(state_dict: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield container, key and value of the leaves of nested dicts and lists."""
    pairs = state_dict.items() if isinstance(state_dict, dict) else enumerate(state_dict)
    for key, value in list(pairs):
        if isinstance(value, (dict, list)):
            yield from _entries(value)
        else:
            yield state_dict, key, value


def patch_loading() -> None:
    """Let ``dcp.load`` read into slices of TE's quantized tensors; later calls do nothing."""

    def wrap_load(stock: Any) -> Any:
        @functools.wraps(stock)
        def load_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            stock(state_dict, *args, **kwargs)
            # With `no_dist`, each rank loads for itself and others may not load at all, so a collective would
            # hang.
            no_dist = kwargs.get("no_dist", args[3] if len(args) > 3 else False)
            if not no_dist or not dist.is_initialized() or dist.get_world_size() == 1:
                finish_load(state_dict)

        return load_state_dict

    def wrap_narrow(stock: Any) -> Any:
        @functools.wraps(stock)
        def narrow_tensor_by_index(
            tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
        ) -> torch.Tensor:
            if (
                _te.is_quantized(tensor)
                and not _te.is_grouped(tensor)
                and tuple(sizes) != tuple(tensor.shape)
            ):
                if tensor.ndim == 3:  # of one expert in a tensor of all
                    return QuantizedSlice(tensor.view(tensor.shape[1:]), offsets[1:], sizes[1:], True)
                return QuantizedSlice(tensor, offsets, sizes)
            return stock(tensor, offsets, sizes)

        return narrow_tensor_by_index

    wrap_reading(wrap_narrow, wrap_load)
