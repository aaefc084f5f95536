"""``fsdp_no_shard``: parameters that stay whole on every data-parallel rank, inside a sharded model.

    sharded       cut over data parallel, gathered for each use, gradients reduce-scattered, by FSDP2
    replicated    whole, never gathered, unknown to FSDP2, gradients reduced by ``no_shard_reduce``

The mark is kept by the owner: parameters are replaced all the time (meta init, ``to_empty``, ``deepcopy``,
``load_state_dict(assign=True)``, TE's ``reset_parameters``) and lose what hangs on them. Strategy ``no_shard`` is the
same thing for all parameters of a unit. Their gradients are all-reduced in buckets (:class:`Bucket`); when and over
whom, :mod:`te_fsdp.features.replicated_gradients` decides.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate

from te_fsdp.collectives.async_work import Pending, current_stream
from te_fsdp.collectives.groups import own_group
from te_fsdp.collectives.redistribute import PackedLayout, redistribute
from te_fsdp.errors import OrderError, message
from te_fsdp.lifecycle import registered_at
from te_fsdp.records import NO_SHARD, binding_of, get_or_create_record
from te_fsdp.upstream import fsdp2_units, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.collectives.redistribute import GradComm
    from te_fsdp.records import ParameterPlan


def fsdp_no_shard(what: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]) -> None:
    """Keep parameters whole on every data-parallel rank when the model is sharded.

    They are never gathered, and FSDP2 does not see them: no hooks on modules with no other parameters, and no unit
    of them. What tensor parallelism cuts stays cut. Gradients of those that are trained are summed up over data
    parallel at the end of each backward, in one all-reduce per dtype; the ranks must hold equal values, which
    :func:`te_fsdp.fully_shard` checks. Frozen ones cost no communication at all.

    Call it before :func:`te_fsdp.fully_shard`, on all ranks alike, with a module (all parameters in it and in its
    children), a parameter, or several of these. Local operation. The mark stays on the modules that own the parameters,
    through deep copies, initialisation from meta and loading; that of a parameter which no module owns yet stays on the
    parameter.

    Raises:
        TypeError: Something else.
        OrderError: The module or parameter is sharded already.
    """
    several = [what] if isinstance(what, (nn.Module, nn.Parameter)) else what
    if not isinstance(several, Iterable) or isinstance(several, (str, torch.Tensor)):
        raise TypeError(
            message("fsdp_no_shard", expected="a module, a parameter or several", got=type(what).__name__)
        )
    items = list(several)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise TypeError(
                message("fsdp_no_shard", expected="modules and parameters", got=type(item).__name__)
            )
    modules = [item for item in items if isinstance(item, nn.Module)]
    parameters = [item for item in items if not isinstance(item, nn.Module)]
    owned = list(registered_at({id(parameter) for parameter in parameters})) if parameters else []
    for module in [*(sub for top in modules for sub in top.modules()), *(owner for owner, _ in owned)]:
        _check_unsharded(module)
    for module in modules:
        for sub in module.modules():
            sub.__dict__[NO_SHARD] = True
    for parameter in parameters:
        get_or_create_record(parameter).no_shard = True
    for module, name in owned:
        known = module.__dict__.get(NO_SHARD, frozenset())
        if known is not True:
            module.__dict__[NO_SHARD] = known | {name}


def _check_unsharded(module: nn.Module) -> None:
    binding = binding_of(module)
    if fsdp2_units.is_fsdp_module(module) or (binding is not None and binding.fsdp.is_managed):
        label = (binding.name if binding is not None else "") or type(module).__name__
        raise OrderError(
            f"{label}: fsdp_no_shard on a module that is sharded already",
            why="Its parameters are cut, or their gradients are reduced by FSDP2",
            fix="call te_fsdp.fsdp_no_shard before te_fsdp.fully_shard",
        )


@dataclass(frozen=True)
class ReplicatedParameter:
    """A parameter that stays whole, by its owner: initialisation and loading replace the parameter itself."""

    plan: ParameterPlan  #: What is settled about it; of its first place if it is tied
    module: nn.Module  #: The owner

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is there now."""
        return self.module._parameters[self.plan.name]  # type: ignore[return-value]


