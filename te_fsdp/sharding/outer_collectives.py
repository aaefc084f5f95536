"""What an optimizer step sends whose state is sharded over replicas: gradients there, new weights back.

A parameter may be held by several ranks alike: over ``dp_replicate`` with ``outer_strategy="optim"`` (HFSDP: each
holds the same FSDP2 shard), or over all of data parallel (``no_shard``). Its local tensor is then cut once more, as
``torch.shard`` cuts, and each replica updates its own rows (:class:`OptimizerShard`):

    mesh                (dp_replicate,                dp_shard,              tp)
    parameter                                         (_StridedShard(0, tp),  Shard(0))
    main weight, state  (_StridedShard(0, shard*tp),  _StridedShard(0, tp),   Shard(0))

    gradients (one shard each)  --reduce-scatter, AVG-->  this rank's rows, in fp32
    new rows, as they are sent  --all-gather-->           shards

The first dim is cut that all its axes cut evenly (of a quantized weight, into whole blocks if any is), dim 0 if there
is none. Main weights and states are DTensors of the parameter's own shape. DCP's own arithmetic is not exact for dims
that several axes cut unevenly, so that te_fsdp.checkpoint goes by :attr:`OptimizerShard.low` and ``high``.

A large tensor that is cut along its first dim is sent by itself, without a copy: its rows lie one after the other
already. All others are packed, one collective per group and dtype, however many there are. Rows are padded to the same
number per replica. Gradients below fp32 are sent as they are, by an all-to-all, and added up in fp32 here: what a
reduce-scatter in fp32 gives, for half of the bytes. A replica whose backward has not reached a parameter sends zeros,
and says so: behind the packed rows each replica sends one number per parameter, 1 where it has a gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from te_fsdp import _torch
from te_fsdp.layout import chunk_range
from te_fsdp.move.pending import Pending, all_of
from te_fsdp.move.start import LARGE, Buffer, GradComm, Rows, comm_of, gather_all, start
from te_fsdp.parameters import plan_of
from te_fsdp.quantized.components import block_of
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from te_fsdp._torch import DTensorSpec

#: The outer axis.
OUTER = "dp_replicate"


class OptimizerShard:
    """The part of one parameter's local tensor that this rank keeps main weight and state for: its rows along ``dim``.

    Attributes:
        parameter: The parameter: plain, or a DTensor.
        mesh: The parameter's own mesh (none for a plain tensor) with the axis of its replicas put in front.
        reduced: Whether gradients arrive equal on all replicas, so that they are only cut. Otherwise they are averaged.
        partial: How gradients that are not reduced lie on the replicas, in DTensor's words: summed if the user wants.
        group: Process group of the replicas.
        ranks: Their global ranks.
        size: Their number.
        dtype: Of its main weight and of the average of its gradients: fp32 for low-precision parameters.
        dim: The dim that is cut.
        rows: How the local tensor is cut over the replicas.
        low, high: This rank's rows.
        shape: Of these.
        decoupled: Whether the optimizer takes gradients of any dtype (``decoupled_grad``).
        obstacles: Why the weight cannot be sent as bytes, by class and shape of the local tensor (``outer_gather``).
    """

    def __init__(self, parameter: torch.Tensor, mesh: DeviceMesh, *, reduced: bool, sums: bool) -> None:
        local = _torch.local_of(parameter)
        self.parameter, self.mesh, self.reduced = parameter, mesh, reduced
        self.partial = Partial("sum" if sums else "avg")
        self.group, self.size = mesh.get_group(0), mesh.size(0)
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self.dim = _dim_to_cut(parameter, mesh)
        self.rows = Rows(local.shape, self.dim, self.size)
        self.low, self.high = chunk_range(local.shape[self.dim], self.size, mesh.get_local_rank(0))
        self.shape = (*local.shape[: self.dim], self.high - self.low, *local.shape[self.dim + 1 :])
        self.decoupled = False
        self.obstacles: dict[tuple[type, tuple[int, ...]], str | None] = {}
        # Made once: they take longer than all the rest of what a step does with them.
        self._specs: dict[torch.dtype, DTensorSpec] = {}
        self._rows: dict[torch.Size, Rows] = {local.shape: self.rows}

    @property
    def sent(self) -> torch.dtype:
        """Dtype of its gradient, the same on replicas that have none; that of the average where it could be any."""
        own = None if self.decoupled else getattr(self.parameter, "grad_dtype", self.parameter.dtype)
        return own or self.dtype

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

    def has_whole(self, unit: int) -> bool:
        """Whether every replica of every piece has equally many rows, a multiple of ``unit``.

        Local operation on the parameter's global shape: all ranks find the same, whatever their own pieces are.
        """
        parts = self.size * _parts(self.parameter, self.mesh, self.dim)
        return self.parameter.shape[self.dim] % (unit * parts) == 0

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placements of main weight and states on ``mesh``."""
        own = self.parameter.placements if isinstance(self.parameter, DTensor) else ()
        return (_torch.strided_shard(self.dim, _parts(self.parameter, self.mesh, self.dim)), *own)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor like the parameter's local one; a view."""
        return local.narrow(self.dim, self.low, self.high - self.low)

    def rows_like(self, whole: torch.Tensor) -> Rows:
        """How a tensor is cut that lies as the parameter does, such as a buffer of a quantized weight."""
        found = self._rows.get(whole.shape)
        if found is None:
            found = self._rows[whole.shape] = Rows(whole.shape, self.dim, self.size)
        return found

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
    placements = enumerate(parameter.placements if isinstance(parameter, DTensor) else (), 1)
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


