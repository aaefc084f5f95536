"""What an optimizer step sends whose state is cut over holders of the same parameters.

    gradients (one shard each)  --reduce-scatter, AVG-->  this rank's rows
    new rows, as they travel    --all-gather-->           shards

A large tensor that is cut along its first dim travels by itself, without a copy: its rows lie one after the other
already. All others are packed, one collective per group and dtype, however many there are. Rows are padded to the same
number per holder. A holder whose backward has not reached a parameter sends zeros, and says so: behind the packed rows
each holder sends one number per parameter, 1 where it has a gradient.

A parameter may be held by several ranks alike: over ``dp_replicate`` with ``outer_strategy="optim"`` (HFSDP: each
holds the same FSDP2 shard), or over all of data parallel (``no_shard``). Its local tensor is then cut once more, as
``torch.chunk`` cuts, and each holder updates its own part:

    mesh                (dp_replicate,                dp_shard,              tp)
    parameter                                         (_StridedShard(0, tp),  Shard(0))
    main weight, state  (_StridedShard(0, shard*tp),  _StridedShard(0, tp),   Shard(0))

The first dim is cut that all its axes cut evenly (of a quantized weight, into whole blocks if any is), dim 0 if there
is none. Main weights and states are DTensors of the parameter's own shape. DCP's own arithmetic is not exact for dims
that several axes cut unevenly, so that te_fsdp.checkpoint goes by :attr:`Chunk.low` and :attr:`Chunk.high`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from te_fsdp import _torch
from te_fsdp.layout.boxes import chunk_range
from te_fsdp.move.pending import Pending
from te_fsdp.move.start import LARGE, Buffer, GradComm, Rows, comm_of, start
from te_fsdp.parameters import plan_of
from te_fsdp.quantized.components import block_of
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "OUTER",
    "Average",
    "Chunk",
    "Copies",
    "Part",
    "comm_for",
    "copies_of",
    "rows_of_state",
    "start_average",
    "start_gather",
]

#: The outer axis.
OUTER = "dp_replicate"


@dataclass(frozen=True)
class Copies:
    """Who holds a parameter alike.

    Attributes:
        mesh: The parameter's own mesh (none for a plain tensor) with the axis of its holders put in front.
        reduced: Whether gradients arrive equal on all holders, so that they are only cut. Otherwise they are averaged.
        sums: Whether those that are not reduced are summed instead.
    """

    mesh: DeviceMesh
    reduced: bool
    sums: bool = False

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the holders."""
        return self.mesh.get_group(0)

    @property
    def partial(self) -> Partial:
        """How gradients that are not reduced lie on the holders, in DTensor's words."""
        return Partial("sum" if self.sums else "avg")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the holders."""
        return tuple(dist.get_process_group_ranks(self.group))


class Chunk:
    """The part of one parameter's local tensor that this rank keeps state for: its rows, along ``dim``.

    Attributes:
        parameter: The parameter: plain, or a DTensor.
        dtype: Of its main weight and of the average of its gradients: fp32 for low-precision parameters.
        copies: Its holders.
        ranks: Their global ranks.
        size: Number of holders.
        dim: The dim that is cut.
        rows: How the local tensor is cut over the holders.
        low, high: This rank's rows.
        shape: Of these.
        obstacles: Why the weight cannot travel as bytes, by class and shape of the local tensor (``outer_gather``).
    """

    def __init__(self, parameter: torch.Tensor, copies: Copies) -> None:
        local = _torch.local_of(parameter)
        self._specs: dict[torch.dtype, Any] = {}
        self.obstacles: dict[tuple[type, tuple[int, ...]], str | None] = {}
        self.parameter, self.copies, self.ranks = parameter, copies, copies.ranks
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.dim = _dim_to_cut(parameter, copies.mesh)
        self.size = copies.mesh.size(0)
        self.rows = Rows(local.shape, self.dim, self.size)
        self.low, self.high = chunk_range(local.shape[self.dim], self.size, copies.mesh.get_local_rank(0))
        self.shape = (*local.shape[: self.dim], self.high - self.low, *local.shape[self.dim + 1 :])

    def has_whole(self, unit: int) -> bool:
        """Whether every holder of every piece has equally many rows, a multiple of ``unit``.

        Local operation on the parameter's global shape: all ranks find the same, whatever their own pieces are.
        """
        parts = self.size * _parts(self.parameter, self.copies.mesh, self.dim)
        return self.parameter.shape[self.dim] % (unit * parts) == 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of main weight and states on ``copies.mesh``."""
        own, factor = _own_placements(self.parameter), _parts(self.parameter, self.copies.mesh, self.dim)
        return (Shard(self.dim) if factor == 1 else _torch.strided_shard(self.dim, factor), *own)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor like the parameter's local one; a view."""
        return local.narrow(self.dim, self.low, self.high - self.low)

    def distributed(self, rows: torch.Tensor) -> DTensor:
        """DTensor of the parameter's shape around this rank's rows, on ``copies.mesh``. Local operation."""
        spec = self._specs.get(rows.dtype)
        if spec is None:  # made once per dtype: it takes longer than all the rest
            made = _torch.placed(rows, self.copies.mesh, self.placements, self.parameter)
            spec = self._specs[rows.dtype] = _torch.spec_of(made)
        return _torch.dtensor(rows, spec)


