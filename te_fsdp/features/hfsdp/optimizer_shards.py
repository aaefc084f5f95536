"""Which rows of a parameter this rank keeps optimizer state for, and how they become new weights.

A parameter may be held by several ranks alike: over ``dp_replicate`` with ``outer_strategy="optim"`` (HFSDP: each
holds the same FSDP2 shard), or over all of data parallel (``no_shard``). Its local tensor is then cut once more, as
``torch.shard`` cuts, and each replica updates its own rows (:class:`OptimizerShard`):

    mesh                (dp_replicate,                dp_shard,              tp)
    parameter                                         (_StridedShard(0, tp),  Shard(0))
    main weight, state  (_StridedShard(0, shard*tp),  _StridedShard(0, tp),   Shard(0))

    gradients (one shard each)  --reduce-scatter, AVG-->  this rank's rows, in fp32
    new rows, as they are sent  --all-gather-->           shards

The first dim is cut that all its axes cut evenly (of a quantized weight, into whole blocks if any is), dim 0 if there
is none. Main weights and states are DTensors of the parameter's own shape. A large tensor that is cut along its first
dim is sent by itself, without a copy: its rows lie one after the other already. All others are packed, one collective
per group and dtype, however many there are. Rows are padded to the same number per replica. Rows of quantized weights
that are whole blocks are quantized before they are sent, all others by each replica. The bytes are the same either way:
formats scale blocks of values, or the whole weight, of which the replicas take the amax together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from te_fsdp.collectives.async_work import Pending
from te_fsdp.collectives.redistribute import (
    LARGE,
    GradComm,
    PackedLayout,
    RowPartition,
    all_gather_many,
    comm_of,
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
    take_delayed_scale,
)
from te_fsdp.quantized.components import Component, block_of, buffers_of_parts, drop_derived_state
from te_fsdp.records import plan_of
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.upstream.torch_dtensor import DTensorSpec

T = TypeVar("T")

#: The outer axis.
OUTER = "dp_replicate"
#: Elements; kernels read several at once from addresses that allow it.
ALIGNED = 16
#: How a tensor is cut, as a buffer of a quantized weight that lies as the parameter does: a step asks for each.
_rows_of = functools.cache(RowPartition)


class OptimizerShard:
    """The part of one parameter's local tensor that this rank keeps main weight and state for: its rows along ``dim``.

    Attributes:
        mesh: The parameter's own mesh (none for a plain tensor) with the axis of its replicas put in front.
        placements: Of main weight and states on it.
        reduced: Whether gradients arrive equal on all replicas, so that they are only cut. Otherwise they are averaged.
        partial: How gradients that are not reduced lie on the replicas, in DTensor's words: summed if the user wants.
        group, ranks, size: Process group of the replicas, their global ranks, and their number.
        dtype: Of its main weight and of the average of its gradients: fp32 for low-precision parameters.
        dim, parts: The dim that is cut, and into how many parts the parameter's own axes cut it.
        rows: How the local tensor is cut over the replicas.
        low, high, shape: This rank's rows, and their shape.
        decoupled: Whether the optimizer takes gradients of any dtype (``decoupled_grad``).
        obstacles: :func:`reason_for_fp32`, by class and shape of the local tensor.
    """

    def __init__(self, parameter: torch.Tensor, mesh: DeviceMesh, *, reduced: bool, sums: bool) -> None:
        local, own = _torch.local_of(parameter), getattr(parameter, "placements", ())
        self.parameter, self.mesh, self.reduced = parameter, mesh, reduced
        self.partial = Partial("sum" if sums else "avg")
        self.group, self.size = mesh.get_group(0), mesh.size(0)
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.dim = _dim_to_cut(parameter, mesh)
        self.parts = _parts(parameter, mesh, self.dim)
        self.placements = (_torch.strided_shard(self.dim, self.parts), *own)
        self.rows = _rows_of(local.shape, self.dim, self.size)
        self.low, self.high = chunk_range(local.shape[self.dim], self.size, mesh.get_local_rank(0))
        self.shape = (*local.shape[: self.dim], self.high - self.low, *local.shape[self.dim + 1 :])
        self.decoupled = False
        self.obstacles: dict[tuple[type, tuple[int, ...]], str | None] = {}
        # Made once: they take longer than all the rest of what a step does with them.
        self._specs: dict[torch.dtype, DTensorSpec] = {}

    @property
    def sent(self) -> torch.dtype:
        """Dtype of its gradient, the same on replicas that have none; that of the average where it could be any."""
        own = None if self.decoupled else getattr(self.parameter, "grad_dtype", self.parameter.dtype)
        return own or self.dtype

    @property
    def comm(self) -> GradComm | None:
        """How the model that the parameter belongs to wants gradients to be sent."""
        state = sharded_model_of(self.parameter)
        return None if state is None else comm_of(state.model)

    @functools.cached_property
    def amax_group(self) -> dist.ProcessGroup | None:
        """Over whom the amax of a weight with one scale is taken: its replicas, and all ranks that hold other pieces.

        Collective over the world where this is neither one axis nor the world, the first time for such a mesh: a
        process group is made.
        """
        large = [axis for axis in range(self.mesh.ndim) if self.mesh.size(axis) > 1]
        if len(large) == 1:
            return self.mesh.get_group(large[0])
        if self.mesh.size() == dist.get_world_size():
            return dist.group.WORLD
        return _torch.flatten_mesh(self.mesh, "outer_weight").get_group()

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor like the parameter's local one; a view."""
        return local.narrow(self.dim, self.low, self.high - self.low)

    def spec(self, rows: torch.Tensor) -> DTensorSpec:
        """Spec of the DTensor of the parameter's shape around this rank's rows. Local operation."""
        spec = self._specs.get(rows.dtype)
        if spec is None:
            made = _torch.placed(rows, self.mesh, self.placements, self.parameter)
            spec = self._specs[rows.dtype] = _torch.spec_of(made)
        return spec

    def distributed(self, rows: torch.Tensor) -> DTensor:
        """DTensor of the parameter's shape around this rank's rows, on ``mesh``. Local operation."""
        return _torch.dtensor(rows, self.spec(rows))


