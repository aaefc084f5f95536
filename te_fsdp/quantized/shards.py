"""Shards of quantized weights: one scale for one weight, and the way through FSDP2's ``fully_shard``.

Every way to write into a quantized weight asks the tensor for its reduction group (TE 2.20.2
``update_quantized`` of the per-tensor quantizers): initialisation, the optimizer's requantization, loading
from high precision, ``copy_`` and ``quantize_`` by the user. te_fsdp marks the weights of bound modules with
the weight mesh's group, and the mark sticks (:mod:`te_fsdp.quantized.amax`).

Delayed scaling: a weight's quantizer reads the module's scale and writes the module's amax history, always. TE makes a
new history when the length changes, as it does in the first forward if ``te.autocast`` has another
``amax_history_len`` than ``quantized_model_init`` had. It tells the weights of the module, but not FSDP2's shards,
which go on with the old history: their scale stays as it was, and weights that grow are cut off at the format's
largest value, in silence (TE 2.20.2 ``adjust_amax_history_length``). So the shards are remembered, and told too.

FSDP2 splits parameters with tensor operations for which TE's block formats have no quantized answer:
float8-block and NVFP4 weights come out dequantized, MXFP8 ones raise or dequantize (TE 2.20.2). te_fsdp hands
FSDP2 the high-precision values instead, quantizes each shard afterwards, and copies the whole weight's bytes into it.

The weight mesh must be the one that cuts the weight: FSDP2's shard axis times tp, no replicas, nothing left out.
``set_device_mesh`` cannot know what FSDP2 will do. So the mesh is looked at when FSDP2 installs the first quantized
shard of a module, at the latest before its first gather, and the ranks agree on what they see: all raise, or none.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import on_any_rank
from te_fsdp.errors import MeshError
from te_fsdp.layout import Box, chunk_range
from te_fsdp.quantized.amax import has_amax_group, patch_clone_of_scales, reduce_newest_amax, set_amax_group
from te_fsdp.quantized.components import components_of, keep_rowwise_only
from te_fsdp.quantized.grouped_weight import quantize_experts
from te_fsdp.records import ModuleBinding, binding_of, is_replicated, iter_param_owners, replace_local_tensor
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn

#: A parameter by its owner's id and its name there.
Key: TypeAlias = tuple[int, str]


class StashedWeight(NamedTuple):
    """A quantized weight on its way through ``fully_shard``: tp-local, its bytes are those of the shards.

    Attributes:
        places: Modules that it is registered at, each with its name there: several if it is tied.
    """

    places: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    whole: torch.Tensor
    quantizer: Any


def stash_quantized(model: nn.Module) -> list[StashedWeight]:
    """Replace quantized weights on the device by their high-precision values. Local operation.

    Tied weights stay tied: one replacement takes all places of a weight.
    """
    stashed: dict[int, StashedWeight] = {}
    replacements: dict[int, nn.Parameter] = {}
    for _, module, name, parameter in iter_param_owners(model):
        binding, local = binding_of(module), _torch.local_of(parameter)
        if binding is None or local.is_meta or not _te.is_quantized(local) or is_replicated(module, name):
            continue
        key = id(parameter)
        if key not in stashed:
            kept = _te.high_precision_value(local)
            value = local.dequantize() if kept is None else kept.to(local.device)
            # With the parameter itself, whose id is not given to another object then.
            stashed[key] = StashedWeight([], parameter, local, _te.quantizer_of(local).copy())
            replacements[key] = replace_local_tensor(parameter, value)
        stashed[key].places.append((module, name))
        module._parameters[name] = replacements[key]
        binding.fsdp.needs_requantize = True
    return list(stashed.values())


def restore_quantized(stashed: list[StashedWeight]) -> None:
    """Quantize the shards of stashed weights: each is its part of the whole weight, to the byte.

    Collective over the weight mesh for formats with one scale per tensor.
    """
    for item in stashed:
        module, name = item.places[0]
        parameter, binding = module._parameters[name], binding_of(module)
        assert parameter is not None and binding is not None
        value = _torch.local_of(parameter).detach()
        local = quantize_shard(value, item.quantizer, binding)
        _copy_bytes(item, parameter, local, binding)
        keep_rowwise_only(local)
        if _te.high_precision_value(item.whole) is not None:
            _te.attach_high_precision_value(local, value.cpu())
        shard = replace_local_tensor(parameter, local)
        for owner, own in item.places:
            owner._parameters[own] = shard
            its = binding_of(owner)
            assert its is not None
            # The high-precision one would stay until FSDP2 installs this one.
            if pair := its.fsdp.pairs.get(own):
                pair.shard = shard  # type: ignore[bad-assignment]
            its.fsdp.needs_requantize = False


def _copy_bytes(
    item: StashedWeight, parameter: torch.Tensor, local: torch.Tensor, binding: ModuleBinding
) -> None:
    """Overwrite a new shard with its rows of the tp-local weight. Local operation.

    Quantizing dequantized values gives the same values, but not always the same bytes: MXFP8 rounds the amax of a
    block up to a power of two, and the dequantized amax may lie below one that the original exceeded; its columnwise
    bytes come from the original values, not from the rowwise ones.
    """
    mesh = parameter.device_mesh  # type: ignore[missing-attribute]
    name = item.places[0][1]
    tp = binding.whole_mesh(name)
    axis = mesh.ndim - 1 - (0 if tp is None else tp.ndim)
    dim = _torch.shard_dim_of(parameter.placements[axis]) or 0  # type: ignore[missing-attribute]
    low, high = chunk_range(item.whole.shape[dim], mesh.size(axis), mesh.get_coordinate()[axis])
    label = binding.label(name)
    if not _te.is_grouped(local):
        _copy_part(local, item.whole, dim, low, label)
        _te.drop_transpose(local)
        return
    weight: Any = local
    experts: list[torch.Tensor] = item.whole.experts  # type: ignore[missing-attribute]
    if dim == 0:  # whole experts
        experts, dim, low = experts[low:high], 1, 0
    for one, whole in zip(weight.experts, experts, strict=True):
        _copy_part(one, whole, dim - 1, low, label)
    weight.derive_transposes()


def _copy_part(local: torch.Tensor, whole: torch.Tensor, dim: int, low: int, label: str) -> None:
    """Overwrite a shard with its bytes of ``whole``, from ``low`` on along ``dim``."""
    row = _te.format_of(local)
    if row is None or not row.buffers:
        return  # hybrids: no table of their buffers
    shape, zeros = tuple(local.shape), (0,) * local.ndim
    if not local.numel():
        return  # an empty shard has no bytes; its scale came with its quantization
    box = Box((*zeros[:dim], low, *zeros[dim + 1 :]), zeros, shape)
    sources = {component.name: component for component in components_of(whole, label)}
    for target in components_of(local, label):
        if target.name in sources:
            source, (part,) = sources[target.name], target.boxes([box], label, tuple(whole.shape))
            target.tensor[part.local_slices()].copy_(source.tensor[part.original_slices()])


# ---------------------------------------------------------------------------------------- one scale for one weight


def attach_amax_group(local: torch.Tensor, binding: ModuleBinding) -> None:
    """Set the group over which quantizations of a local shard reduce the amax.

    Local operation. Nothing to do for formats whose scales are local to a block. Without a weight mesh nothing cuts
    the weight, and a group that TE has put there is dropped.
    """
    if _te.is_grouped(local):
        set_amax_group(local, _experts_group(binding))
        return
    if has_amax_group(local, binding.weight_group):
        return  # what every gather after the first finds
    if not _te.is_quantized(local):
        return
    patch_clone_of_scales(local)
    if _te.one_scale_quantizers(_te.quantizer_of(local)):
        set_amax_group(local, binding.weight_group)


def quantize_shard(value: torch.Tensor, quantizer: Any, binding: ModuleBinding) -> torch.Tensor:
    """Quantize one rank's shard with the scale of the whole weight.

    Collective (max all-reduce of one or two floats) over the weight mesh for formats with one scale per
    tensor, local for the others.

    The quantizer is left without a group afterwards.
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
    rule = binding.rules.get("weight")
    mesh = binding.tp_mesh if rule is not None and rule.shard_dim is not None else None
    if binding.ep.is_cut_within and binding.weight_mesh is not None:
        mesh = binding.weight_mesh
    return None if mesh is None else mesh.get_group().group_name