def _own_placements(parameter: torch.Tensor) -> tuple[Placement, ...]:
    """Placements of a DTensor, none of a plain tensor."""
    return tuple(parameter.placements) if isinstance(parameter, DTensor) else ()


def _parts(parameter: torch.Tensor, mesh: DeviceMesh, dim: int) -> int:
    """Into how many parts the parameter's own axes cut a dim; ``mesh`` has one axis more in front."""
    placements = enumerate(_own_placements(parameter))
    return math.prod(mesh.size(1 + axis) for axis, p in placements if _torch.shard_dim_of(p) == dim)


def _dim_to_cut(parameter: torch.Tensor, mesh: DeviceMesh) -> int:
    """The first dim that all its axes and that of the holders cut evenly, else 0; the same on all ranks.

    Of a quantized weight the first one that they cut into whole blocks, if there is one.
    """
    block = block_of(_torch.local_of(parameter)) or 1
    for unit in dict.fromkeys((block, 1)):
        for dim, length in enumerate(parameter.shape):
            if length and length % (unit * mesh.size(0) * _parts(parameter, mesh, dim)) == 0:
                return dim
    return 0


def rows_of_state(value: torch.Tensor, parameter: torch.Tensor) -> tuple[int, int, int] | None:
    """Dim and half-open range of it of the part of a local tensor that a state covers; ``None`` if it is not cut.

    Local operation.
    """
    own = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
    if not isinstance(value, DTensor) or value.device_mesh.ndim != own + 1:
        return None
    mesh, dim = value.device_mesh, _torch.shard_dim_of(value.placements[0])
    assert dim is not None
    low, high = chunk_range(_torch.local_of(parameter).shape[dim], mesh.size(0), mesh.get_local_rank(0))
    return dim, low, high


def copies_of(parameter: torch.Tensor) -> Copies | None:
    """Who holds a parameter alike, such that its optimizer state is to be cut; ``None`` where it is not.

    Local operation. Scalars are never cut.
    """
    plan, state = plan_of(parameter), state_of(parameter)
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
        holders = root[axes] if len(axes) == 1 else _torch.flatten_mesh(root[axes], name)
        return Copies(holders if own is None else _torch.concatenated_meshes(holders, own), reduced=True)
    assert own is not None and own.mesh_dim_names is not None
    return Copies(root[(*axes, *own.mesh_dim_names)], reduced=False, sums=not state.average_gradients)


T = TypeVar("T")

#: Elements; kernels read several at once from addresses that allow it.
_ALIGNED = 16


def _by_kind(members: Iterable[T], kind_of: Callable[[T], Any]) -> list[list[T]]:
    """What travels together: members of one kind, the kinds in the order in which they first come."""
    found: dict[Any, list[T]] = {}
    for member in members:
        found.setdefault(kind_of(member), []).append(member)
    return list(found.values())


def _travels_alone(rows: Rows) -> bool:
    """Whether a tensor is worth a collective of its own; the same on all holders."""
    return rows.is_even and rows.dim == 0 and rows.numel * rows.ranks >= LARGE


# ------------------------------------------------------------------------------------------------------------ gradients


