"""Completion of loads into quantized weights.

Values that need the amax of all ranks are quantized, and derived data is dropped. :mod:`te_fsdp.quantized.boxed`
describes what DCP reads and writes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import default_planner, filesystem, hf_storage, state_dict_loader
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.groups import ranks_along
from te_fsdp.errors import CheckpointError
from te_fsdp.quantized.boxed import (
    QuantizedDTensor,
    QuantizedSlice,
    empty_like,
    pending_values,
    take_written,
    values_of,
    weights_of,
    write_bytes,
)
from te_fsdp.quantized.components import buffers_of_parts, components_of, drop_derived_state
from te_fsdp.quantized.quantizer_record import change_quantizer_record
from te_fsdp.quantized.shards import quantize_with_shared_scale
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch
from te_fsdp.upstream.patches import Replacements, wrapping
from te_fsdp.upstream.torch_dcp import LoadTarget


def quantize_pending(module: nn.Module, state_dict: Any, prefix: str) -> None:
    """Quantize pending values with the amax of the unsharded weight.

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
            read, local = _torch.local_of(value), _torch.local_of(parameter)
            if not _te.is_quantized(read):
                if _te.is_quantized(local):
                    # The load overwrites pending values: `copy_` would change them and not the bytes.
                    pending_values(local, take=True)
                    if read.device != local.device and isinstance(value, DTensor):
                        state_dict[key] = _torch.with_local(read.to(local.device), value, requires_grad=False)
                continue
            # A parameter in high precision or a different format gets pending values by `copy_`.
            if _te.format_of(local) is not _te.format_of(read):
                continue
            values = pending_values(read, take=True)
            # Load the saved scale before the weights, as TE does.
            is_delayed = values is not None and _te.is_quantized(local) and _te.has_delayed_scale(local)
            extra = state_dict.get(f"{key[: -len(name)]}_extra_state") if is_delayed else None
            has_scale = isinstance(extra, torch.Tensor) and extra.numel() > 0
            if has_scale:
                owner.set_extra_state(extra)
            _finish((state_dict, key), read, (owner, name), values, has_scale=has_scale)


def _finish(
    entry: tuple[Any, Any],
    loaded: torch.Tensor,
    owner: tuple[nn.Module, str],
    values: torch.Tensor | None,
    *,
    has_scale: bool = False,
) -> None:
    """Drop buffers derived from overwritten bytes, and quantize pending values. Collective if there are values.

    ``entry`` is the container and key of the tensor ``loaded``, ``owner`` the owner and name of the parameter. Delayed
    scaling also computes a new scale from the values, because the previous one could clip them. With ``has_scale`` it
    uses the scale that was loaded.
    """
    (container, key), (module, name) = entry, owner
    parameter = module._parameters[name]
    assert parameter is not None
    local = _torch.local_of(parameter)
    is_quantized = _te.is_quantized(local)
    if take_written(loaded) and is_quantized:
        drop_derived_state(loaded)  # both have the same memory, but separate derived buffers
        drop_derived_state(local)
    if values is not None and is_quantized:
        quantize_with_shared_scale(module, name, local, values, keep_delayed_scale=has_scale)
        if _te.is_grouped(loaded):
            loaded.copy_(local)
        else:
            for target, source in zip(_te.storage_parts_of(loaded), _te.storage_parts_of(local), strict=True):
                sources = {buffer.name: buffer.tensor for buffer in buffers_of_parts(source, "weight")}
                for buffer in buffers_of_parts(target, "weight"):
                    written = sources.get(buffer.name, buffer.tensor)
                    # Buffers that share their memory with the weight are already written.
                    if written.data_ptr() != buffer.tensor.data_ptr():
                        buffer.tensor.copy_(written)
            drop_derived_state(loaded)
        container[key] = parameter.detach()  # of the same buffers as the parameter


