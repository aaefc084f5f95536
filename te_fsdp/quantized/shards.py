"""Shards of quantized weights, quantized with the scale of the unsharded weight."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import on_any_rank
from te_fsdp.collectives.groups import ranks_along
from te_fsdp.errors import MeshError
from te_fsdp.layout import Box, chunk_range
from te_fsdp.quantized.amax import has_amax_group, reduce_newest_amax, set_amax_group
from te_fsdp.quantized.boxed import describe_shards
from te_fsdp.quantized.components import components_of, keep_rowwise_only
from te_fsdp.quantized.grouped_weight import quantize_experts
from te_fsdp.quantized.quantizer_record import patch_clone_of_scales
from te_fsdp.records import ModuleBinding, binding_of, is_replicated, param_owners, replace_local_tensor
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch
from te_fsdp.upstream.patches import apply_patch_to

#: (id of the owner, name of the parameter in it)
Key: TypeAlias = tuple[int, str]


# [Note: quantized weights on the device] FSDP2 shards parameters with tensor operations that TE's block
# formats do not support. Float8-block and NVFP4 weights are dequantized, MXFP8 weights raise or are
# dequantized (TE 2.20.2). te_fsdp passes high-precision values to FSDP2 instead. Then it quantizes each shard
# and copies the unsharded weight's data into it.
class StashedWeight(NamedTuple):
    """An unsharded (tp-local) quantized weight during ``fully_shard``. Its data is copied to the shards."""

    #: Modules at which it is registered, each with the name; several if it is tied.
    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    unsharded: torch.Tensor
    quantizer: Any


def patch_new_zeros(local: torch.Tensor) -> None:
    """Let FSDP2 shard an MXFP8 weight on the device. Local operation that does not change other formats.

    FSDP2 copies its chunk, which TE slices bytewise, to ``local.new_zeros(shape)``. TE 2.20.2 creates it without scale
    padding, so the chunk's scales only fit if their numbers are multiples of 128 and 4. The attribute belongs to this
    tensor object only. It has no reference to the tensor: ``Module.to`` and ``float`` swap quantized parameters with
    ``torch.utils.swap_tensors``, which rejects tensors with weak references.
    """
    row = _te.format_of(local)
    if row is not None and row.name in ("mxfp8", "mxfp8-2d"):
        quantizer = _te.quantizer_of(local).copy()
        quantizer.set_usage(**local.get_usages())  # type: ignore[attr-defined]
        options = {"dtype": local.dtype, "device": local.device}
        apply_patch_to(local, "new zeros", functools.partial(_zeros, quantizer, row.block or 1, options))


def _zeros(
    quantizer: Any, block: int, defaults: Mapping[str, Any], size: Sequence[int], **options: Any
) -> torch.Tensor:
    """Return zeros like a weight of a quantizer, with padded scale buffers."""
    if options or any(length % block for length in size):  # FSDP2's sharding raises right after this
        return torch.zeros(tuple(size), **{**defaults, **options})
    zeros = quantizer.make_empty(tuple(size), **defaults)
    for buffer in _te.buffers_of(zeros):
        buffer.zero_()
    return zeros


def stash_quantized(model: nn.Module) -> list[StashedWeight]:
    """Replace quantized weights on the device by their high-precision values. Local operation."""
    stashed: dict[int, StashedWeight] = {}
    replacements: dict[int, nn.Parameter] = {}
    for _, module, name, parameter in param_owners(model):
        binding, local = binding_of(module), _torch.local_of(parameter)
        if binding is None or local.is_meta or not _te.is_quantized(local) or is_replicated(module, name):
            continue
        # A tied weight must stay one weight: it is dequantized once, and its replacement is registered at all places.
        key = id(parameter)
        if key not in stashed:
            initial = _te.high_precision_value(local)
            # The value before quantization is exact. A dequantized one has been rounded.
            value = local.dequantize() if initial is None else initial.to(local.device)
            # Keep the parameter itself, so that its id is not reused.
            stashed[key] = StashedWeight([], parameter, local, _te.quantizer_of(local).copy())
            replacements[key] = replace_local_tensor(parameter, value)
        stashed[key].places.append((module, name))
        module._parameters[name] = replacements[key]
        binding.fsdp.needs_requantize = True
    return list(stashed.values())


def restore_quantized(stashed: list[StashedWeight]) -> None:
    """Quantize the shards of stashed weights. Each one equals its part of the unsharded weight bit for bit.

    Collective over the weight mesh for formats with one scale per tensor.
    """
    for item in stashed:
        module, name = item.places[0]
        parameter, binding = module._parameters[name], binding_of(module)
        assert parameter is not None and binding is not None
        value = _torch.local_of(parameter).detach()
        local = quantize_shard(value, item.quantizer, binding)
        # Quantizing dequantized values gives the same values but not always the same data. MXFP8 rounds the amax of a
        # block up to a power of two, and the dequantized amax may be below a power that the original exceeded. Its
        # columnwise data come from the original values, not from the rowwise data.
        mesh = parameter.device_mesh  # type: ignore[missing-attribute]
        tp = binding.unsharded_mesh(name)
        # FSDP2 puts its axes before those of the tp-local parameter, and its shard axis last among them.
        axis = mesh.ndim - 1 - (0 if tp is None else tp.ndim)
        dim = _torch.shard_dim_of(parameter.placements[axis]) or 0  # type: ignore[missing-attribute]
        low, high = chunk_range(item.unsharded.shape[dim], mesh.size(axis), mesh.get_coordinate()[axis])
        label = binding.label(name)
        if not _te.is_grouped(local):
            _copy_part(local, item.unsharded, dim, low, label)
            _te.drop_transpose(local)
        else:
            weight: Any = local
            experts: list[torch.Tensor] = item.unsharded.experts  # type: ignore[missing-attribute]
            if dim == 0:  # complete experts
                experts, dim, low = experts[low:high], 1, 0
            for expert, unsharded in zip(weight.experts, experts, strict=True):
                _copy_part(expert, unsharded, dim - 1, low, label)
            # They were computed from the data before it was overwritten.
            weight.derive_transposes()
        keep_rowwise_only(local)
        if _te.high_precision_value(item.unsharded) is not None:
            _te.attach_high_precision_value(local, value.cpu())
        shard = replace_local_tensor(parameter, local)
        for owner, attr in item.places:
            owner._parameters[attr] = shard
            its = binding_of(owner)
            assert its is not None
            # The high-precision one would stay until FSDP2 installs this one.
            if pair := its.fsdp.pairs.get(attr):
                pair.shard = shard  # type: ignore[bad-assignment]
            its.fsdp.needs_requantize = False
            describe_shards(owner, its, attr, shard)


def _copy_part(local: torch.Tensor, unsharded: torch.Tensor, dim: int, low: int, label: str) -> None:
    """Overwrite a shard with its data of ``unsharded``, starting at ``low`` along ``dim``."""
    row = _te.format_of(local)
    if row is None or not row.buffers:
        return  # hybrids: no table of their buffers
    shape, zeros = tuple(local.shape), (0,) * local.ndim
    if not local.numel():
        return  # An empty shard has no data. Its scale was set by its quantization.
    box = Box((*zeros[:dim], low, *zeros[dim + 1 :]), zeros, shape)
    sources = {component.name: component for component in components_of(unsharded, label)}
    for target in components_of(local, label):
        if target.name in sources:
            source, (part,) = sources[target.name], target.boxes([box], label, tuple(unsharded.shape))
            target.tensor[part.local_slices()].copy_(source.tensor[part.original_slices()])


# ---------------------------------------------------------------------------------------- one scale for one weight


# [Note: writes to quantized weights] Every write to a quantized weight reads the tensor's amax group (TE
# 2.20.2 ``update_quantized`` of per-tensor quantizers): initialization, requantization by the optimizer,
# loading from high precision, and ``copy_`` or ``quantize_`` by the user. te_fsdp sets the weight mesh's
# group on weights of bound modules in a persistent way (:mod:`te_fsdp.quantized.amax`).
def attach_amax_group(local: torch.Tensor, binding: ModuleBinding) -> None:
    """Set the group over which quantizations of a local shard reduce the amax. Local operation."""
    # Nothing is set for formats with block scales only. Without a weight mesh the weight is not sharded, and a group
    # set by TE is removed.
    if _te.is_grouped(local):
        set_amax_group(local, _experts_group(binding))
        return
    if has_amax_group(local, binding.weight_group):
        return  # the case in every all-gather after the first
    if not _te.is_quantized(local):
        return
    patch_clone_of_scales(local)
    if _te.one_scale_quantizers(_te.quantizer_of(local)):
        set_amax_group(local, binding.weight_group)


def quantize_shard(value: torch.Tensor, quantizer: Any, binding: ModuleBinding) -> torch.Tensor:
    """Quantize one rank's shard with the scale of the unsharded weight.

    Collective (max all-reduce of one or two floats) over the weight mesh for formats with one scale per tensor,
    local for others. The quantizer has no group afterwards.
    """
    if value.dim() == 3:
        return quantize_experts(value, quantizer, _experts_group(binding))
    shared = binding.weight_mesh is not None and _te.needs_shared_amax(quantizer)
    if shared:
        _te.set_quantizer_amax_group(quantizer, binding.weight_mesh.get_group())  # type: ignore[union-attr]
    try:
        with torch.no_grad():
            local = quantizer(value)
    finally:
        if shared:
            _te.set_quantizer_amax_group(quantizer, None)
    attach_amax_group(local, binding)
    reduce_newest_amax([local])
    return local


def _experts_group(binding: ModuleBinding) -> str | None:
    """Return the name of the group whose ranks have shards of the same experts (tp, FSDP2's if it splits experts)."""
    # Each expert has its own scale, so ranks with other experts take no part.
    rule = binding.rules.get("weight")
    mesh = binding.tp_mesh if rule is not None and rule.shard_dim is not None else None
    if binding.ep.shards_within_experts and binding.weight_mesh is not None:
        mesh = binding.weight_mesh
    return None if mesh is None else mesh.get_group().group_name


def requantize(local: torch.Tensor, binding: ModuleBinding) -> None:
    """Requantize a weight that TE quantized on each rank separately, with the scale of the unsharded weight.

    It uses the value before quantization if TE has kept it, else the dequantized data. Collective over the
    weight mesh for per-tensor formats. Formats with block scales are not changed.
    """
    patch_clone_of_scales(local)
    if _te.has_delayed_scale(local):  # every rank has used the same scale
        attach_amax_group(local, binding)
        reduce_newest_amax([local])
        return
    if binding.weight_mesh is None or not _te.needs_shared_amax(_te.quantizer_of(local)):
        return
    value = _te.high_precision_value(local)
    value = local.dequantize() if value is None else value.to(local.device)  # type: ignore[operator]
    attach_amax_group(local, binding)
    with torch.no_grad():
        local.quantize_(value)  # type: ignore[operator]


def quantize_with_shared_scale(
    module: nn.Module,
    name: str,
    local: torch.Tensor,
    value: torch.Tensor,
    *,
    keep_delayed_scale: bool = False,
) -> None:
    """Write a value to a quantized parameter, with the scale of the unsharded weight.

    Collective over the ranks that shard the weight (maximum of one or two floats) for formats with one scale per
    tensor. The value is float32 with the shape of ``local``. ``keep_delayed_scale`` uses delayed scaling's present
    scale instead of computing one from this value.
    """
    binding = binding_of(module)
    if _te.is_grouped(local):  # every expert has its own scale
        if binding is not None:
            attach_amax_group(local, binding)
        local.quantize_(value)  # type: ignore[operator]
        return
    group, parameter = None, module._parameters[name]  # the ranks that have shards of it, if several
    if binding is not None and binding.weight_mesh is not None:
        group = binding.weight_mesh.get_group()
    elif isinstance(parameter, DTensor):
        axes = [i for i, p in enumerate(parameter.placements) if _torch.shard_dim_of(p) is not None]
        assert len(axes) <= 1, "binding a model rejects tp without a weight mesh"
        group = parameter.device_mesh.get_group(axes[0]) if axes else None
    quantizer: Any = _te.quantizer_of(local)
    if _te.has_delayed_scale(local):
        amax = value.abs().amax().reshape(1) if value.numel() else value.new_zeros(1)
        if group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        if not keep_delayed_scale:
            _te_modules.set_delayed_scale(module, name, local, amax)
        local.quantize_(value)  # type: ignore[operator]
        quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))
        return
    if binding is not None and binding.weight_mesh is not None:
        attach_amax_group(local, binding)
    elif group is not None and _te.needs_shared_amax(quantizer):
        _te.set_write_amax_group(local, group)
    local.quantize_(value)  # type: ignore[operator]


