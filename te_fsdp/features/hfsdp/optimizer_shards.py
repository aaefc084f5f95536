"""Optimizer shards of HFSDP: the rows of a parameter that each replica updates.

    mesh                (dp_replicate,                dp_shard,              tp)
    parameter                                         (_StridedShard(0, tp),  Shard(0))
    main weight, state  (_StridedShard(0, shard*tp),  _StridedShard(0, tp),   Shard(0))

    gradients (one shard each)  --reduce-scatter, AVG-->  this rank's rows, in fp32
    new rows, as they are sent  --all-gather-->           shards

[Note: rows of a replica] at :class:`OptimizerShard` has the rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from te_fsdp.collectives.async_work import Pending
from te_fsdp.collectives.redistribute import (
    LARGE,
    GradComm,
    PackedLayout,
    RowPartition,
    all_gather_many,
    redistribute,
)
from te_fsdp.errors import PlacementError
from te_fsdp.layout import chunk_range
from te_fsdp.quantized.amax import (
    PendingQuantization,
    cast,
    has_current_scale,
    quantize_into,
    reduce_max,
    shared_scales,
)
from te_fsdp.quantized.components import (
    Component,
    block_of,
    buffers_of_parts,
    drop_derived_state,
    rowwise_components,
)
from te_fsdp.quantized.empty_shards import copy_delayed_scale
from te_fsdp.records import plan_of
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.tensor_version import TensorVersion
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.torch_dtensor import DTensorSpec

T = TypeVar("T")

#: The outer axis.
OUTER = "dp_replicate"
#: Alignment in elements, required by kernels with vectorized loads.
ALIGNED = 16
#: Partition of a tensor over replicas. Cached, because every step computes it for each tensor.
_rows_of = functools.cache(RowPartition)


# [Note: rows of a replica] Several ranks may replicate a parameter: over ``dp_replicate`` with
# ``outer_strategy="optim"`` (HFSDP: each has the same FSDP2 shard), or over data parallel (``no_shard``). Its local
# tensor is then sharded once more, as ``torch.chunk`` does, and each replica updates its own rows.
#
# The sharded dim is the first one that all axes divide evenly (for a quantized weight into full blocks, if possible),
# else dim 0. Main weights and states are DTensors with the parameter's shape. A large tensor sharded along dim 0 is
# sent separately without a copy, because its rows are contiguous. All others are packed: one collective per group and
# dtype. Rows are padded to the same number per replica. Rows of quantized weights that consist of full blocks are
# quantized before they are sent, others afterwards by each replica. The result is the same, because formats scale
# blocks, or the unsharded weight with an amax over all replicas.
class OptimizerShard:
    """This rank's part of a parameter's local tensor, for main weight and optimizer state: rows along ``dim``."""

    def __init__(self, parameter: torch.Tensor, mesh: DeviceMesh, *, reduced: bool, sums: bool) -> None:
        local, placements = _torch.local_of(parameter), getattr(parameter, "placements", ())
        self.parameter = parameter
        #: The parameter's mesh (none for a plain tensor) with the replica axis in front.
        self.mesh = mesh
        #: Whether gradients are equal on all replicas, so that they are only sliced. Otherwise they are averaged.
        self.reduced = reduced
        #: Placement of unreduced gradients over the replicas: average, or sum if the user requests it.
        self.partial = Partial("sum" if sums else "avg")
        #: Process group of the replicas, their number, and their global ranks.
        self.group, self.size = mesh.get_group(0), mesh.size(0)
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        #: Dtype of main weight and averaged gradient: fp32 for low-precision parameters.
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        #: The sharded dim ([Note: rows of a replica]), the same on all ranks, and the number of parts into which the
        #: parameter's own axes shard it.
        self.dim = next(
            (
                dim
                for unit in (block_of(local) or 1, 1)
                for dim, length in enumerate(parameter.shape)
                if length and length % (unit * self.mesh.size(0) * _shards_along(parameter, mesh, dim)) == 0
            ),
            0,
        )
        self.parts = _shards_along(parameter, mesh, self.dim)
        #: Placements of main weight and states on ``mesh``.
        self.placements = (_torch.strided_shard(self.dim, self.parts), *placements)
        #: Partition of the local tensor over the replicas, then this rank's rows and their shape.
        self.rows = _rows_of(local.shape, self.dim, self.size)
        self.low, self.high = chunk_range(local.shape[self.dim], self.size, mesh.get_local_rank(0))
        self.shape = (*local.shape[: self.dim], self.high - self.low, *local.shape[self.dim + 1 :])
        #: Whether the optimizer accepts gradients of any dtype (``decoupled_grad``).
        self.decoupled = False
        #: Cache of :func:`reason_for_fp32`, by class and shape of the local tensor.
        self.fp32_reasons: dict[tuple[type, tuple[int, ...]], str | None] = {}
        # Cached, because creating specs takes longer than the rest of a step's host work per parameter.
        self._specs: dict[torch.dtype, DTensorSpec] = {}

    @property
    def sent(self) -> torch.dtype:
        """Return the dtype in which its gradient is sent, identical on replicas without a gradient."""
        dtype = None if self.decoupled else getattr(self.parameter, "grad_dtype", self.parameter.dtype)
        return dtype or self.dtype

    @property
    def comm(self) -> GradComm | None:
        """Return the gradient communication settings of the parameter's model."""
        state = sharded_model_of(self.parameter)
        return None if state is None else state.sync.comm

    @functools.cached_property
    def amax_group(self) -> dist.ProcessGroup | None:
        """Return the group over which the amax of a weight with one scale is reduced: replicas and all shards.

        Collective over the world at the first call per mesh if the group is neither one axis nor the world: a process
        group is created.
        """
        large = [axis for axis in range(self.mesh.ndim) if self.mesh.size(axis) > 1]
        if len(large) == 1:
            return self.mesh.get_group(large[0])
        if self.mesh.size() == dist.get_world_size():
            return dist.group.WORLD
        return _torch.flatten_mesh(self.mesh, "outer_weight").get_group()

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a tensor shaped like the parameter's local tensor, as a view."""
        return local.narrow(self.dim, self.low, self.high - self.low)

    def spec(self, rows: torch.Tensor) -> DTensorSpec:
        """Return the spec of a DTensor with the parameter's shape around this rank's rows. Local operation."""
        spec = self._specs.get(rows.dtype)
        if spec is None:
            dtensor = _torch.placed(rows, self.mesh, self.placements, self.parameter)
            spec = self._specs[rows.dtype] = _torch.spec_of(dtensor)
        return spec

    def distributed(self, rows: torch.Tensor) -> DTensor:
        """Return a DTensor with the parameter's shape around this rank's rows, on ``mesh``. Local operation."""
        return _torch.dtensor(rows, self.spec(rows))