def requantize(local: torch.Tensor, binding: ModuleBinding) -> None:
    """Give a weight that TE quantized rank by rank the scale of the whole weight, in place.

    Uses the value from before quantization where TE kept it, the dequantized bytes otherwise. Collective over
    the weight mesh for per-tensor formats; nothing to do for the others, whose scales are local to a block.
    """
    patch_clone_of_scales(local)
    if _te.has_delayed_scale(local):  # every rank has quantized with the same scale
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


def quantize_whole(
    module: nn.Module,
    name: str,
    local: torch.Tensor,
    value: torch.Tensor,
    *,
    keep_delayed_scale: bool = False,
) -> None:
    """Write a value into a quantized parameter, with the scale that the whole weight has.

    Collective over the ranks that hold pieces of the weight (maximum of one or two floats) for formats with one scale
    per tensor. The value is float32, of the shape of ``local``. ``keep_delayed_scale``: use delayed scaling's scale
    that is there, instead of the one of this value.
    """
    binding = binding_of(module)
    if _te.is_grouped(local):  # every expert has a scale of its own
        if binding is not None:
            attach_amax_group(local, binding)
        local.quantize_(value)  # type: ignore[operator]
        return
    group = _group_of_whole(module._parameters[name], binding)
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


def _group_of_whole(parameter: torch.Tensor | None, binding: ModuleBinding | None) -> Any | None:
    """Return the process group of the ranks that have shards of a parameter, or ``None`` for a single rank."""
    if binding is not None and binding.weight_mesh is not None:
        return binding.weight_mesh.get_group()
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    cuts = [i for i, p in enumerate(parameter.placements) if _torch.shard_dim_of(p) is not None]
    assert len(cuts) <= 1, "tp without a weight mesh is refused when the model is bound"
    return mesh.get_group(cuts[0]) if cuts else None