# [Note: histories of FSDP2's shards] Delayed scaling: a weight's quantizer reads the module's scale and
# writes the module's amax history. TE creates a new history when its length changes. This happens in the
# first forward if ``amax_history_len`` of ``te.autocast`` differs from that of ``quantized_model_init``. TE
# updates the module's weights but not FSDP2's shards, which keep the previous history. Their scale would stay
# constant, and growing weights would be clipped silently at the format's maximum (TE 2.20.2
# ``adjust_amax_history_length``). So te_fsdp stores the shards and updates them as well.
def sync_quantizers_with_history(binding: ModuleBinding, module: nn.Module) -> None:
    """Set the quantizers of a module's weights, sharded and unsharded, to its scale and history. Local operation."""
    tensors = [(n, _torch.local_of(p)) for n, p in module._parameters.items() if p is not None]
    tensors += [(n, local) for n, ref in binding.fsdp.shards.items() if (local := ref()) is not None]
    for name, local in tensors:
        live = _te.weight_quantizer(module, name)
        if live is None or not _te.is_quantized(local) or not _te.has_delayed_scale(local):
            continue
        quantizer = _te.quantizer_of(local)
        quantizer.scale, quantizer.amax = live.scale, live.amax
        attach_amax_group(local, binding)  # TE may have set a different quantizer