def _parts(parameter: torch.Tensor, mesh: DeviceMesh, dim: int) -> int:
    """Into how many parts the parameter's own axes cut a dim; ``mesh`` has one axis more in front."""
    placements = enumerate(getattr(parameter, "placements", ()), 1)
    return math.prod(mesh.size(axis) for axis, p in placements if _torch.shard_dim_of(p) == dim)


def _dim_to_cut(parameter: torch.Tensor, mesh: DeviceMesh) -> int:
    """The first dim that all its axes and that of the replicas cut evenly, else 0; the same on all ranks.

    Of a quantized weight the first one that they cut into whole blocks, if there is one.
    """
    block = block_of(_torch.local_of(parameter)) or 1
    for unit in dict.fromkeys((block, 1)):
        for dim, length in enumerate(parameter.shape):
            if length and length % (unit * mesh.size(0) * _parts(parameter, mesh, dim)) == 0:
                return dim
    return 0


def optimizer_shard(parameter: torch.Tensor) -> OptimizerShard | None:
    """What this rank keeps state for, if replicas share a parameter's optimizer state. Scalars are never cut. Local."""
    plan, state = plan_of(parameter), sharded_model_of(parameter)
    if plan is None or state is None or parameter.ndim == 0:
        return None
    meshes = state.meshes
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    axes = tuple(axis for axis in plan.storage.cut_further if root[axis].size() > 1)
    if not axes:
        return None
    own = parameter.device_mesh if isinstance(parameter, DTensor) else None
    if plan.storage.is_whole:
        # Made when the model was sharded, for the reductions of gradients.
        name = "data" if root is meshes.device_mesh else "expert_data"
        mesh = root[axes] if len(axes) == 1 else _torch.flatten_mesh(root[axes], name)
        mesh = mesh if own is None else _torch.concatenated_meshes(mesh, own)
        return OptimizerShard(parameter, mesh, reduced=True, sums=False)
    assert own is not None and own.mesh_dim_names is not None
    mesh = root[(*axes, *own.mesh_dim_names)]
    return OptimizerShard(parameter, mesh, reduced=False, sums=not state.average_gradients)


def group_by_key(members: Iterable[T], kinds: Iterable[Hashable]) -> list[list[T]]:
    """What is sent together: members of one kind, the kinds in the order in which they first come."""
    found: dict[Hashable, list[T]] = {}
    for member, kind in zip(members, kinds, strict=True):
        found.setdefault(kind, []).append(member)
    return list(found.values())


def is_sent_alone(rows: RowPartition) -> bool:
    """Whether a tensor is worth a collective of its own; the same on all replicas."""
    return rows.is_even and rows.dim == 0 and rows.numel * rows.ranks >= LARGE