@dataclass(eq=False)
class MainParameter:
    """A parameter of an optimizer, and the main parameter that the optimizer updates in its place."""

    parameter: torch.Tensor
    shard: Any = None  #: Its ``OptimizerShard``; ``None`` if the optimizer state is not sharded further
    main: Any = None  #: The main parameter; ``None`` if the parameter needs none
    local: Any = None  #: The local tensor that ``main`` belongs to
    low: bool = False  #: Whether the parameter is of low precision, so that ``main`` is its main weight
    #: The gradient whose average over the replicas is the gradient of ``main``; ``None`` without an average.
    source: TensorVersion | None = None


def _shards_along(parameter: torch.Tensor, mesh: DeviceMesh, dim: int) -> int:
    """Return the number of parts into which the parameter's own axes shard a dim."""
    # `mesh` has one more axis in front, that of the replicas.
    placements = enumerate(getattr(parameter, "placements", ()), 1)
    return math.prod(mesh.size(axis) for axis, p in placements if _torch.shard_dim_of(p) == dim)


def axes_that_shard_dim0(shard: OptimizerShard) -> list[int]:
    """Return the axes of ``shard.mesh`` that shard dim 0, in mesh order; the last one shards first."""
    return [axis for axis, p in enumerate(shard.placements) if _torch.shard_dim_of(p) == 0]