# ----------------------------------------------------------------------------------- ranks with shards of a weight


def register_shard(binding: ModuleBinding, module: nn.Module, name: str, parameter: DTensor) -> None:
    """Register a sharded parameter that is, or will be, quantized.

    Without tp, FSDP2's shard axis is the weight mesh. It is used if no weight mesh was given. Collective over the mesh
    of the parameter, once per module: one max all-reduce of an integer per axis. All ranks raise MeshError if on some
    rank the weight mesh does not consist of the ranks that shard this weight.
    """
    if (
        name in binding.rules
        and binding.rules[name].layout.is_grouped
        and not binding.ep.shards_within_experts
    ):
        return  # every expert is unsharded on one rank
    if binding.amax.agreed or not _has_one_scale(_torch.local_of(parameter), module, name):
        return
    mesh, axes = parameter.device_mesh, _fsdp_axes(binding, name, parameter)
    without_tp = binding.tp_mesh is None or binding.tp_mesh.size() == 1
    if binding.weight_mesh is None and without_tp and axes and mesh.size(axes[0]) > 1:
        # FSDP2 requires axis names on 2-D meshes.
        binding.weight_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axes[0]]]  # type: ignore[unsupported-operation]
    _check_on_all_ranks(binding, name, parameter)


# [Note: when the weight mesh is checked] The weight mesh must be the mesh that shards the weight: FSDP2's
# shard axis times tp, without replicas. ``set_device_mesh`` runs before FSDP2. So the mesh is checked when
# FSDP2 installs the first quantized shard of a module, or before its first all-gather. The ranks exchange the
# result: all raise, or none.
def check_weight_mesh(binding: ModuleBinding, module: nn.Module, local: torch.Tensor) -> None:
    """Run the check of :func:`register_shard` before an all-gather, for shards that were set in a different way."""
    # It also stores a shard of delayed scaling, because the module has the unsharded weight in forward.
    is_delayed = _te.has_delayed_scale(local)
    if binding.amax.agreed and not is_delayed:
        return
    for name, parameter in module._parameters.items():
        if parameter is None or _torch.local_of(parameter) is not local:
            continue
        if is_delayed:
            binding.fsdp.shards[name] = weakref.ref(local)
        is_open = isinstance(parameter, DTensor) and not binding.amax.agreed
        if is_open and _has_one_scale(local, module, name):
            _check_on_all_ranks(binding, name, parameter)