def copy_pairs(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    _torch.copy_all_([target for target, _ in pairs], [source for _, source in pairs])


# ---------------------------------------------------------------------------------------------------------- new weights


class ReplicaRows(NamedTuple):
    """One tensor of which each replica has rows."""

    shard: OptimizerShard  #: Of the parameter: names the replicas, and the dim
    mine: torch.Tensor  #: This rank's rows, along that dim
    #: Where the rows of all replicas go, of the same dtype; this rank's may lie there already. A buffer of a quantized
    #: weight may have another shape than the weight.
    whole: torch.Tensor
    as_bytes: bool = False  #: Whether it is packed together with tensors of other dtypes of which this holds


def all_gather_rows(parts: Sequence[ReplicaRows]) -> None:
    """Give each replica the rows of all replicas.

    Collective over the replicas, all the same: one all-gather per group and dtype, one for bytes, and one more for each
    large tensor; those of one dtype, or of bytes, as one operation of NCCL's. Temporary memory: what is packed, once.
    Parts are in the same order on all replicas.
    """
    moves: list[Pending[Any]] = []
    kinds = [(part.shard.ranks, "bytes" if part.as_bytes else part.mine.dtype) for part in parts]
    for kind in group_by_key(parts, kinds):
        group = kind[0].shard.group
        alone: list[tuple[torch.Tensor, torch.Tensor]] = []
        packed: list[tuple[ReplicaRows, RowPartition]] = []
        for part in kind:
            rows = _rows_of(part.whole.shape, part.shard.dim, part.shard.size)
            if part.whole.is_contiguous() and part.mine.is_contiguous() and is_sent_alone(rows):
                alone.append((part.mine.view(-1), part.whole.view(-1)))
            else:
                packed.append((part, rows))
        if len(alone) > 1 and not alone[0][0].is_cpu:  # gloo would send one after the other
            moves.append(all_gather_many(alone, group))
        else:
            moves += [redistribute(mine, Shard(0), Replicate(), group, into=whole) for mine, whole in alone]
        if packed:
            moves.append(_start_packed_gather(packed))
    for move in moves:
        move.wait()


def _start_packed_gather(parts: Sequence[tuple[ReplicaRows, RowPartition]]) -> Pending[None]:
    """One all-gather of parts of one kind; the wholes are written by the wait."""
    first, _ = parts[0]
    dtype = torch.uint8 if first.as_bytes else first.mine.dtype
    sizes = [rows.numel * part.mine.itemsize // dtype.itemsize for part, rows in parts]
    buffer = PackedLayout(tuple(sizes), ALIGNED)
    # Not view(-1), which leaves a single element the stride of the rows that it was cut from: bytes want 1.
    flat = [part.mine.contiguous().as_strided((part.mine.numel(),), (1,)) for part, _ in parts]
    mine = buffer.pack([each.view(dtype) for each in flat], dtype, first.mine.device)
    del flat
    gathered = mine.new_empty(first.shard.size, mine.numel())

    def unpack(unused: torch.Tensor) -> None:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (part, rows), piece in zip(parts, buffer.pieces(gathered), strict=True):
            copies += rows.pairs(part.whole, piece.view(part.mine.dtype))
        copy_pairs(copies)

    return redistribute(mine, Shard(0), Replicate(), first.shard.group, into=gathered.view(-1)).then(unpack)


#: Why one tensor of all experts crosses as fp32.
SINGLE = "one tensor of all experts"
#: Shards, each with this rank's rows of the main weight, in the same order on all replicas.
Cut = Sequence[tuple[OptimizerShard, torch.Tensor]]


@torch.no_grad()
def all_gather_main_params(cut: Cut) -> None:
    """Make parameters their new main weights, each rounded or quantized once.

    Collective over the replicas: one all-gather per dtype, one for the bytes of all quantized weights together, and
    one more for each large tensor; and as :func:`scales_of_rows`, for NVFP4 and hybrids with a reduction for each.
    """
    scales = scales_of_rows(cut)
    plain: list[ReplicaRows] = []
    packed: list[ReplicaRows] = []
    whole: list[ReplicaRows] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for shard, rows in cut:
        local = _torch.local_of(shard.parameter)
        if not _te.is_quantized(local):
            own = shard.of(local)
            # In the dtype of the parameter, where they belong if they lie together there.
            if not own.is_contiguous():
                own = rows.to(local.dtype)
            elif own.data_ptr() != rows.data_ptr():
                copies.append((own, rows))
            plain.append(ReplicaRows(shard, own, local))
        elif reason_for_fp32(shard) is not None:
            whole.append(
                ReplicaRows(shard, rows, torch.empty(local.shape, dtype=rows.dtype, device=rows.device))
            )
        else:
            for target, source in _quantized(shard, rows, local, scales.get(id(shard))):
                if target.block is None:  # all replicas have it alike
                    copies.append((target.tensor, source.tensor))
                else:
                    packed.append(ReplicaRows(shard, source.tensor, target.tensor, as_bytes=True))
    copy_pairs(copies)
    sent = {id(part.shard): part.shard for part in packed}.values()
    # The amax of all replicas' rows is the newest of a history. Over other pieces it is taken after the step, as ever.
    delayed = [shard for shard in sent if _te.has_delayed_scale(_torch.local_of(shard.parameter))]
    for members in group_by_key(delayed, [shard.ranks for shard in delayed]):
        amaxes = [_te.quantizer_of(_torch.local_of(shard.parameter)).amax for shard in members]
        reduce_max(amaxes, members[0].group)
    all_gather_rows(plain + whole + packed)
    quantize_into((_torch.local_of(part.shard.parameter), part.whole) for part in whole)
    for shard in sent:
        drop_derived_state(_torch.local_of(shard.parameter))


def scales_of_rows(cut: Cut) -> dict[int, torch.Tensor]:
    """By ``id`` of its shard the scale of each current-scaling weight that is sent as bytes, one element.

    Each from the amax of the whole main weight. Collective over replicas and weight mesh, if there are some: one max
    all-reduce for each group of theirs.
    """
    asked: dict[int, PendingQuantization] = {}
    for shard, rows in cut:
        local = _torch.local_of(shard.parameter)
        if _te.is_quantized(local) and reason_for_fp32(shard) is None:
            quantizer = _te.quantizer_of(local)
            if has_current_scale(type(quantizer)):
                asked[id(shard)] = PendingQuantization(rows, quantizer, shard.amax_group)
    return dict(zip(asked, shared_scales([*asked.values()]), strict=True))


def reason_for_fp32(shard: OptimizerShard) -> str | None:
    """Why a quantized weight crosses the replicas' axis as fp32; ``None`` for one that does so as bytes.

    Local operation on the global shape and the format: the same on all ranks, also on those that hold other pieces,
    which take one amax together, each way over other groups.
    """
    local = _torch.local_of(shard.parameter)
    kind = (type(local), tuple(local.shape))
    if kind not in shard.obstacles:
        shard.obstacles[kind] = _fp32_reason(shard, local)
    return shard.obstacles[kind]


def _fp32_reason(shard: OptimizerShard, local: torch.Tensor) -> str | None:
    if _te.is_grouped(local) or local.ndim != 2:
        return SINGLE
    block = block_of(local)
    if block is None:
        return f"no table of the buffers of {_te.format_of(local)}"
    # Whether every replica of every piece has equally many rows, whole blocks, whatever this rank's own piece is.
    if block > 1 and shard.parameter.shape[shard.dim] % (block * shard.size * shard.parts):
        what = "columns" if shard.dim else "rows"
        return f"{shard.rows.shape[shard.dim]} {what} over {shard.size} ranks, a scale spans {block}"
    try:
        buffers_of_parts(local, "weight")
    except PlacementError:
        return f"an option of {_te.format_of(local)} without a table of its buffers"
    return None


def _quantized(
    shard: OptimizerShard, rows: torch.Tensor, local: torch.Tensor, scale: torch.Tensor | None
) -> list[tuple[Component, Component]]:
    """Each buffer of a quantized weight, and that of this rank's rows, quantized as the weight is."""
    targets = buffers_of_parts(local, "install")
    quantizer = _te.quantizer_of(local).copy()
    if len(_te.storage_parts_of(local)) == 1:
        columnwise = [target.name.startswith("columnwise") for target in targets]
        quantizer.set_usage(rowwise=not all(columnwise), columnwise=any(columnwise))
    if scale is not None:
        quantized = cast(rows, quantizer, scale)
    else:
        if _te.needs_shared_amax(quantizer):
            _te.set_quantizer_amax_group(quantizer, shard.amax_group)
        unseen = not rows.numel() and _te.has_delayed_scale(local)
        if unseen:
            quantizer.amax.zero_()  # no kernel runs for a tensor without elements: the last step's amax would stay
        quantized = quantizer(rows)
        if unseen:
            take_delayed_scale(quantized)
    sources = buffers_of_parts(quantized, "install")
    assert [target.name for target in targets] == [source.name for source in sources]
    return list(zip(targets, sources, strict=True))
