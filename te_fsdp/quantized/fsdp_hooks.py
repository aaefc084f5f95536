"""Corrections to the all-gather hooks of TE's quantized tensors.

Faults of the stock hooks (TE 2.20.2 with torch 2.11 to 2.15), each mended by a wrapper that leaves tensors of
modules without a te_fsdp binding alone:

1. From the second gather on FSDP2 passes ``out`` as the DTensor around the unsharded weight. TE writes the
   gathered buffers onto that wrapper, and the kernels go on reading the old ones.
2. Every gather replaces the tensor's amax group by the FSDP group, so that tensor-parallel ranks drift to
   different scales.
3. With a shard axis of size 1 FSDP2 copies only the first of several buffers (pytorch PR #197999). Nothing is sent
   then: the gathered weight gets the shard's own buffers.
4. FSDP2 passes the first gathered tensor through ``torch.as_strided``, and TE's version scrambles the
   transpose that Hopper's backward reads, without marking it invalid (confirmed on an H200). The first result
   therefore goes out without its transpose, which TE then makes from the bytes when it is needed.
5. FSDP2 wants buffers of one size from all ranks. Float8 shards that are short, or empty, are padded with rows that
   the gathered weight leaves out.
6. Along another dim than the first FSDP2 puts together only buffers of the parameter's own shape: they are packed
   (:mod:`te_fsdp.quantized.components`).
7. Only the first gather hands a float8 scale over. A shard that is given another scale tensor (``shard.data = ...``)
   would be read with the old one.
8. In backward TE's modules clear the columnwise data of a weight, to free what TE computed from gathered rowwise data.
   They do so for every quantized weight of a module under FSDP2, replicated ones included. Columnwise data that TE
   cannot compute again (MXFP8, one-dimensional blocks) must stay for the next backward.
9. Before a backward FSDP2 gathers a resharded unit again, and TE then keeps of a weight only what backward GEMMs read.
   When the forward is run again there for its activations, what forward GEMMs read is missing (TE raises from deep
   inside). Float8 and float8-block weights are sent in the bytes that forward reads: te_fsdp hands these back at no
   cost. Of MXFP8 weights TE gathers rowwise or columnwise data, which are independent. Where one is missed, both are
   gathered, then and there; later backwards gather both at once.

FSDP2 assigns parameters through the module's ``__setattr__``: once when it cuts them, then the gathered one before
each forward and backward and the sharded one after it. These are the only moments at which te_fsdp learns of a
``fully_shard`` called by the user, and of the end of a gathered weight's life.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.errors import PlacementError
from te_fsdp.layout import ParameterRule
from te_fsdp.quantized.alignment import Grid, Weight, check_fit
from te_fsdp.quantized.amax import has_amax_group, patch_empty_shards, set_amax_group, share_scale
from te_fsdp.quantized.components import (
    BufferLocations,
    bytes_of_ranks,
    components_of,
    keep_rowwise_only,
    pack_bytes,
)
from te_fsdp.quantized.shards import agree_on_weight_mesh, attach_amax_group
from te_fsdp.records import BINDING, ModuleBinding, is_replicated
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    fsdp2_state as _fsdp2,
    te as _te,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.fsdp2_unused import keep_zeros_unquantized
from te_fsdp.upstream.patches import apply_patch, apply_patch_to

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from te_fsdp.upstream.te_formats import Format

#: Attribute of the local tensor of a gathered weight, or of one that was gathered: its format.
GATHERED = "_te_fsdp_gathered"
#: Attribute of the local tensor of a quantized shard: what is known of its gathers (``all_gather``).
GATHERS = "_te_fsdp_gathers"


def mark_unsharded(old: torch.Tensor | None, new: torch.Tensor, binding: ModuleBinding) -> None:
    """Mark a gathered weight that FSDP2 installs in place of its shard. Local operation."""
    if isinstance(old, DTensor) and old.device_mesh != binding.tp_mesh:
        local = _torch.local_of(new)
        if _te.is_quantized(local):
            local.__dict__[GATHERED] = _te.format_of(local)


def release_function_of(
    gathered: torch.Tensor | None, shard: DTensor | None, binding: ModuleBinding
) -> Callable[[], None] | None:
    """Return a function that frees the derived buffers of a gathered weight. Local operation.

    TE derives transposes and padded scales from gathered bytes. FSDP2 does not free them, so they would stay until the
    next all-gather. Buffers that were joined along columns belong to te_fsdp.

    ``shard`` replaces ``gathered``.

    Returns:
        To be called at the end of every forward and backward. ``None`` if this is not a gathered quantized weight.
    """
    local = None if gathered is None else _torch.local_of(gathered)
    if local is None or GATHERED not in local.__dict__:
        return None
    if _te.is_grouped(local):
        return local.release  # type: ignore[missing-attribute]
    row = local.__dict__[GATHERED]
    # Cut along another dim than the first?
    within = shard is not None and any(map(_torch.shard_dim_of, _fsdp_placements(shard, binding)))
    return functools.partial(_release_columns if within else _te.drop_derived_buffers, local, row)


def _release_columns(local: torch.Tensor, row: Format) -> None:
    _te.drop_derived_buffers(local, row)
    for values in _te.value_buffers_of(local):
        values.untyped_storage().resize_(0)


def _fsdp_placements(shard: DTensor, binding: ModuleBinding) -> tuple[Placement, ...]:
    """Return the placements that FSDP2 added: all except tp's, which belongs to the last axis."""
    return shard.placements[:-1] if binding.tp_mesh is not None else shard.placements