def _check_on_all_ranks(binding: ModuleBinding, name: str, parameter: DTensor) -> None:
    """Raise on all ranks if the weight mesh of any rank contradicts the parameter's mesh. Collective over that mesh."""
    mesh = parameter.device_mesh
    # The weight is sharded by FSDP2's shard axis, and by tp, the last axis of a bound parameter.
    axes = [*_fsdp_axes(binding, name, parameter), *([mesh.ndim - 1] if binding.tp_mesh is not None else [])]
    ranks_wanted = sorted(ranks_along(mesh, axes))
    weight_mesh = binding.weight_mesh
    ranks_got = [dist.get_rank()] if weight_mesh is None else sorted(weight_mesh.mesh.flatten().tolist())
    if on_any_rank(ranks_got != ranks_wanted, mesh):
        expected, why = "the ranks that shard the weight, on every rank", ""
        got = "different ranks on some rank"
        if ranks_got != ranks_wanted:
            expected = f"ranks {ranks_wanted}, the {len(ranks_wanted)} ranks that shard it (FSDP shard x tp)"
            got = "None" if weight_mesh is None else f"ranks {ranks_got}"
            why = (
                "Shards of one weight would be quantized with different scales, or with the scale of a "
                "different weight"
            )
        raise MeshError(
            f"{binding.label(name)}: weight_mesh of a weight with one scale per tensor",
            expected=expected,
            got=got,
            why=why,
            fix='pass weight_mesh=te_fsdp.Meshes(...).weight, the flattened ("dp_shard", "tp") mesh',
        )
    binding.amax.agreed = True


def _has_one_scale(local: torch.Tensor, module: nn.Module, name: str) -> bool:
    """Return whether a weight has, or on meta will have, one scale for shards on several ranks."""
    quantizer = _te.weight_quantizer(module, name) if local.is_meta else _te.quantizer_of(local)
    return quantizer is not None and bool(_te.one_scale_quantizers(quantizer))


def _fsdp_axes(binding: ModuleBinding, name: str, parameter: DTensor) -> list[int]:
    """Return the mesh axes along which FSDP2 shards the weight."""
    mesh = binding.unsharded_mesh(name)
    first = parameter.placements[: parameter.device_mesh.ndim - (0 if mesh is None else mesh.ndim)]
    return [axis for axis, placement in enumerate(first) if _torch.shard_dim_of(placement) is not None]
