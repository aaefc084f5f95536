"""Corrections to the all-gather hooks of TE's quantized tensors.

The stock hooks of TE 2.20.2 with torch 2.11 to 2.15 have nine bugs. The wrappers here fix each of them, with a comment
at the place, and do not affect modules without a te_fsdp binding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from te_fsdp.errors import PlacementError
from te_fsdp.layout import ParameterRule
from te_fsdp.quantized.alignment import Grid, Weight, check_fit, refuse_sharded_rows
from te_fsdp.quantized.amax import has_amax_group, set_amax_group
from te_fsdp.quantized.components import bytes_of_ranks, components_of, keep_rowwise_only, pack_bytes
from te_fsdp.quantized.empty_shards import EMPTY_SHARDS, share_scale
from te_fsdp.quantized.gather_metadata import CustomGather, GatherMetadata, Packed, Replay, replay_gather
from te_fsdp.quantized.shards import attach_amax_group, check_weight_mesh
from te_fsdp.records import BINDING, WEIGHT, ModuleBinding, WeightRecord, is_replicated, weight_record
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_settled import pass_of
from te_fsdp.upstream.fsdp2_unused import keep_zeros_unquantized
from te_fsdp.upstream.patches import Replacements, wrapping
from te_fsdp.upstream.te_derived import derive_columnwise, drop_derived_buffers
from te_fsdp.upstream.te_formats import NVFP4_ROWS, NVFP4_SQUARES, Format


# [Note: assignments by FSDP2] FSDP2 assigns parameters through the module's ``__setattr__``: once after
# sharding, then the unsharded parameter before each forward and backward, and the sharded one afterwards.
# Through these assignments te_fsdp detects a ``fully_shard`` called by the user, and the end of an unsharded
# weight's use.
def mark_unsharded(old: torch.Tensor | None, new: torch.Tensor, binding: ModuleBinding) -> None:
    """Record the format of an unsharded weight that FSDP2 registers in place of its shard. Local operation."""
    if isinstance(old, DTensor) and old.device_mesh != binding.tp_mesh:
        local = _torch.local_of(new)
        if _te.is_quantized(local):
            weight_record(local).unsharded_format = _te.format_of(local)


def release_function_of(
    unsharded: torch.Tensor | None, shard: DTensor | None, binding: ModuleBinding
) -> Callable[[], None] | None:
    """Return a function that frees the memory of an unsharded weight that FSDP2 does not free. Local operation.

    TE derives transposes and padded scales from gathered data. They would stay until the next all-gather. Buffers that
    te_fsdp has concatenated along columns are its own. Call the function when ``shard``, the sharded parameter, is
    registered again. ``None`` unless ``unsharded`` is a quantized weight that FSDP2 has all-gathered.
    """
    local = None if unsharded is None else _torch.local_of(unsharded)
    record: WeightRecord | None = None if local is None else local.__dict__.get(WEIGHT)
    if local is None or record is None or record.unsharded_format is None:
        return None
    if _te.is_grouped(local):
        return local.release  # type: ignore[missing-attribute]
    row = record.unsharded_format
    # FSDP2 may shard along a dim other than the first.
    if shard is None or not any(map(_torch.shard_dim_of, _fsdp_placements(shard, binding))):
        return functools.partial(drop_derived_buffers, local, row)

    def release_columns() -> None:
        drop_derived_buffers(local, row)
        for values in _te.value_buffers_of(local):
            values.untyped_storage().resize_(0)

    return release_columns


def _fsdp_placements(shard: DTensor, binding: ModuleBinding) -> tuple[Placement, ...]:
    """Return the placements that FSDP2 added: all except tp's, which belongs to the last axis."""
    return shard.placements[:-1] if binding.tp_mesh is not None else shard.placements