class Average(NamedTuple):
    """This rank's rows of a gradient, averaged over the holders.

    Attributes:
        rows: Of shape ``chunk.shape``.
        holders: How many holders have a gradient, on the device and not as a whole number; ``None`` where this rank is
            one of them.
    """

    rows: torch.Tensor
    holders: torch.Tensor | None = None

    def result(self) -> torch.Tensor | None:
        """The rows; ``None`` where no holder has a gradient.

        Only a rank without a gradient has to ask, which on a GPU waits for the device.
        """
        return self.rows if self.holders is None or bool(self.holders > 0) else None


def comm_for(chunk: Chunk) -> GradComm | None:
    """How the model that a parameter belongs to wants gradients to travel. Local operation."""
    state = state_of(chunk.parameter)
    return comm_of(state.model) if state is not None else None


#: A parameter's place among those given, its chunk, and this rank's local gradient.
_Given = tuple[int, Chunk, torch.Tensor | None]


def start_average(
    chunks: Sequence[Chunk],
    gradients: Sequence[torch.Tensor | None],
    *,
    comm: Callable[[Chunk], GradComm | None] = comm_for,
    group: dist.ProcessGroup | None = None,
    flags: bool = True,
    async_op: bool = False,
) -> Pending[list[Average]]:
    """Begin to average gradients over the holders, or to sum them if the user wants sums.

    Collective over the holders, all the same: per group and dtype a reduce-scatter, and one more for each large tensor;
    in ``chunk.dtype`` or what ``comm`` says. Temporary memory: what is packed, and what has another dtype, once in
    ``chunk.dtype``.

    Args:
        chunks: The parameters, in the same order on all holders.
        gradients: Local gradient of each, of the local tensor's shape; ``None`` where this rank has none.
        comm: How gradients of the model that a parameter belongs to travel.
        group: The holders of all of them; ``None``: of each its own.
        flags: Whether holders tell each other which gradients they have. Otherwise averages are there in any case, zero
            where no holder has a gradient.
        async_op: Whether nothing waits for it before the result is asked for; the gradients must not change until then.

    Returns:
        This rank's rows, in the order of ``chunks``.
    """
    given = zip(range(len(chunks)), chunks, gradients, strict=True)
    kinds = [
        _start_kind(members, group or members[0][1].copies.group, comm(members[0][1]), flags, async_op)
        for members in _by_kind(given, lambda one: (one[1].ranks, one[1].dtype))
    ]

    def finish() -> list[Average]:
        found = {place: average for kind in kinds for place, average in kind.wait()}
        return [found[place] for place in range(len(chunks))]

    return Pending(finish)