#: Elements of one all-reduce; larger tensors are sent alone. A copy of all gradients could be as large as the model.
CAPACITY = 1 << 25
# Gradients are views of a bucket: each begins where kernels may read it in vectors.
_ALIGNED = 64


@dataclass(frozen=True)
class ReductionGroup:
    """Over whom gradients are added up, ``None`` for one rank, and what the sum is divided by (1 for sums)."""

    group: dist.ProcessGroup | None
    divisor: int

    @classmethod
    def of(cls, mesh: DeviceMesh | None, name: str, root: DeviceMesh | None, divisor: int) -> ReductionGroup:
        """Those of a mesh. Collective over the world where a process group is made.

        Of several axes the group is these reductions' own in any case, of this ``name``; of a single one where ``root``
        is given, the mesh of the job that it is cut from. Models on the same ranks share it ([Note: shared groups]).
        """
        axes = () if mesh is None else [axis for axis in mesh.mesh_dim_names or () if mesh[axis].size() > 1]
        if mesh is None or not axes:
            return cls(None, divisor)
        if len(axes) > 1:
            return cls(_torch.flatten_mesh(mesh, name).get_group(), divisor)
        return cls(mesh[axes[0]].get_group() if root is None else own_group(root, axes[0], name), divisor)


@dataclass(eq=False)
class GradientSlot:
    """One replicated parameter and the parts of its gradient."""

    replicated: ReplicatedParameter
    ranks: ReductionGroup  #: Over whom its gradient is added up
    partial: bool  #: Whether each tp rank computes a part of its gradient
    unit: str | None  #: That it is sent with; ``None``: at the end of backward, with all others of its kind
    grads_dtype: torch.dtype | None  #: In which its gradient is accumulated; ``None``: its own
    hooked: weakref.ref[torch.Tensor] | None = None  #: The parameter whose gradients are watched
    handles: list[Any] = field(default_factory=list)  #: Its hooks
    reduced: torch.Tensor | None = None  #: ``.grad`` from before, while a backward runs
    unreduced: torch.Tensor | None = None  #: What is waiting for its reduction

    @property
    def parameter(self) -> nn.Parameter:
        """The one that is there now."""
        return self.replicated.parameter


#: Gives a slot's gradient away; ``None`` if this rank has none.
Take = Callable[[GradientSlot], "torch.Tensor | None"]
#: What a bucket's reduction gives: each parameter that any rank has a gradient of, with its reduced local gradient.
Reduced = list[tuple[GradientSlot, torch.Tensor]]