def check_shard_fits(module: nn.Module, binding: ModuleBinding, name: str, shard: DTensor) -> None:
    """Check that FSDP2's shards of a weight, quantized now or later, fit its format; raise otherwise.

    Local operation on global shapes. Every rank raises the same error before any communication. ``shard`` is the
    parameter that FSDP2 installs. Raises PlacementError, with the nearest mesh and shape that fit, or for a parameter
    that must stay replicated; PrecisionError if an all-gather of the shards cannot provide the columnwise data.
    """
    if is_replicated(module, name):
        raise PlacementError(
            f"{binding.label(name)}: sharded by FSDP2, although te_fsdp.fsdp_no_shard was called for it",
            expected="a replicated parameter",
            got=f"placements {tuple(shard.placements)}",
            why="torch's fully_shard does not support fsdp_no_shard",
            fix="use te_fsdp.fully_shard, or pass the parameter in ignored_params and reduce its gradients yourself",
        )
    rule, quantizer = binding.rules.get(name), _te.weight_quantizer(module, name)
    if rule is None or not rule.quantizable or quantizer is None:
        return
    if not rule.layout.is_grouped:  # all-gathers of all experts send both directions
        refuse_sharded_rows(binding.label(name), quantizer, _torch.local_of(shard))
    mesh, tp = shard.device_mesh, 1 if binding.tp_mesh is None else binding.tp_mesh.size()
    shape, first = list(shard.shape), 0
    if rule.shard_dim is not None:
        shape[rule.shard_dim] //= tp
    if rule.layout.is_grouped:  # one expert must fit; shards between experts always do
        first = 1
        rule = ParameterRule(None if rule.shard_dim is None else rule.shard_dim - 1, quantizable=True)
    weight = Weight.from_quantizer(quantizer, binding.label(name), tuple(shape[first:]), rule, tp)
    for axis, placement in enumerate(_fsdp_placements(shard, binding)):
        dim = _torch.shard_dim_of(placement)
        if dim is None or dim < first:
            continue
        count = mesh.size(axis)
        check_fit(weight, Grid(1 if first else mesh.size() // tp // count, count, tp), dim=dim - first)
        if first:
            binding.ep.shards_within_experts = True


# In backward TE's modules clear a weight's columnwise data, to free data computed from gathered rowwise
# data. They do so for every quantized weight of a module under FSDP2, including replicated ones.
# Columnwise data that TE cannot recompute (MXFP8, one-dimensional blocks) must stay for the next
# backward.
@wrapping
def clear_columnwise_cache(weight: Any, *, stock: Callable[[Any], None]) -> None:
    """Clear the columnwise data of a weight, unless TE cannot recompute it. Local operation."""
    record: WeightRecord | None = weight.__dict__.get(WEIGHT)
    row = None if record is None else record.unsharded_format
    row = row or _te.format_of(weight)
    # Per-tensor scales apply to both directions. Blocks may have separate scales.
    if row is None or row.block == 1 or row.derives_columnwise(_te.quantizer_of(weight)):
        stock(weight)
        if row is not None and row.name == NVFP4_SQUARES:
            weight.update_usage(columnwise_usage=False)  # also clears the columnwise amax


@wrapping
def pre_all_gather(
    self: torch.Tensor,
    mesh: DeviceMesh,
    orig_size: torch.Size,
    contiguous_orig_stride: tuple[int, ...],
    module: nn.Module | None = None,
    mp_policy: Any = None,
    *,
    stock: Callable[..., Any],
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return the buffers that FSDP2 all-gathers, and metadata. Collective as :func:`check_weight_mesh`, at first."""
    # Without a module (as in TE's own tests) use TE's code, as for unbound tensors.
    binding: ModuleBinding | None = None if module is None else module.__dict__.get(BINDING)
    if binding is None or module is None:
        return stock(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    record: WeightRecord | None = self.__dict__.get(WEIGHT)
    gathers: GatherMetadata | None = None if record is None else record.gathers
    state = None if gathers is None or gathers.unit() is None else pass_of(gathers.unit())
    if state is not None and (replayed := replay_gather(self, mesh, orig_size, module, state)) is not None:
        return replayed
    cache_key = id(binding.weight_mesh), id(mesh), orig_size
    if gathers is not None and gathers[:3] != cache_key:
        gathers = None
    row = _checked_format(self, module, binding) if gathers is None else gathers.row
    shares_data = row is not None and row.shares_data
    if shares_data:
        keep_rowwise_only(self)  # no effect unless the user has assigned a tensor with both directions
    # TE's own recomputation (LayerNormMLP(checkpoint=True)) does not call forward, so ``recomputed`` is never set.
    is_recomputed = binding.fsdp.recomputed or module.__dict__.get("checkpoint") is True
    # If the module's forward runs again in backward, an all-gather for backward must send both directions.
    group = _te.fsdp_group_of(module) if is_recomputed and _te.gathers_one_direction(self) else None
    sends_both = group is not None and _torch.in_backward()
    # A shard with shared data has rowwise data only, which TE sends if the weight stays unsharded.
    reported = _te.fsdp_group_of(module) if shares_data else group
    with _fsdp2.report_as_unsharded(reported) if sends_both or shares_data else nullcontext():
        inputs, metadata = stock(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy)
    # TE's hook replaces the tensor's amax group by the FSDP group, so scales would differ between tp
    # ranks.
    if gathers is None:
        gathers = _build_gather_metadata(self, module, binding, mesh, cache_key)
    elif gathers.has_one_scale and not has_amax_group(self, gathers.group):
        # TE's hook has set FSDP2's group, or the weight has a new quantizer.
        set_amax_group(self, gathers.group)
    can_replay = gathers.row.block == 1 and (gathers.is_unconverted or gathers.nothing is not None)
    if state is not None and can_replay and not is_recomputed:
        replay, quantizer = Replay.of(self, inputs, metadata), _te.quantizer_of(self)
        if replay is not None:
            gathers.replays[(*state, quantizer.rowwise_usage, quantizer.columnwise_usage)] = replay
    if not gathers.is_unconverted:
        inputs, metadata = _customize_gather(self, inputs, metadata, mesh, orig_size)
    if group is not None:
        _fsdp2.resize_all_gather_outputs(group, self, [mesh.size() * buffer.numel() for buffer in inputs])
    return inputs, metadata


def _checked_format(shard: torch.Tensor, module: nn.Module, binding: ModuleBinding) -> Format | None:
    """Return the format of a shard. Local operation.

    Raise PrecisionError if its all-gather lacks the columnwise data, and PlacementError if FSDP2 reshards it to fewer
    ranks.
    """
    # A weight that was on meta when FSDP2 sharded it is checked here.
    row = _te.format_of(shard)
    if row is not None and row.name == NVFP4_ROWS:
        names = [n for n, p in module._parameters.items() if p is not None and _torch.local_of(p) is shard]
        refuse_sharded_rows(binding.label(names[0] if names else "weight"), _te.quantizer_of(shard), shard)
    if fsdp2_units.reshards_to_fewer_ranks(_te.fsdp_group_of(module)):
        raise PlacementError(
            f"{binding.name or 'model'}: quantized weights with an integer reshard_after_forward",
            expected="reshard_after_forward=True or False",
            why="FSDP2 would make a parameter of the gathered buffers, but these are bytes of a quantized weight",
            fix="pass a bool to fully_shard of units with quantized weights",
        )
    return row


def _build_gather_metadata(
    shard: torch.Tensor,
    module: nn.Module,
    binding: ModuleBinding,
    mesh: DeviceMesh,
    cache_key: tuple[int, int, torch.Size],
) -> GatherMetadata:
    """Build and cache the gather metadata of a shard. Same collective as :func:`check_weight_mesh`."""
    check_weight_mesh(binding, module, shard)
    attach_amax_group(shard, binding)
    _fsdp2_patches.disable_flat_shards(module, shard)
    keep_zeros_unquantized(module, shard)
    ranks, full_shape = mesh.size(), cache_key[2]
    row = _te.format_of(shard)
    assert row is not None
    is_even = tuple(shard.shape[1:]) == tuple(full_shape[1:]) and full_shape[0] % ranks == 0
    one_scale = bool(_te.one_scale_quantizers(_te.quantizer_of(shard)))
    keep_rowwise_only(shard)  # no effect if te_fsdp.fully_shard and materialize did so already
    group = _te.fsdp_group_of(module)
    unit, is_unconverted = weakref.ref(group), ranks > 1 and is_even
    nothing = torch.empty(0, dtype=torch.uint8, device=shard.device) if ranks == 1 else None
    gathers = GatherMetadata(
        *cache_key, row, one_scale, binding.weight_group, is_unconverted, unit, {}, nothing
    )
    weight_record(shard).gathers = gathers
    return gathers


def _customize_gather(
    shard: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    metadata: Any,
    mesh: DeviceMesh,
    orig_size: torch.Size,
) -> tuple[tuple[torch.Tensor, ...], CustomGather]:
    """Return the buffers that FSDP2 all-gathers in place of TE's, and how to convert the result.

    Collective over ``mesh`` if a rank has no rows (one broadcast of the scale), else local.
    """
    ranks = mesh.size()
    # FSDP2 copies only the first of several buffers then (pytorch PR #197999). Nothing is sent, and the
    # unsharded weight uses the shard's own buffers.
    if ranks == 1:
        nothing = torch.empty(0, dtype=torch.uint8, device=inputs[0].device)
        return (nothing,), CustomGather(metadata, buffers=inputs)
    # Along dims other than the first, FSDP2 only concatenates buffers of the parameter's own shape.
    if tuple(shard.shape[1:]) != tuple(orig_size[1:]):
        rows, columns = shard.shape
        buffers_at = {c.tensor.data_ptr(): c for c in components_of(shard, "gathered weight")}
        sent = [buffers_at[i.data_ptr()] for i in inputs]  # inputs start where their buffers start
        buffers = []
        for component in sent:
            gathered_columns = component.tensor.shape[1] * ranks
            if component.name.endswith("wise_scale_inv"):  # data has no padding
                is_columnwise = component.name.startswith("columnwise")
                sizes = _te.quantizer_of(shard).get_scale_shape((rows, columns * ranks), is_columnwise)
                gathered_columns = int(sizes[-1])
            buffers.append((component.tensor.shape, gathered_columns))
        flats, locations = pack_bytes([c.tensor.contiguous().view(1, -1) for c in sent], (1, rows, columns))
        inputs, packed = tuple(flat[0] for flat in flats), Packed((rows, columns), locations, buffers)
        return inputs, CustomGather(metadata, packed=packed)
    # FSDP2 requires buffers of one size from all ranks. Short or empty float8 shards are padded with rows
    # that the unsharded weight omits.
    share_scale(shard, mesh, orig_size[0])
    rows, padded = -(-orig_size[0] // ranks), []  # the number of rows of the first rank
    for data in inputs:
        if data.shape[0] < rows:
            data = torch.cat([data, data.new_zeros((rows - data.shape[0], *data.shape[1:]))])
        padded.append(data)
    return tuple(padded), CustomGather(metadata, rows=orig_size[0])


def _join_columns(outputs: tuple[torch.Tensor, ...], packed: Packed) -> tuple[torch.Tensor, ...]:
    """Return the buffers of the unsharded weight as new tensors, in TE's order and shapes; free ``outputs``. Local."""
    rows, columns = packed.shape
    ranks = outputs[0].numel() // (rows * columns)
    flats = bytes_of_ranks(outputs, (1, rows, columns), 2, ranks)[0]
    buffers = []
    for flat, (shape, gathered_columns) in zip(packed.places.typed(flats), packed.buffers, strict=True):
        shards = flat.view(ranks, *shape)
        buffer = torch.zeros((shape[0], gathered_columns), dtype=flat.dtype, device=flats.device)
        buffer[:, : ranks * shape[1]].view(shape[0], ranks, shape[1]).copy_(shards.transpose(0, 1))
        buffers.append(buffer)
    for output in outputs:  # FSDP2 would free them with the weight only, and allocates them again
        output.untyped_storage().resize_(0)
    return tuple(buffers)


@wrapping
def post_all_gather(
    self: torch.Tensor,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    stock: Callable[..., Any],
) -> Any:
    """Return the unsharded weight of gathered buffers, or fill ``out``. Local operation."""
    # From the second all-gather on, FSDP2 passes `out` as the DTensor around the unsharded weight. TE
    # would set the gathered buffers on that wrapper, and kernels would keep reading the old ones.
    target = _torch.local_of_dtensor(out) if isinstance(out, DTensor) else out
    buffers, te_metadata, inner_tensors = all_gather_outputs, metadata, None
    if isinstance(metadata, CustomGather):
        # FSDP2 must not free the shard's memory.
        buffers, te_metadata, inner_tensors = metadata.buffers, metadata.metadata, ()
        if metadata.rows:
            # The padding is at the end, so the rows are a contiguous part of the gathered buffer, which FSDP2
            # frees.
            buffers = (all_gather_outputs[0][: metadata.rows],)
        elif metadata.packed is not None:
            buffers = _join_columns(all_gather_outputs, metadata.packed)
    tensor, gathered = stock(self, buffers, te_metadata, param_dtype, out=target)
    # Buffers that TE has removed for backward stay allocated until FSDP2 frees them ([Note: recomputed forwards]).
    record: WeightRecord | None = self.__dict__.get(WEIGHT)
    gathers: GatherMetadata | None = None if record is None else record.gathers
    row = _te.format_of(self) if gathers is None else gathers.row
    for buffer, value in zip(row.dropped if row is not None else (), buffers, strict=False):
        if getattr(tensor, buffer.attribute) is None:
            setattr(tensor, buffer.attribute, value)
    if gathers is not None and gathers.row.shares_data:
        assert gathers.row.block is not None
        derive_columnwise(tensor, gathers.row.block)
    if out is None:
        # FSDP2 calls `torch.as_strided` on the first gathered tensor. TE's version scrambles the
        # transpose that backward on Hopper reads, without marking it invalid (confirmed on an H200). TE
        # computes it on demand.
        _te.drop_transpose(tensor)
    else:
        # Only the first all-gather passes a float8 scale on. A shard with a new scale tensor (`shard.data
        # = ...`) would be read with the old scale.
        scale = getattr(self, _te.SCALE, None)
        if scale is None or scale is not getattr(tensor, _te.SCALE, None):
            _te.copy_scale(tensor, self)
    return tensor, gathered if inner_tensors is None else inner_tensors


# [Note: recomputed forwards] Before a backward FSDP2 all-gathers a resharded unit again, and TE then keeps
# only the data for backward GEMMs. When activations are recomputed, the data for forward GEMMs is missing (TE
# raises an internal error). Float8 and float8-block weights are sent as rowwise data, which te_fsdp keeps at
# no cost, and so are 2-D MXFP8 weights. Other MXFP8 weights have independent rowwise and columnwise data. If
# one is missing, both are all-gathered at this point. Later backwards all-gather both immediately.
def gather_missing_direction(module: nn.Module, binding: ModuleBinding) -> None:
    """All-gather the missing direction of unsharded weights, before a module's forward is recomputed in backward.

    Collective over ``dp_shard`` if one is missing, at most in a module's first such forward: one all-gather. The same
    direction is missing on every rank.
    """
    missing = []
    for name, parameter in module._parameters.items():
        local = None if parameter is None else _torch.local_of(parameter)
        if local is None or not _te.gathers_one_direction(local) or _te.is_grouped(local):
            continue
        if not all(local.get_usages().values()):  # type: ignore[attr-defined]
            missing.append(name)
    if missing:
        binding.fsdp.recomputed = True
        _fsdp2.regather_parameters(_te.fsdp_group_of(module), module, missing)


PATCHES: Replacements = (
    *EMPTY_SHARDS,
    (None, "columnwise", clear_columnwise_cache),
    (None, "gather", pre_all_gather),
    (None, "gathered", post_all_gather),
)