def sync_quantizers_with_history(binding: ModuleBinding, module: nn.Module) -> None:
    """Point the quantizers of a module's weights, gathered and not, at its scale and history. Local operation."""
    tensors = [(n, _torch.local_of(p)) for n, p in module._parameters.items() if p is not None]
    tensors += [(n, local) for n, ref in binding.fsdp.shards.items() if (local := ref()) is not None]
    for name, local in tensors:
        live = _te.weight_quantizer(module, name)
        if live is None or not _te.is_quantized(local) or not _te.has_delayed_scale(local):
            continue
        quantizer = _te.quantizer_of(local)
        quantizer.scale, quantizer.amax = live.scale, live.amax
        attach_amax_group(local, binding)  # TE may have put another quantizer there


# ---------------------------------------------------------------------------------- which ranks hold the pieces


def register_shard(binding: ModuleBinding, module: nn.Module, name: str, parameter: DTensor) -> None:
    """Take note of a parameter that FSDP2 has cut and that is, or will be, quantized.

    Without tensor parallelism FSDP2's shard axis is the whole weight mesh, and is taken as such where none was given.
    Collective over the mesh of the parameter, once per module: one max all-reduce of an integer per axis.

    Raises:
        MeshError: On all ranks, if on any of them the weight mesh does not consist of the ranks that hold this
            weight's pieces.
    """
    if name in binding.rules and binding.rules[name].layout.is_grouped and not binding.ep.is_cut_within:
        return  # every expert lies whole on one rank
    if binding.amax.agreed or not _has_one_scale(_torch.local_of(parameter), module, name):
        return
    mesh, axes = parameter.device_mesh, _fsdp_axes(binding, name, parameter)
    without_tp = binding.tp_mesh is None or binding.tp_mesh.size() == 1
    if binding.weight_mesh is None and without_tp and axes and mesh.size(axes[0]) > 1:
        # FSDP2 asks for names on 2-D meshes.
        binding.weight_mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[axes[0]]]  # type: ignore[unsupported-operation]
    _agree(binding, name, parameter)


def agree_on_weight_mesh(binding: ModuleBinding, module: nn.Module, local: torch.Tensor) -> None:
    """The same before a gather of a module's weight, for shards that came to the module by another way.

    Also remembers a shard of delayed scaling while its module holds it: in forward that holds the gathered weight.
    """
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
            _agree(binding, name, parameter)


def _agree(binding: ModuleBinding, name: str, parameter: DTensor) -> None:
    """Raise on all ranks if on any the weight mesh contradicts the parameter's own mesh. Collective over that."""
    mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert at is not None
    # What cuts the weight: FSDP2's shard axis, and tp, which is the last axis of a bound parameter.
    axes = [*_fsdp_axes(binding, name, parameter), *([mesh.ndim - 1] if binding.tp_mesh is not None else [])]
    index = tuple(slice(None) if axis in axes else at[axis] for axis in range(mesh.ndim))
    want = sorted(mesh.mesh[index].flatten().tolist())
    own = binding.weight_mesh
    have = [dist.get_rank()] if own is None else sorted(own.mesh.flatten().tolist())
    if on_any_rank(have != want, mesh):
        expected, why = "on every rank the ranks that hold pieces of the weight", ""
        got = "others on another rank"
        if have != want:
            expected = f"ranks {want}, the {len(want)} that hold pieces of it (FSDP shard x tp)"
            got = "None" if own is None else f"ranks {have}"
            why = "Pieces of one weight would be quantized with different scales, or scales of other weights mixed in"
        raise MeshError(
            f"{binding.label(name)}: weight_mesh of a weight with one scale per tensor",
            expected=expected,
            got=got,
            why=why,
            fix='pass weight_mesh=te_fsdp.Meshes(...).weight, the flattened ("dp_shard", "tp") mesh',
        )
    binding.amax.agreed = True


def _has_one_scale(local: torch.Tensor, module: nn.Module, name: str) -> bool:
    """Whether a weight has, or on meta will have, one scale, of which ranks hold pieces together."""
    quantizer = _te.weight_quantizer(module, name) if local.is_meta else _te.quantizer_of(local)
    return quantizer is not None and bool(_te.one_scale_quantizers(quantizer))


def _fsdp_axes(binding: ModuleBinding, name: str, parameter: DTensor) -> list[int]:
    """Return the mesh axes along which FSDP2 shards the weight."""
    own = binding.whole_mesh(name)
    first = parameter.placements[: parameter.device_mesh.ndim - (0 if own is None else own.ndim)]
    return [axis for axis, placement in enumerate(first) if _torch.shard_dim_of(placement) is not None]