def is_padded(shard: OptimizerShard) -> bool:
    """Return whether state dicts have padded states: several axes shard the rows, which they do not divide evenly."""
    # DTensor placements represent the shard if one axis shards the rows, or each does so evenly.
    sizes = [size for axis in axes_that_shard_dim0(shard) if (size := shard.mesh.size(axis)) > 1]
    # dims other than 0 are chosen only if they divide evenly
    return shard.dim == 0 and len(sizes) > 1 and shard.parameter.shape[0] % math.prod(sizes) != 0


def optimizer_shard(parameter: torch.Tensor) -> OptimizerShard | None:
    """Return this rank's shard if replicas share a parameter's optimizer state. Scalars are not sharded. Local."""
    plan, state = plan_of(parameter), sharded_model_of(parameter)
    if plan is None or state is None or parameter.ndim == 0:
        return None
    meshes = state.meshes
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    axes = tuple(axis for axis in plan.storage.extra_state_axes if root[axis].size() > 1)
    if not axes:
        return None
    param_mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if plan.storage.is_replicated:
        # created when the model was sharded, for reductions of gradients
        name = "data" if root is meshes.device_mesh else "expert_data"
        mesh = root[axes] if len(axes) == 1 else _torch.flatten_mesh(root[axes], name)
        mesh = mesh if param_mesh is None else _torch.concatenate_meshes([mesh, param_mesh])
        return OptimizerShard(parameter, mesh, reduced=True, sums=False)
    assert param_mesh is not None and param_mesh.mesh_dim_names is not None
    mesh = root[(*axes, *param_mesh.mesh_dim_names)]
    return OptimizerShard(parameter, mesh, reduced=False, sums=not state.average_gradients)


def group_by_key(members: Iterable[T], kinds: Iterable[Hashable]) -> list[list[T]]:
    """Group members by kind. Kinds are in the order of their first member."""
    groups: dict[Hashable, list[T]] = {}
    for member, kind in zip(members, kinds, strict=True):
        groups.setdefault(kind, []).append(member)
    return list(groups.values())


def is_sent_alone(rows: RowPartition) -> bool:
    """Return whether a tensor is large enough for a separate collective. Identical on all replicas."""
    return rows.is_even and rows.dim == 0 and rows.numel * rows.ranks >= LARGE