def check_cut(module: nn.Module, binding: ModuleBinding, name: str, shard: DTensor) -> None:
    """Raise if FSDP2's shards of a weight, quantized now or later, do not fit the format.

    Local operation on global shapes: every rank raises the same, before anything is communicated. ``shard`` is what
    FSDP2 installs.

    Raises:
        PlacementError: Names the weight, and the nearest mesh and shape that fit; also for a parameter that was to
            stay whole.
    """
    if is_replicated(module, name):
        raise PlacementError(
            f"{binding.label(name)}: sharded by FSDP2, although te_fsdp.fsdp_no_shard was called for it",
            why="torch's fully_shard does not support this mark",
            fix="use te_fsdp.fully_shard; or pass it to torch's in ignored_params, and reduce its gradients",
        )
    rule, quantizer = binding.rules.get(name), _te.weight_quantizer(module, name)
    if rule is None or not rule.quantizable or quantizer is None:
        return
    mesh, tp = shard.device_mesh, 1 if binding.tp_mesh is None else binding.tp_mesh.size()
    shape, first = list(shard.shape), 0
    if rule.shard_dim is not None:
        shape[rule.shard_dim] //= tp
    if rule.layout.is_grouped:  # what must fit is one expert; cuts between experts always do
        first = 1
        rule = ParameterRule(None if rule.shard_dim is None else rule.shard_dim - 1, quantizable=True)
    weight = Weight.made_by(quantizer, binding.label(name), tuple(shape[first:]), rule, tp)
    for axis, placement in enumerate(_fsdp_placements(shard, binding)):
        dim = _torch.shard_dim_of(placement)
        if dim is None or dim < first:
            continue
        count = mesh.size(axis)
        check_fit(weight, Grid(1 if first else mesh.size() // tp // count, count, tp), dim=dim - first)
        if first:
            binding.ep.is_cut_within = True


def patch_new_zeros(local: torch.Tensor) -> None:
    """Let FSDP2 cut an MXFP8 weight that lies on the device. Local operation; other formats are left alone.

    FSDP2 copies its piece, which TE cuts byte for byte, into ``local.new_zeros(shape)``. That of TE 2.20.2 has scales
    without padding, into which those of the piece do not go unless their numbers happen to be multiples of 128 and 4.
    The attribute belongs to this tensor object alone.
    """
    row = _te.format_of(local)
    if row is not None and row.name == "mxfp8":
        apply_patch_to(local, "new zeros", functools.partial(_zeros, weakref.ref(local)))


def _zeros(reference: weakref.ref[torch.Tensor], size: Sequence[int], **options: Any) -> torch.Tensor:
    """Return ``reference().new_zeros(size)`` with padded scale buffers."""
    local = reference()
    assert local is not None
    block = _te.format_of(local).block  # type: ignore[union-attr]
    if options or any(length % block for length in size):  # FSDP2's sharding raises right after this
        return type(local).new_zeros(local, size, **options)
    quantizer = _te.quantizer_of(local).copy()
    quantizer.set_usage(**local.get_usages())  # type: ignore[attr-defined]
    zeros = quantizer.make_empty(tuple(size), dtype=local.dtype, device=local.device)
    for buffer in _te.buffers_of(zeros):
        buffer.zero_()
    return zeros


class _GatherMetadata(NamedTuple):
    """What is the same in all gathers of a shard, found in the first one and kept on the shard (``GATHERS``).

    Found anew for a shard that takes another's place in its module (``MeshModule._take_over``), and when one of the
    first three has changed. Of the quantizer, which TE replaces when the length of delayed scaling's history changes,
    nothing is kept but its kind: the mark on it is looked at in every gather.
    """

    weight_mesh: int  #: ``id`` of the binding's, which goes from ``None`` to a mesh and never to another one
    ranks: int  #: That the gather is over
    whole: torch.Size  #: Shape of the gathered weight
    row: Format
    has_one_scale: bool  #: Whether the amax of the whole weight is reduced over a group
    group: str | None  #: Name of that group; ``None`` where nothing cuts the weight
    is_as_it_is: bool  #: Whether FSDP2 gathers what TE gives it


class _Packed(NamedTuple):
    """Layout of packed tensors of a shard along columns."""

    shape: tuple[int, int]  #: Of the shard
    places: BufferLocations
    buffers: list[tuple[torch.Size, int]]  #: Shape of a rank's, and columns of the whole one with its padding


class _CustomGather(NamedTuple):
    """Metadata of a gather that sends something else than TE would: what TE's buffers come from, one of three."""

    metadata: Any  #: TE's
    buffers: tuple[torch.Tensor, ...] = ()  #: TE's, of a shard that is the whole weight
    rows: int = 0  #: Of uneven shards: those of the whole weight
    packed: _Packed | None = None  #: Of shards that are cut along their columns


def patch_fsdp_hooks() -> None:
    """Wrap the hooks of every quantized tensor class that has them; once per class, later calls do nothing."""
    patch_empty_shards()
    apply_patch("columnwise", _wrap_clear)
    apply_patch("gather", _wrap_pre)
    apply_patch("gathered", _wrap_post)


def _wrap_clear(stock: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(stock)
    def clear_columnwise_cache(weight: Any) -> None:
        row = _te.format_of(weight)
        if row is None or row.derives_columnwise(_te.quantizer_of(weight)):
            stock(weight)

    return clear_columnwise_cache


def _wrap_pre(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)  # FSDP2 counts the parameters of the signature
    def fsdp_pre_all_gather(
        self: torch.Tensor,
        mesh: DeviceMesh,
        orig_size: torch.Size,
        contiguous_orig_stride: tuple[int, ...],
        module: nn.Module | None = None,
        mp_policy: Any = None,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        # Called by hand, as TE's own tests do, it may have no module: then it is TE's, as of any unbound tensor.
        binding: ModuleBinding | None = None if module is None else module.__dict__.get(BINDING)
        if binding is None or module is None:
            return stock(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy)
        ranks, known = mesh.size(), self.__dict__.get(GATHERS)
        now = id(binding.weight_mesh), ranks, orig_size
        if known is not None and known[:3] != now:
            known = None
        # TE's own recomputation (LayerNormMLP(checkpoint=True)) passes by no forward that could ask.
        again = binding.fsdp.recomputed or module.__dict__.get("checkpoint") is True
        # Gathers for backward must bring both directions where the module runs its forward again there.
        group = _te.fsdp_group_of(module) if again and _te.gathers_one_direction(self) else None
        both = group is not None and _torch.in_backward()
        with _fsdp2.report_as_unsharded(group) if both else nullcontext():
            inputs, metadata = stock(self, mesh, orig_size, contiguous_orig_stride, module, mp_policy)
        if known is None:
            known = _build_gather_metadata(self, module, binding, now)
        elif known.has_one_scale and not has_amax_group(self, known.group):
            # TE's hook has put FSDP2's group there, or the weight another quantizer.
            set_amax_group(self, known.group)
        if not known.is_as_it_is:
            inputs, metadata = _customize_gather(self, inputs, metadata, mesh, orig_size)
        if group is not None:
            _fsdp2.resize_all_gather_outputs(group, self, [mesh.size() * buffer.numel() for buffer in inputs])
        return inputs, metadata

    # Else FSDP2, which counts the parameters at every gather, has inspect read all of TE's function again.
    fsdp_pre_all_gather.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    return fsdp_pre_all_gather


def _build_gather_metadata(
    shard: torch.Tensor, module: nn.Module, binding: ModuleBinding, now: tuple[int, int, torch.Size]
) -> _GatherMetadata:
    """Build and cache the gather metadata of a shard. Collective as :func:`agree_on_weight_mesh`."""
    agree_on_weight_mesh(binding, module, shard)
    attach_amax_group(shard, binding)
    _fsdp2_patches.disable_flat_shards(module, shard)
    keep_zeros_unquantized(module, shard)
    _, ranks, whole = now
    row = _te.format_of(shard)
    assert row is not None
    is_even = tuple(shard.shape[1:]) == tuple(whole[1:]) and whole[0] % ranks == 0
    one_scale = bool(_te.one_scale_quantizers(_te.quantizer_of(shard)))
    keep_rowwise_only(shard)  # unless te_fsdp.fully_shard and materialize have seen to it
    known = _GatherMetadata(*now, row, one_scale, binding.weight_group, ranks > 1 and is_even)
    shard.__dict__[GATHERS] = known
    return known


def _customize_gather(
    shard: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    metadata: Any,
    mesh: DeviceMesh,
    orig_size: torch.Size,
) -> tuple[tuple[torch.Tensor, ...], _CustomGather]:
    """Return the buffers that TE would gather, converted where FSDP2 cannot gather them directly."""
    ranks = mesh.size()
    if ranks == 1:
        nothing = torch.empty(0, dtype=torch.uint8, device=inputs[0].device)
        return (nothing,), _CustomGather(metadata, buffers=inputs)
    if tuple(shard.shape[1:]) != tuple(orig_size[1:]):
        inputs, packed = _pack_columns(shard, inputs, ranks)
        return inputs, _CustomGather(metadata, packed=packed)
    share_scale(shard, mesh, orig_size[0])
    rows, padded = -(-orig_size[0] // ranks), []  # as many as the first rank has
    for data in inputs:
        if data.shape[0] < rows:
            data = torch.cat([data, data.new_zeros((rows - data.shape[0], *data.shape[1:]))])
        padded.append(data)
    return tuple(padded), _CustomGather(metadata, rows=orig_size[0])


def _pack_columns(
    local: torch.Tensor, inputs: tuple[torch.Tensor, ...], ranks: int
) -> tuple[tuple[torch.Tensor, ...], _Packed]:
    """Return packed tensors of the unpadded buffers that TE would gather of a shard (M, K / ranks)."""
    rows, columns = local.shape
    known = {c.tensor.data_ptr(): c for c in components_of(local, "gathered weight")}
    found = [known[i.data_ptr()] for i in inputs]  # views of buffers that begin where these begin
    buffers = []
    for component in found:
        whole = component.tensor.shape[1] * ranks
        if component.name.endswith("wise_scale_inv"):  # data has no padding
            is_columnwise = component.name.startswith("columnwise")
            sizes = _te.quantizer_of(local).get_scale_shape((rows, columns * ranks), is_columnwise)
            whole = int(sizes[-1])
        buffers.append((component.tensor.shape, whole))
    flats, places = pack_bytes([c.tensor.contiguous().view(1, -1) for c in found], (1, rows, columns))
    return tuple(flat[0] for flat in flats), _Packed((rows, columns), places, buffers)


def _join_columns(outputs: tuple[torch.Tensor, ...], packed: _Packed) -> tuple[torch.Tensor, ...]:
    """Return the buffers of the unsharded weight, new tensors, in TE's order and shapes."""
    rows, columns = packed.shape
    ranks = outputs[0].numel() // (rows * columns)
    flats = bytes_of_ranks(outputs, (1, rows, columns), 2, ranks)[0]
    buffers = []
    for found, (shape, whole) in zip(packed.places.typed(flats), packed.buffers, strict=True):
        pieces = found.view(ranks, *shape)
        buffer = torch.zeros((shape[0], whole), dtype=found.dtype, device=flats.device)
        buffer[:, : ranks * shape[1]].view(shape[0], ranks, shape[1]).copy_(pieces.transpose(0, 1))
        buffers.append(buffer)
    for output in outputs:  # FSDP2 would free them with the weight only, and allocates them anew
        output.untyped_storage().resize_(0)
    return tuple(buffers)


def _wrap_post(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def fsdp_post_all_gather(
        self: torch.Tensor,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        target = None if out is None else _torch.local_of(out)
        buffers, own, inner = all_gather_outputs, metadata, None
        if isinstance(metadata, _CustomGather):
            # FSDP2 must not free the shard's memory.
            buffers, own, inner = metadata.buffers, metadata.metadata, ()
            if metadata.rows:
                # Rows at the end are a contiguous part of the gathered buffer, which FSDP2 frees itself.
                buffers = (all_gather_outputs[0][: metadata.rows],)
            elif metadata.packed is not None:
                buffers = _join_columns(all_gather_outputs, metadata.packed)
        tensor, gathered = stock(self, buffers, own, param_dtype, out=target)
        # What TE has taken off for backward lives until FSDP2 frees it, on the weight or not (fault 9).
        known: _GatherMetadata | None = self.__dict__.get(GATHERS)
        row = _te.format_of(self) if known is None else known.row
        for buffer, value in zip(row.dropped if row is not None else (), buffers, strict=False):
            if getattr(tensor, buffer.attribute) is None:
                setattr(tensor, buffer.attribute, value)
        if out is None:
            _te.drop_transpose(tensor)
        else:
            _te.copy_scale(tensor, self)
        return tensor, gathered if inner is None else inner

    return fsdp_post_all_gather


def gather_missing_direction(module: nn.Module, binding: ModuleBinding) -> None:
    """Complete gathered weights of which one direction is missing, before a module's forward inside a backward.

    Collective over ``dp_shard`` when one is missing, at most in a module's first such forward: one all-gather. Every
    rank misses the same.
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