def optimizer_shard(parameter: torch.Tensor) -> OptimizerShard | None:
    """What this rank keeps state for, if replicas share a parameter's optimizer state; ``None`` where they do not.

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
        mesh = root[axes] if len(axes) == 1 else _torch.flatten_mesh(root[axes], name)
        mesh = mesh if own is None else _torch.concatenated_meshes(mesh, own)
        return OptimizerShard(parameter, mesh, reduced=True, sums=False)
    assert own is not None and own.mesh_dim_names is not None
    mesh = root[(*axes, *own.mesh_dim_names)]
    return OptimizerShard(parameter, mesh, reduced=False, sums=not state.average_gradients)


T = TypeVar("T")

#: Elements; kernels read several at once from addresses that allow it.
_ALIGNED = 16


def _by_kind(members: Iterable[T], kinds: Iterable[Hashable]) -> list[list[T]]:
    """What is sent together: members of one kind, the kinds in the order in which they first come."""
    found: dict[Hashable, list[T]] = {}
    for member, kind in zip(members, kinds, strict=True):
        found.setdefault(kind, []).append(member)
    return list(found.values())


def _is_large(rows: Rows) -> bool:
    """Whether a tensor is worth a collective of its own; the same on all replicas."""
    return rows.is_even and rows.dim == 0 and rows.numel * rows.ranks >= LARGE


# ------------------------------------------------------------------------------------------------------------ gradients


class Average(NamedTuple):
    """This rank's rows of a gradient, averaged over the replicas.

    Attributes:
        rows: Of the shape of the :class:`OptimizerShard`.
        replicas: How many replicas have a gradient, on the device and not as a whole number; ``None`` where this rank
            is one of them. Only a rank without a gradient has to ask, which on a GPU waits for the device.
    """

    rows: torch.Tensor
    replicas: torch.Tensor | None = None


def comm_for(shard: OptimizerShard) -> GradComm | None:
    """How the model that a parameter belongs to wants gradients to be sent. Local operation."""
    state = state_of(shard.parameter)
    return comm_of(state.model) if state is not None else None


class Averaging:
    """How gradients of some parameters are averaged over the replicas, or summed if the user wants sums.

    What never changes from step to step is looked at once: which of them are sent together, and where each lies.

    Attributes:
        shards: The parameters, in the same order on all replicas.
    """

    def __init__(self, shards: Sequence[OptimizerShard]) -> None:
        self.shards = tuple(shards)
        self._alone = [_is_large(shard.rows) for shard in shards]
        self._numels = [math.prod(shard.shape) for shard in shards]
        # Places of those with the same replicas and dtypes, and where the small ones of these lie together.
        self._kinds: list[tuple[list[int], Buffer]] = []
        self._dtypes: list[torch.dtype | None] | None = None

    def _look(self) -> None:
        """Settle what is sent together, as long as gradients keep their dtypes."""
        dtypes = [getattr(shard.parameter, "grad_dtype", None) for shard in self.shards]
        if dtypes == self._dtypes:
            return
        self._dtypes, self._kinds = dtypes, []
        kinds = [(shard.ranks, shard.dtype, shard.sent) for shard in self.shards]
        for places in _by_kind(range(len(kinds)), kinds):
            small = [self.shards[at].rows.numel for at in places if not self._alone[at]]
            self._kinds.append((places, Buffer(tuple(small), _ALIGNED)))

    def start(
        self,
        gradients: Sequence[torch.Tensor | None],
        *,
        comm: GradComm | None = None,
        group: dist.ProcessGroup | None = None,
        flags: bool = True,
        async_op: bool = False,
    ) -> Pending[list[Average]]:
        """Begin.

        Collective over the replicas, all the same: per group and dtype a reduce-scatter, and one more for each large
        tensor, in what the model's :class:`GradComm` says. If that is the gradients' own dtype, and below the shards',
        they are all-to-alls, and added up here. Temporary memory: what is packed, or has another dtype on the wire, and
        what an all-to-all brings.

        Args:
            gradients: Local gradient of each, of the local tensor's shape; ``None`` where this rank has none.
            comm: How gradients are sent; ``None``: as the models that the parameters belong to say.
            group: The replicas of all of them; ``None``: of each its own.
            flags: Whether replicas tell each other which gradients they have. Otherwise averages are there in any case,
                zero where no replica has a gradient.
            async_op: Whether nothing waits for it before the result is asked for; the gradients must not change until
                then.

        Returns:
            This rank's rows, in the order of the shards.
        """
        found: list[Any] = [None] * len(self.shards)
        moves: list[Pending[torch.Tensor]] = []

        def send(source: torch.Tensor, shape: Sequence[int], first: OptimizerShard, by: Any) -> torch.Tensor:
            into = torch.empty(shape, dtype=first.dtype, device=source.device)
            if into.numel():
                to, flat = group or first.group, into.view(-1)
                if source.dtype != first.dtype and (by is None or by.dtype is None):
                    by = replace(by or GradComm(), fp32_sum=True)
                moves.append(start(source, first.partial, Shard(0), to, by, into=flat, async_op=async_op))
            return into

        self._look()
        for places, buffer in self._kinds:
            first = self.shards[places[0]]
            by = comm or comm_for(first)
            packed = self._packed(places, buffer, gradients, flags)
            result = send(packed.view(-1), packed.shape[1:], first, by)
            pieces = iter(buffer.pieces(result))
            for flag, at in enumerate(places, buffer.numel):
                shard, gradient = self.shards[at], gradients[at]
                if not self._alone[at]:
                    rows = next(pieces)[: self._numels[at]].view(shard.shape)
                else:
                    if gradient is None:
                        gradient = packed.new_zeros(shard.rows.shape)
                    rows = send(gradient.to(packed.dtype).contiguous().view(-1), shard.shape, first, by)
                asks = flags and gradients[at] is None
                found[at] = Average(rows, result[flag] if asks else None)
        return all_of(moves).then(lambda unused: found)

    def _packed(
        self, places: list[int], buffer: Buffer, gradients: Sequence[torch.Tensor | None], flags: bool
    ) -> torch.Tensor:
        """What all replicas get of each small gradient, replica after replica, each time with the flags behind."""
        first, numel = self.shards[places[0]], buffer.numel + (len(places) if flags else 0)
        device = _torch.local_of(first.parameter).device
        memory = torch.empty(first.size, numel, dtype=first.sent, device=device)
        memory[:, buffer.numel :] = 1
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        pieces = iter(buffer.pieces(memory))
        for flag, at in enumerate(places, buffer.numel):
            shard, gradient = self.shards[at], gradients[at]
            if flags and gradient is None:
                memory[:, flag] = 0
            if self._alone[at]:
                continue
            piece = next(pieces)
            if gradient is None or not shard.rows.is_even:
                piece.zero_()
            if gradient is not None:
                for rows, there in shard.rows.pairs(gradient, piece):
                    targets.append(there)
                    sources.append(rows)
        _torch.copy_all_(targets, sources)
        return memory


# -------------------------------------------------------------------------------------------------------------- weights


class Part(NamedTuple):
    """One tensor of which each replica has rows.

    Attributes:
        shard: Of the parameter: names the replicas, and the dim.
        mine: This rank's rows, along that dim.
        whole: Where the rows of all replicas go, of the same dtype; this rank's may lie there already. A buffer of a
            quantized weight may have another shape than the weight.
        as_bytes: Whether it is packed together with tensors of other dtypes of which this holds.
    """

    shard: OptimizerShard
    mine: torch.Tensor
    whole: torch.Tensor
    as_bytes: bool = False


def start_gather(parts: Sequence[Part]) -> Pending[None]:
    """Begin to give each replica the rows of all replicas; nothing that is packed is written before the wait.

    Collective over the replicas, all the same: one all-gather per group and dtype, one for bytes, and one more for each
    large tensor; those of one dtype, or of bytes, as one operation of NCCL's. Temporary memory: what is packed, once.

    Args:
        parts: In the same order on all replicas; they must not change before the result is waited for.
    """
    moves: list[Pending[Any]] = []
    kinds = [(part.shard.ranks, "bytes" if part.as_bytes else part.mine.dtype) for part in parts]
    for kind in _by_kind(parts, kinds):
        alone: list[Part] = []
        packed: list[Part] = []
        for part in kind:
            in_place = part.whole.is_contiguous() and part.mine.is_contiguous()
            (alone if in_place and _is_large(part.shard.rows_like(part.whole)) else packed).append(part)
        flat = [(part.mine.view(-1), part.whole.view(-1)) for part in alone]
        if len(alone) > 1 and alone[0].whole.device.type != "cpu":  # gloo would send one after the other
            moves.append(gather_all(flat, alone[0].shard.group))
        else:
            for part, (mine, whole) in zip(alone, flat, strict=True):
                moves.append(start(mine, Shard(0), Replicate(), part.shard.group, into=whole))
        if packed:
            moves.append(_start_packed_gather(packed))
    return all_of(moves)


def _start_packed_gather(parts: Sequence[Part]) -> Pending[None]:
    """One all-gather of parts of one kind; the wholes are written by the wait."""
    dtype = torch.uint8 if parts[0].as_bytes else parts[0].mine.dtype
    rows = [part.shard.rows_like(part.whole) for part in parts]
    sizes = [
        r.numel * part.mine.element_size() // dtype.itemsize for r, part in zip(rows, parts, strict=True)
    ]
    buffer = Buffer(tuple(sizes), _ALIGNED)
    # Not view(-1), which leaves a single element the stride of the rows that it was cut from: bytes want 1.
    flat = [part.mine.contiguous().as_strided((part.mine.numel(),), (1,)) for part in parts]
    mine = buffer.pack([each.view(dtype) for each in flat], dtype, flat[0].device)
    del flat
    gathered = mine.new_empty(parts[0].shard.size, mine.numel())

    def unpack(unused: torch.Tensor) -> None:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for part, each, piece in zip(parts, rows, buffer.pieces(gathered), strict=True):
            for there, came in each.pairs(part.whole, piece.view(part.mine.dtype)):
                targets.append(there)
                sources.append(came)
        _torch.copy_all_(targets, sources)

    into = gathered.view(-1)
    return start(mine, Shard(0), Replicate(), parts[0].shard.group, into=into).then(unpack)