def copy_pairs(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    _torch.copy_all_([target for target, _ in pairs], [source for _, source in pairs])


# --- new weights


class ReplicaRows(NamedTuple):
    """A tensor whose rows are sharded over the replicas."""

    shard: OptimizerShard  #: Shard of the parameter, with the replicas and the dim
    mine: torch.Tensor  #: This rank's rows along that dim
    #: Target for the rows of all replicas, with the same dtype. It may contain this rank's rows already. A buffer of a
    #: quantized weight may have a different shape than the weight.
    full: torch.Tensor
    as_bytes: bool = False  #: Whether it is packed as bytes, together with tensors of other dtypes


def all_gather_rows(parts: Sequence[ReplicaRows]) -> None:
    """All-gather the rows of all replicas.

    Collective over the replicas, with the same calls on all: one all-gather per group and dtype, one for bytes, and
    one per large tensor. All-gathers of one dtype, or of bytes, are one NCCL operation. Temporary memory: one copy of
    the packed rows. The order of parts is the same on all replicas.
    """
    gathers: list[Pending[Any]] = []
    kinds = [(part.shard.ranks, "bytes" if part.as_bytes else part.mine.dtype) for part in parts]
    for kind in group_by_key(parts, kinds):
        group = kind[0].shard.group
        # Packing costs a copy. Large tensors whose rows are contiguous avoid it.
        large: list[tuple[torch.Tensor, torch.Tensor]] = []
        packed: list[tuple[ReplicaRows, RowPartition]] = []
        for part in kind:
            rows = _rows_of(part.full.shape, part.shard.dim, part.shard.size)
            if part.full.is_contiguous() and part.mine.is_contiguous() and is_sent_alone(rows):
                large.append((part.mine.view(-1), part.full.view(-1)))
            else:
                packed.append((part, rows))
        if len(large) > 1 and not large[0][0].is_cpu:  # gloo would send them one after the other
            gathers.append(all_gather_many(large, group))
        else:
            gathers += [
                redistribute(mine, Shard(0), Replicate(), group, into=output) for mine, output in large
            ]
        if packed:
            gathers.append(_start_packed_gather(packed))
    for gather in gathers:
        gather.wait()


def _start_packed_gather(parts: Sequence[tuple[ReplicaRows, RowPartition]]) -> Pending[None]:
    """Start one all-gather of parts of one kind; the wait writes the targets. Collective over the replicas."""
    first, _ = parts[0]
    dtype = torch.uint8 if first.as_bytes else first.mine.dtype
    sizes = [rows.numel * part.mine.itemsize // dtype.itemsize for part, rows in parts]
    buffer = PackedLayout(tuple(sizes), ALIGNED)
    # view(-1) would keep the stride of the original rows for a single element, but byte views require stride 1.
    flat = [part.mine.contiguous().as_strided((part.mine.numel(),), (1,)) for part, _ in parts]
    mine = buffer.pack([tensor.view(dtype) for tensor in flat], dtype, first.mine.device)
    # The contiguous copies are not needed while the all-gather runs.
    del flat
    gathered = mine.new_empty(first.shard.size, mine.numel())

    def unpack(unused: torch.Tensor) -> None:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (part, rows), piece in zip(parts, buffer.views(gathered), strict=True):
            copies += rows.pairs(part.full, piece.view(part.mine.dtype))
        copy_pairs(copies)

    return redistribute(mine, Shard(0), Replicate(), first.shard.group, into=gathered.view(-1)).then(unpack)


#: Reason why a single tensor of all experts is sent as fp32.
SINGLE = "one tensor of all experts"
#: (shard, this rank's rows of the main weight), in the same order on all replicas.
NewRows = Sequence[tuple[OptimizerShard, torch.Tensor]]


@torch.no_grad()
def all_gather_main_params(new: NewRows) -> None:
    """Set parameters to their new main weights, each rounded or quantized once.

    Collective over the replicas: one all-gather per dtype, one for the bytes of all quantized weights, and one per
    large tensor. In addition the collectives of :func:`scales_of_rows`, and for NVFP4 and hybrids one reduction per
    weight.
    """
    scales = scales_of_rows(new)
    plain: list[ReplicaRows] = []
    packed: list[ReplicaRows] = []
    quantized: list[ReplicaRows] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shard, rows in new:
        local = _torch.local_of(shard.parameter)
        if not _te.is_quantized(local):
            current = shard.of(local)
            # Use the parameter's dtype, and its memory if the rows are contiguous there.
            if not current.is_contiguous():
                current = rows.to(local.dtype)
            elif current.data_ptr() != rows.data_ptr():
                copies.append((current, rows))
            plain.append(ReplicaRows(shard, current, local))
        elif reason_for_fp32(shard) is not None:
            quantized.append(
                ReplicaRows(shard, rows, torch.empty(local.shape, dtype=rows.dtype, device=rows.device))
            )
        else:
            for target, source in _quantized(shard, rows, local, scales.get(id(shard))):
                if target.block is None:  # identical on all replicas
                    copies.append((target.tensor, source.tensor))
                else:
                    packed.append(ReplicaRows(shard, source.tensor, target.tensor, as_bytes=True))
    copy_pairs(copies)
    sent = {id(part.shard): part.shard for part in packed}.values()
    # The amax of all replicas' rows is the newest of the history. Other shards are reduced after the step, as usual.
    delayed = [shard for shard in sent if _te.has_delayed_scale(_torch.local_of(shard.parameter))]
    for members in group_by_key(delayed, [shard.ranks for shard in delayed]):
        amaxes = [_te.quantizer_of(_torch.local_of(shard.parameter)).amax for shard in members]
        reduce_max(amaxes, members[0].group)
    all_gather_rows(plain + quantized + packed)
    # Each replica has the same full fp32 weight now, so all of them compute the same bytes.
    quantize_into((_torch.local_of(part.shard.parameter), part.full) for part in quantized)
    for shard in sent:
        # The cached transpose belongs to the previous bytes.
        drop_derived_state(_torch.local_of(shard.parameter))


def scales_of_rows(new: NewRows) -> dict[int, torch.Tensor]:
    """Return the scale (one element) of each current-scaling weight that is sent as bytes, by ``id`` of its shard.

    Each comes from the amax of the unsharded main weight. Collective over replicas and weight mesh if there are such
    weights: one max all-reduce per group.
    """
    requests: dict[int, PendingQuantization] = {}
    for shard, rows in new:
        local = _torch.local_of(shard.parameter)
        if _te.is_quantized(local) and reason_for_fp32(shard) is None:
            quantizer = _te.quantizer_of(local)
            if has_current_scale(type(quantizer)):
                requests[id(shard)] = PendingQuantization(rows, quantizer, shard.amax_group)
    return dict(zip(requests, shared_scales([*requests.values()]), strict=True))


def reason_for_fp32(shard: OptimizerShard) -> str | None:
    """Return why a quantized weight is sent over replicas as fp32; ``None`` if it is sent as bytes. Local operation."""
    # From global shape and format. All ranks return the same, including those with different shards, because all
    # participate in one amax reduction whose group depends on it.
    local = _torch.local_of(shard.parameter)
    kind = (type(local), tuple(local.shape))
    if kind not in shard.fp32_reasons:
        shard.fp32_reasons[kind] = _fp32_reason(shard, local)
    return shard.fp32_reasons[kind]


def _fp32_reason(shard: OptimizerShard, local: torch.Tensor) -> str | None:
    if _te.is_grouped(local) or local.ndim != 2:
        return SINGLE
    block = block_of(local)
    if block is None:
        return f"no table of the buffers of {_te.format_of(local)}"
    # Check that every replica of every shard has the same number of rows, in full blocks.
    if block > 1 and shard.parameter.shape[shard.dim] % (block * shard.size * shard.parts):
        dim_name = "columns" if shard.dim else "rows"
        return f"{shard.rows.shape[shard.dim]} {dim_name} over {shard.size} ranks, a scale spans {block}"
    try:
        buffers_of_parts(local, "weight")
    except PlacementError:
        return f"an option of {_te.format_of(local)} without a table of its buffers"
    return None


def _quantized(
    shard: OptimizerShard, rows: torch.Tensor, local: torch.Tensor, scale: torch.Tensor | None
) -> list[tuple[Component, Component]]:
    """Return (target, source) of each buffer of a quantized weight. The source is quantized from this rank's rows."""
    stored = _te.quantizer_of(local)
    if scale is not None and (targets := rowwise_components(local)) and not stored.columnwise_usage:
        return list(zip(targets, rowwise_components(cast(rows, stored, scale)), strict=True))
    targets = buffers_of_parts(local, "install")
    # A copy: the usage and the group that are set here must not reach the weight.
    quantizer = stored.copy()
    if len(_te.storage_parts_of(local)) == 1:
        columnwise = [target.name.startswith("columnwise") for target in targets]
        quantizer.set_usage(rowwise=not all(columnwise), columnwise=any(columnwise))
    if scale is not None:
        quantized = cast(rows, quantizer, scale)
    else:
        if _te.needs_shared_amax(quantizer):
            _te.set_quantizer_amax_group(quantizer, shard.amax_group)
        is_empty_delayed = not rows.numel() and _te.has_delayed_scale(local)
        if is_empty_delayed:
            quantizer.amax.zero_()  # no kernel runs for an empty tensor, so the amax of the last step would stay
        quantized = quantizer(rows)
        if is_empty_delayed:
            copy_delayed_scale(quantized)
    sources = buffers_of_parts(quantized, "install")
    assert [target.name for target in targets] == [source.name for source in sources]
    return list(zip(targets, sources, strict=True))