def pack(slots: Iterable[GradientSlot], tp: DeviceMesh | None) -> list[Bucket]:
    """Buckets of at most :data:`CAPACITY` elements (or one tensor), in an order that follows from the slots' own.

    Local operation; the slots come in an order that is the same on all ranks.
    """
    kinds: dict[tuple[ReductionGroup, torch.dtype, torch.device], list[tuple[GradientSlot, torch.Size]]] = {}
    for slot in slots:
        local = _torch.local_of(slot.parameter)
        kind = slot.ranks, slot.grads_dtype or slot.parameter.dtype, local.device
        kinds.setdefault(kind, []).append((slot, local.shape))
    buckets = []
    for kind, same in kinds.items():
        # What is added up over tp comes first: it is one piece of the bucket.
        filling: list[tuple[GradientSlot, torch.Size]] = []
        filled = 0
        for slot, shape in sorted(same, key=lambda member: not member[0].partial):
            room = -(-shape.numel() // _ALIGNED) * _ALIGNED
            if filling and filled + room > CAPACITY:
                buckets.append(Bucket(tuple(filling), *kind, tp))
                filling, filled = [], 0
            filling.append((slot, shape))
            filled += room
        buckets.append(Bucket(tuple(filling), *kind, tp))
    return buckets


@dataclass(frozen=True, eq=False)
class Bucket:
    """Gradients of one kind that are sent together."""

    #: Each parameter with its local shape; those to add up over tp first, then the others.
    members: tuple[tuple[GradientSlot, torch.Size], ...]
    ranks: ReductionGroup  #: Over whom they are added up
    dtype: torch.dtype  #: In which they are accumulated
    device: torch.device
    tp: DeviceMesh | None

    @functools.cached_property
    def buffer(self) -> PackedLayout:
        """Where the gradients lie, with a flag for each behind them."""
        sizes = tuple(shape.numel() for _, shape in self.members)
        return PackedLayout(sizes, _ALIGNED, more=len(sizes))

    @torch.no_grad()
    def start(self, comm: GradComm | None, take: Take | None) -> Pending[Reduced]:
        """Begin to all-reduce the bucket. Each rank says by flags which gradients it has: others may have them.

        Collective over data parallel (once), and over tp if it holds partial gradients (once, and the current stream
        waits for that). The gradients that ``take`` gives (without it: all are NaN) are freed when they are in the
        bucket, unless the caller holds them. To wait for it is collective over data parallel with fp32 sums of another
        wire dtype alone (an all-gather).
        """
        if take is None:
            mine = [True] * len(self.members)
            flat = torch.full((self.buffer.numel,), math.nan, dtype=self.dtype, device=self.device)
        else:
            gradients = [take(slot) for slot, _ in self.members]
            mine = [gradient is not None for gradient in gradients]
            flags = torch.ones(len(mine), dtype=self.dtype, device=self.device)
            if not all(mine):
                flags = flags.new_tensor([float(flag) for flag in mine])
            flat = self.buffer.pack(gradients, self.dtype, self.device, flags)
            del gradients  # their memory is free for what is sent
        rooms = zip(self.members, self.buffer.rooms, strict=True)
        partial = sum(room for (slot, _), room in rooms if slot.partial)
        if partial and self.tp is not None:
            dist.all_reduce(flat[:partial], group=self.tp.get_group())
        unpack = functools.partial(self._unpack, mine)
        if self.ranks.group is None:
            return Pending(lambda: flat, None, current_stream(flat.device)).then(unpack)
        source = Partial("sum" if self.ranks.divisor == 1 else "avg")
        return redistribute(flat, source, Replicate(), self.ranks.group, comm).then(unpack)

    def _unpack(self, mine: list[bool], flat: torch.Tensor) -> Reduced:
        """The gradients that any of the ranks had; ``mine`` says for each member whether this rank had one."""
        ranks = self.ranks
        averaged = ranks.group.size() if ranks.group is not None and ranks.divisor != 1 else 1
        # Flags of other ranks are read, and the device waited for, only where this rank lacks a gradient. NaN counts.
        seen = mine if all(mine) else [flag != 0 for flag in flat[-len(mine) :].tolist()]
        if averaged != ranks.divisor:
            flat.mul_(averaged / ranks.divisor)
        pieces = zip(self.members, self.buffer.pieces(flat), seen, strict=True)
        return [(slot, piece.view(shape)) for (slot, shape), piece, given in pieces if given]


@dataclass(eq=False)
class Reduction:
    """One reduction of all gradients."""

    early: Sequence[tuple[str, Bucket]]  #: Buckets that may begin during backward, each with its unit
    rest: Sequence[Bucket]  #: Those that are reduced at the end, one after the other
    comm: GradComm | None  #: How gradients are sent
    take: Take | None  #: Gives them
    _pending: deque[Pending[Reduced]] = field(default_factory=deque)

    def start(self, is_complete: Callable[[str], bool]) -> None:
        """Begin the early buckets, in order, as far as their units are complete. Collective; nothing is waited for."""
        for unit, bucket in self.early[len(self._pending) :]:
            if not is_complete(unit):
                return
            with torch.profiler.record_function(f"te_fsdp::reduce_no_shard {unit}"):
                self._pending.append(bucket.start(self.comm, self.take))

    def finish(self) -> Iterator[tuple[GradientSlot, torch.Tensor]]:
        """Begin what has not begun, and wait; gives what any of the ranks has a gradient of. Collective as that."""
        self.start(lambda unit: True)
        while self._pending:
            yield from self._pending.popleft().wait()
        for bucket in self.rest:
            with torch.profiler.record_function("te_fsdp::reduce_no_shard"):
                yield from bucket.start(self.comm, self.take).wait()

    def abandon(self) -> None:
        """After an exception in backward: complete the reduction, and drop the results.

        Ranks may have begun different buckets, so that all complete the set, with NaN: a rank that has seen no
        exception must not take what it gets for gradients. Collective over data parallel.
        """
        self.take = None
        self.comm = None if self.comm is None else replace(self.comm, look=None)
        deque(self.finish(), maxlen=0)