@torch.no_grad()
def finish_load(state_dict: Any, ranks: set[int], read: Callable[[dict[str, Any]], None]) -> None:
    """Quantize the values that ``dcp.load`` has read into a state dict.

    Collective over the ranks that shard a weight, if all of them are among ``ranks``, the global ranks that load
    together. Otherwise this rank reads the unsharded weight by ``read``, which fills further entries.
    """
    # Scripts may omit ``load_state_dict``, because DCP writes into the model's own tensors. If one rank has values for
    # a weight, all of them quantize, because they share the scale.
    entries = [
        (container, path, value)
        for container, path, value in _entries(state_dict)
        if isinstance(value, QuantizedDTensor) and _te.is_quantized(_torch.local_of(value))
    ]
    unscaled: list[_Unscaled] = []
    # One all-reduce per mesh and dim, not one per weight.
    for mesh in dict.fromkeys(value.device_mesh for _, _, value in entries):
        group = [entry for entry in entries if entry[2].device_mesh == mesh]
        waits = torch.tensor(
            [pending_values(_torch.local_of(value)) is not None for _, _, value in group],
            dtype=torch.int32,
            device=mesh.device_type,
        )
        dims = [
            dim
            for dim in range(mesh.ndim)
            if any(_torch.shard_dim_of(value.placements[dim]) is not None for _, _, value in group)
        ]
        together = ranks.issuperset(ranks_along(mesh, dims))
        for dim in dims if together else ():
            if mesh.size(dim) > 1:
                dist.all_reduce(waits, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for (container, path, value), waiting in zip(group, waits.tolist(), strict=True):
            loaded, owner = _torch.local_of(value), _owner_of(value)
            if owner is None:
                continue
            module, name, local = owner
            values = pending_values(loaded, take=True) if waiting else None
            # A shard without rows may have the only old scale.
            has_one_scale = bool(_te.one_scale_quantizers(_te.quantizer_of(local)))
            if not together and has_one_scale and (values is not None or not loaded.numel()):
                unscaled.append((path, value, module, name, local))
                continue
            values = values_of(loaded) if waiting and values is None else values
            _finish((container, path[-1]), loaded, (module, name), values)
    if unscaled:
        _finish_alone(unscaled, read)


def _owner_of(value: QuantizedDTensor) -> tuple[nn.Module, str, torch.Tensor] | None:
    """Return module, name and local tensor of the parameter whose memory an entry has; ``None`` if it is a copy."""
    owner, name = value.__dict__[_torch.BOXES].owner or (lambda: None, "")
    module = owner()
    parameter = None if module is None else module._parameters.get(name)
    local = None if parameter is None else _torch.local_of(parameter)
    if module is None or local is None or not _te.is_quantized(local):
        return None
    memory, param_memory = (
        {
            (c.name, c.tensor.data_ptr())
            for weight in weights_of(t)[:1]
            for c in components_of(weight, "weight")
        }
        for t in (_torch.local_of(value), local)
    )
    # load_state_dict takes the values of copies.
    return None if memory.isdisjoint(param_memory) else (module, name, local)


#: A weight whose common scale is unknown, because this rank has read only its own values: path in the state dict,
#: entry, module, name of the parameter in it, local tensor of the parameter.
_Unscaled: TypeAlias = tuple[tuple[Any, ...], QuantizedDTensor, nn.Module, str, torch.Tensor]


def _finish_alone(weights: list[_Unscaled], read: Callable[[dict[str, Any]], None]) -> None:
    """Read unsharded weights, quantize them, and copy this rank's bytes. Local operation."""
    state_dict: dict[str, Any] = {}
    # By offsets in the entry: one rectangle for each expert.
    wholes: list[dict[tuple[int, ...], torch.Tensor]] = []
    for path, value, _, _, local in weights:
        boxes = value.local_boxes()
        stack = value.ndim - 2
        entry = LoadTarget(value.shape, value)
        entry.__dict__.update(value.__dict__)  # such as the mark of experts
        full_weights = {}
        for offsets in {(*box.original[:stack], 0, 0) for box in boxes} or {(0,) * value.ndim}:
            full = full_weights[offsets] = empty_like(weights_of(local)[0], tuple(value.shape[stack:]))
            # All ranks have these values, so that no amax is reduced.
            quantizer = _te.quantizer_of(full)
            change_quantizer_record(quantizer, amax_group=None)
            _te.set_quantizer_amax_group(quantizer, None)
            entry.pieces[offsets] = QuantizedSlice(full, (0, 0), full.shape, bool(stack), waits=True)
        wholes.append(full_weights)
        # The same keys as DCP makes of the path.
        holder = state_dict
        for step in path[:-1]:
            holder = holder.setdefault(step, {})
        holder[path[-1]] = entry
    read(state_dict)
    for (path, value, module, name, local), full_weights in zip(weights, wholes, strict=True):
        loaded = _torch.local_of(value)
        for full in full_weights.values():
            values = pending_values(full, take=True)
            if values is None and not take_written(full):
                raise CheckpointError(
                    f"{'.'.join(map(str, path))}: dcp.load on some of the ranks that shard the weight",
                    expected="all values of the weight in the checkpoint, from which its scale is computed",
                    got="a part of them",
                    fix="call dcp.load on all of these ranks, without no_dist",
                )
            if values is not None:
                if _te.has_delayed_scale(local):
                    _te_modules.set_delayed_scale(module, name, local, values.abs().amax().reshape(1))
                full.quantize_(values)  # type: ignore[operator]
        for box in value.local_boxes():
            base, stack = (loaded, 0) if value.ndim == 2 else (weights_of(loaded)[box.local[0]], 1)
            unsharded = full_weights[(*box.original[:stack], 0, 0)]
            source = QuantizedSlice(unsharded, box.original[stack:], box.sizes[stack:])
            copied = write_bytes(base, [(QuantizedSlice(base, box.local[stack:], box.sizes[stack:]), source)])
            assert copied, "both are of the same format, and shards consist of complete blocks"
        _finish(({}, ""), loaded, (module, name), None)


def _entries(state_dict: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """Yield container, path and value of the leaves of nested mappings and lists."""
    pairs = state_dict.items() if isinstance(state_dict, Mapping) else enumerate(state_dict)
    for key, value in list(pairs):
        if isinstance(value, (Mapping, list)):
            yield from _entries(value, (*path, key))
        else:
            yield state_dict, (*path, key), value


@wrapping
def load_state_dict(state_dict: dict[str, Any], *args: Any, stock: Any, **kwargs: Any) -> None:
    """Load a state dict by DCP, then quantize pending values. Collective as :func:`finish_load`."""
    stock(state_dict, *args, **kwargs)
    arguments = inspect.signature(stock).bind(state_dict, *args, **kwargs).arguments

    def read(more: dict[str, Any]) -> None:
        stock(**{**arguments, "state_dict": more, "process_group": None, "no_dist": True})

    # With `no_dist`, or in a group of some ranks, others may not load at all, so a collective would hang.
    ranks = {0}
    if dist.is_initialized():
        no_dist = arguments.get("no_dist", False)
        group = arguments.get("process_group") or dist.group.WORLD
        ranks = {dist.get_rank()} if no_dist else set(dist.get_process_group_ranks(group))
    finish_load(state_dict, ranks, read)


@wrapping
def narrow(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], *, stock: Any) -> torch.Tensor:
    """Return a part of a tensor; of a quantized one what DCP reads into. Local operation."""
    if _te.is_quantized(tensor) and not _te.is_grouped(tensor) and tuple(sizes) != tuple(tensor.shape):
        if tensor.ndim == 3:  # of one expert in a tensor of all
            return QuantizedSlice(tensor.view(tensor.shape[1:]), offsets[1:], sizes[1:], True)
        return QuantizedSlice(tensor, offsets, sizes)
    return stock(tensor, offsets, sizes)


@wrapping
def write_data(self: Any, plan: Any, planner: Any, *, stock: Any) -> Any:
    """Write safetensors, with the values of quantized weights. Local operation."""
    # The format has plain tensors only. The metadata already describes the weight by its nominal dtype.
    plain = copy.copy(planner)

    def values_of(item: Any) -> Any:
        data = values = planner.resolve_data(item)
        if isinstance(data, torch.Tensor) and _te.is_quantized(data):
            values = data.dequantize(dtype=data.dtype)  # type: ignore[call-arg]
        return values

    plain.resolve_data = values_of
    return stock(self, plan, plain)


#: ``dcp.load`` reads into slices of TE's quantized tensors, and safetensors get their values. The planner narrows the
#: tensors that a load fills, if they are not DTensors.
PATCHES: Replacements = (
    (filesystem, "narrow_tensor_by_index", narrow),
    (default_planner, "narrow_tensor_by_index", narrow),
    (state_dict_loader, "_load_state_dict", load_state_dict),
    (hf_storage.HuggingFaceStorageWriter, "write_data", write_data),
)