def _start_kind(
    given: Sequence[_Given], group: dist.ProcessGroup, comm: GradComm | None, flags: bool, async_op: bool
) -> Pending[list[tuple[int, Average]]]:
    """:func:`start_average` of parameters with the same holders and dtype: place and average of each."""
    first = given[0][1]
    device = _torch.local_of(first.parameter).device
    alone = [_travels_alone(chunk.rows) for _, chunk, _ in given]
    small = [one[1:] for one, large in zip(given, alone, strict=True) if not large]
    has = [gradient is not None for _, _, gradient in given] if flags else []
    buffer = Buffer(tuple(chunk.rows.numel for chunk, _ in small), _ALIGNED, more=len(has))
    moves: list[Pending[torch.Tensor]] = []

    def send(source: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        into = torch.empty(shape, dtype=first.dtype, device=device)
        if into.numel():
            partial, flat = first.copies.partial, into.view(-1)
            moves.append(start(source, partial, Shard(0), group, comm, into=flat, async_op=async_op))
        return into

    result = send(_packed(buffer, small, has, first), (buffer.numel,))
    pieces, holders = buffer.pieces(result), result[buffer.numel - len(has) :]
    found = []
    for at, (place, chunk, gradient) in enumerate(given):
        # A rank that has a gradient need not ask whether there is one.
        asked = holders[at] if flags and gradient is None else None
        if not alone[at]:
            rows = next(pieces)[: math.prod(chunk.shape)].view(chunk.shape)
        else:
            if gradient is None:
                gradient = torch.zeros(chunk.rows.shape, dtype=first.dtype, device=device)
            rows = send(gradient.to(first.dtype).contiguous().view(-1), chunk.shape)
        found.append((place, Average(rows, asked)))

    def finish() -> list[tuple[int, Average]]:
        for move in moves:
            move.wait()
        return found

    return Pending(finish)


def _packed(
    buffer: Buffer, small: Sequence[tuple[Chunk, torch.Tensor | None]], has: list[bool], first: Chunk
) -> torch.Tensor:
    """What all holders get of each gradient, holder after holder, each time with the flags behind."""
    device = _torch.local_of(first.parameter).device
    memory = torch.empty(first.size, buffer.numel, dtype=first.dtype, device=device)
    memory[:, buffer.numel - len(has) :] = 1
    for at, flag in enumerate(has, buffer.numel - len(has)):
        if not flag:
            memory[:, at] = 0
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for (chunk, gradient), piece in zip(small, buffer.pieces(memory), strict=True):
        if gradient is None or not chunk.rows.is_even:
            piece.zero_()
        if gradient is not None:
            copies += chunk.rows.pairs(gradient, piece)
    _torch.copy_all_([piece for _, piece in copies], [rows for rows, _ in copies])
    return memory.view(-1)


# -------------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor of which each holder has rows.

    Attributes:
        chunk: Of the parameter: names the holders, and the dim.
        mine: This rank's rows, along ``chunk.dim``.
        whole: Where the rows of all holders go, of the same dtype; this rank's may lie there already.
    """

    chunk: Chunk
    mine: torch.Tensor
    whole: torch.Tensor

    @functools.cached_property
    def rows(self) -> Rows:
        """How the whole is cut: a buffer of a quantized weight may have another shape than the weight."""
        return Rows(self.whole.shape, self.chunk.dim, self.chunk.size)


def start_gather(parts: Sequence[Part], *, as_bytes: bool = False, async_op: bool = False) -> Pending[None]:
    """Begin to give each holder the rows of all holders.

    Collective over the holders, all the same: one all-gather per group and dtype, and one more for each large tensor.
    Temporary memory: what is packed, once.

    Args:
        parts: In the same order on all holders.
        as_bytes: Pack tensors of all dtypes together.
        async_op: Whether nothing waits for it, and nothing that is packed is written, before the result is waited for;
            the parts must not change until then.
    """
    moves: list[Pending[Any]] = []
    for kind in _by_kind(parts, lambda p: (p.chunk.ranks, torch.uint8 if as_bytes else p.mine.dtype)):
        packed = []
        for part in kind:
            in_place = part.whole.is_contiguous() and part.mine.is_contiguous()
            if in_place and _travels_alone(part.rows):
                moves.append(_gathered(part.mine.view(-1), part.whole.view(-1), part.chunk, async_op))
            else:
                packed.append(part)
        if packed:
            move = _start_packed_gather(packed, torch.uint8 if as_bytes else packed[0].mine.dtype, async_op)
            if not async_op:
                move.wait()  # what is packed is freed
            else:
                moves.append(move)

    def finish() -> None:
        for move in moves:
            move.wait()

    return Pending(finish)


def _gathered(mine: torch.Tensor, whole: torch.Tensor, chunk: Chunk, async_op: bool) -> Pending[torch.Tensor]:
    return start(mine, Shard(0), Replicate(), chunk.copies.group, into=whole, async_op=async_op)


def _start_packed_gather(parts: Sequence[Part], dtype: torch.dtype, async_op: bool) -> Pending[None]:
    """One all-gather, in ``dtype``, which is that of the parts, or bytes; the wholes are written by the wait."""
    chunk, device = parts[0].chunk, parts[0].mine.device
    buffer = Buffer(
        tuple(part.rows.numel * part.mine.element_size() // dtype.itemsize for part in parts), _ALIGNED
    )
    # Not view(-1), which leaves a single element the stride of the rows that it was cut from: bytes want 1.
    flat = [part.mine.contiguous().as_strided((part.mine.numel(),), (1,)) for part in parts]
    mine = buffer.pack([each.view(dtype) for each in flat], dtype, device)
    del flat
    gathered = torch.empty(chunk.size, mine.numel(), dtype=dtype, device=device)

    def unpack(unused: torch.Tensor) -> None:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part, piece in zip(parts, buffer.pieces(gathered), strict=True):
            copies += part.rows.pairs(part.whole, piece.view(part.mine.dtype))
        _torch.copy_all_([rows for rows, _ in copies], [piece for _, piece in copies])

    return _gathered(mine, gathered.view(-1), chunk, async_op).then(unpack)
