"""Reductions over the outer axis, in the step, or begun while its last backward runs.

Gradients below fp32 are sent as they are, by an all-to-all, and added up in fp32 here: what a reduce-scatter in fp32
gives, for half of the bytes. A replica whose backward has not reached a parameter sends zeros, and says so: behind the
packed rows each replica sends one number per parameter, 1 where it has a gradient.

    a plain loop                  nothing begins early: another backward may follow
    first ``microbatch(is_last)`` nothing begins early; in which order backward leaves units is seen and, at the step,
                                  agreed on: once all ranks have had one
    later ones                    a unit begins when FSDP2 has enqueued its reduction and all units before it have begun
                                  (:mod:`te_fsdp.move.pending`)
    the step                      (or a norm) replicas compare what has begun; what has not begins, in the same order

So every replica calls the same collectives in the same order, whatever it has used. Each begins at most once between
two steps, and none is waited for before the step.

What has begun is stale if a gradient has changed since: after an exception in backward, a further backward,
``zero_grad``, a change by hand. Whoever sees that begins nothing more and says so at the step. All replicas then
complete what any of them has begun, drop it, and average everything anew, as a plain loop does: right, but nothing is
saved. The question at the step goes over the CPU, and waits for no device.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from te_fsdp import _fsdp2, _torch
from te_fsdp.agree import maximum
from te_fsdp.move.pending import Pending, SideStream, UnitOrder, all_of, current_stream, own_group
from te_fsdp.move.start import COMM_DTYPES, Buffer, GradComm, start
from te_fsdp.sharding.outer_shards import ALIGNED, OUTER, OptimizerShard, by_kind, copy_pairs, is_large
from te_fsdp.sharding.state import state_of
from te_fsdp.step_hooks import Seen, gradients_of

if TYPE_CHECKING:
    from te_fsdp.sharding.state import ShardingState

_log = logging.getLogger("te_fsdp")

#: Steps in each of which the ranks ask whether all know their last backward; after these in the 16th, 32nd, ...
_ASKED_ALWAYS = 8
#: Sets of trained parameters whose plans are kept.
_MOST_PLANS = 8
#: Dtypes that gradients may cross the wire in, ``None`` for their own: ranks compare their places here.
_WIRES = (None, *COMM_DTYPES)


class Averaging:
    """How gradients of some parameters are averaged over the replicas, or summed if the user wants sums.

    What never changes from step to step is looked at once: which of them are sent together, and where each lies.

    Args:
        shards: The parameters, in the same order on all replicas.
        flags: Whether replicas tell each other which gradients they have.
    """

    def __init__(self, shards: Sequence[OptimizerShard], *, flags: bool = True) -> None:
        self.shards, self._flags = tuple(shards), flags
        self._alone = [is_large(shard.rows) for shard in shards]
        self._numels = [math.prod(shard.shape) for shard in shards]
        # Places of those with the same replicas and dtypes, and where the small ones of these lie together.
        self._kinds: list[tuple[list[int], Buffer]] = []
        self._dtypes: list[torch.dtype | None] | None = None

    def _look(self) -> None:
        """Settle what is sent together, as long as gradients keep their dtypes."""
        dtypes = [getattr(shard.parameter, "grad_dtype", None) for shard in self.shards]
        if dtypes != self._dtypes:
            self._dtypes, self._kinds = dtypes, []
            kinds = [(shard.ranks, shard.dtype, shard.sent) for shard in self.shards]
            for places in by_kind(range(len(kinds)), kinds):
                small = tuple([self.shards[at].rows.numel for at in places if not self._alone[at]])
                self._kinds.append((places, Buffer(small, ALIGNED, len(places) if self._flags else 0)))

    def start(
        self,
        gradients: Sequence[torch.Tensor | None],
        comm: GradComm | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Pending[list[torch.Tensor | None]]:
        """Begin with local gradients, ``None`` where this rank has none; they must not change until the end.

        Collective over the replicas, all the same: per group and dtype a reduce-scatter, and one more for each large
        tensor, in what the model's :class:`GradComm` says, or ``comm``. If that is the gradients' own dtype, and below
        the shards', they are all-to-alls, and added up here. Temporary memory: what is packed, or has another dtype on
        the wire, and what an all-to-all brings. With a ``group`` for these moves alone nothing waits before the result
        is asked for where there are no streams.

        Returns:
            This rank's rows, in the order of the shards; ``None`` where the flags say that no replica has a gradient.
        """
        found: list[torch.Tensor | None] = [None] * len(self.shards)
        moves: list[Pending[torch.Tensor]] = []
        asked: list[
            tuple[int, torch.Tensor]
        ] = []  # what this rank has no gradient of, and how many replicas have one

        def send(source: torch.Tensor, shape: Sequence[int], first: OptimizerShard, by: Any) -> torch.Tensor:
            into = torch.empty(shape, dtype=first.dtype, device=source.device)
            if into.numel():
                to, flat, late = group or first.group, into.view(-1), group is not None and into.is_cpu
                moves.append(start(source, first.partial, Shard(0), to, by, into=flat, async_op=late))
            return into

        self._look()
        for places, buffer in self._kinds:
            first = self.shards[places[0]]
            by = comm or first.comm
            if first.sent != first.dtype and (by is None or by.dtype is None):
                by = replace(by or GradComm(), fp32_sum=True)
            packed = self._packed(places, buffer, gradients)
            result = send(packed.view(-1), packed.shape[1:], first, by)
            pieces = iter(buffer.pieces(result))
            for flag, at in enumerate(places, buffer.numel - buffer.more):
                shard, gradient = self.shards[at], gradients[at]
                if not self._alone[at]:
                    found[at] = next(pieces)[: self._numels[at]].view(shard.shape)
                else:
                    whole = (
                        packed.new_zeros(shard.rows.shape) if gradient is None else gradient.to(packed.dtype)
                    )
                    found[at] = send(whole.contiguous().view(-1), shard.shape, first, by)
                if self._flags and gradient is None:
                    asked.append((at, result[flag]))

        def finish(unused: None) -> list[torch.Tensor | None]:
            for at, replicas in asked:
                if not bool(replicas > 0):  # waits for the device, on ranks without a gradient alone
                    found[at] = None
            return found

        return all_of(moves).then(finish)

    def _packed(
        self, places: list[int], buffer: Buffer, gradients: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """What all replicas get of each small gradient, replica after replica, each time with the flags behind."""
        first, flags = self.shards[places[0]], buffer.numel - buffer.more
        device = _torch.local_of(first.parameter).device
        memory = torch.empty(first.size, buffer.numel, dtype=first.sent, device=device)
        memory[:, flags:] = 1
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        pieces = iter(buffer.pieces(memory))
        for flag, at in enumerate(places, flags):
            shard, gradient = self.shards[at], gradients[at]
            if self._flags and gradient is None:
                memory[:, flag] = 0
            if self._alone[at]:
                continue
            piece = next(pieces)
            if gradient is None or not shard.rows.is_even:
                piece.zero_()
            if gradient is not None:
                copies += [(there, rows) for rows, there in shard.rows.pairs(gradient, piece)]
        copy_pairs(copies)
        return memory


# ------------------------------------------------------------------------------------------- during the last backward


@dataclass(eq=False)
class _Plan:
    """What is sent together, as long as the same parameters are trained."""

    state: ShardingState  #: Of the model
    units: dict[str, Averaging]  #: Name -> its parameters, in the optimizer's order
    groups: list[str]  #: For each of FSDP2's parameter groups that holds some of them, its unit
    order: UnitOrder  #: In which units begin
    steps: int = 0  #: How many there were before the ranks agreed on it


class EarlyAverages:
    """The averages of one optimizer's gradients that may begin in backward; ``shards`` gives what it averages now."""

    def __init__(self, shards: Callable[[], list[OptimizerShard]]) -> None:
        self._shards = shards
        self._plans: dict[tuple[int, ...], _Plan | None] = {}
        self._averaged = 0  # ``last_microbatches`` at the last step
        # For the averages, and for the question at the step.
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._side = SideStream()
        self._begin_anew(None)

    def _begin_anew(self, plan: _Plan | None, backward: int = 0) -> None:
        """Nothing has begun since the last step; ``backward`` is the last one that runs, 0 for none."""
        self._plan, self._backward = plan, backward
        # Units whose averages are under way, in the agreed order, and the gradients that were sent.
        self._begun: dict[str, Pending[list[torch.Tensor | None]]] = {}
        self._sources: list[Seen | None] = []
        self._events: dict[str, list[Any]] = {}  # unit -> after what its gradients are final
        self._comm: GradComm | None = None  # how gradients were sent when the first of them began
        self._stale = False  # whether gradients have changed since, so that all is dropped

    @torch.no_grad()
    def reduced(self, state: ShardingState, unit: str, group: int, event: Any) -> None:
        """FSDP2 has enqueued the reduction of one of a unit's groups, final after ``event``: begin what may begin.

        Collective over the replicas: a reduce-scatter per dtype of each unit, and one for each large tensor. Nothing is
        waited for.
        """
        backward = state.last_microbatches
        if self._begun:  # then these gradients are others than those that were sent?
            self._stale |= self._backward != backward or unit in self._begun
        if not state.last_microbatch or self._stale:
            return
        if self._backward != backward:  # the first unit that this backward leaves
            self._begin_anew(self._plan_now(), backward)
            if self._plan is not None:
                self._plan.order.begin(self._plan.groups)
        plan = self._plan
        if plan is not None and unit in plan.units:
            self._events.setdefault(unit, []).append(event)
            plan.order.arrived(unit, (unit, group))
            while (complete := plan.order.next(len(self._begun))) is not None:
                self._begin(plan, complete)

    def _begin(self, plan: _Plan, unit: str, *, empty: bool = False) -> None:
        """Begin a unit's averages, with zeros if they are to be dropped. Collective over the replicas."""
        averaging, device = plan.units[unit], plan.state.meshes.device
        given = gradients_of([shard.parameter for shard in averaging.shards])
        given = [None] * len(given) if empty else given
        local = [None if g is None else _torch.local_of(g) for g in given]
        if self._comm is None:
            self._comm = replace(averaging.shards[0].comm or GradComm())
        assert self._groups is not None
        start = functools.partial(averaging.start, local, self._comm, self._groups[0])
        events = self._events.pop(unit, [])
        with (
            torch.profiler.record_function(f"te_fsdp::average {unit}"),
            self._side.after_current(device, events),
        ):
            # A stream of its own waits for each move before the next begins, and frees what that has brought.
            self._begun[unit] = self._side.begun(start, local)
        self._sources += Seen.now(given)

    # --- between backward and step

    @property
    def expected(self) -> bool:
        """Whether averages may be under way on some rank, after a last microbatch: the same on all ranks."""
        plan = self._plan_now()
        return plan is not None and bool(plan.order.agreed) and plan.state.last_microbatches != self._averaged

    def forget(self) -> None:
        """Gradients are cleared. What is under way will be dropped when the others come to it. Local operation."""
        self._stale = bool(self._begun)
        if not self._stale:
            self._backward = 0

    @torch.no_grad()
    def finish(self) -> dict[int, torch.Tensor | None]:
        """Complete what has begun on any of the replicas: ``id`` of a parameter -> its average.

        ``None`` where no replica has a gradient; empty if all is yet to be averaged. Parameters of units that never
        begin early are left out. Collective over the replicas: the reductions that have not begun here, and one
        all-reduce of a few integers and one for each parameter, on the CPU, once the ranks have agreed on an order.
        Before that, over the world: an all-reduce of two integers in the first steps, then in ever fewer, and once all
        have had a last microbatch, process groups are made, and two integers for each unit all-reduced.
        """
        plan = self._plan_now()
        if not self._begun:
            self._begin_anew(plan)
        self._stale |= self._plan is not plan
        try:
            found: dict[int, torch.Tensor | None] = {}
            if self._plan is not None and self._plan.order.agreed:
                found = self._complete(self._plan, self._plan.order.agreed)
            if plan is not None and plan.order.agreed is None and self._all_know_the_last(plan):
                self._agree(plan)
            return found
        finally:
            self._begin_anew(None)
            if plan is not None:
                self._averaged = plan.state.last_microbatches

    def _complete(self, plan: _Plan, agreed: tuple[str, ...]) -> dict[int, torch.Tensor | None]:
        """What :meth:`finish` does where the order is known."""
        shards = [shard for unit in agreed for shard in plan.units[unit].shards]
        gradients = gradients_of([shard.parameter for shard in shards])
        self._stale |= not all(Seen.are_same(self._sources, gradients[: len(self._sources)]))
        wire = 0 if self._comm is None else 1 + _WIRES.index(self._comm.dtype)
        has = [gradient is not None for gradient in gradients]
        asked = torch.tensor([len(self._begun), self._stale, wire, *has], dtype=torch.int32)
        assert self._groups is not None
        maximum(asked, self._groups[1])
        most, dropped, wire, *exist = asked.tolist()
        if most == 0:
            return {}
        if self._comm is None:  # others have begun, maybe where gradients were sent in another dtype
            self._comm = replace(shards[0].comm or GradComm(), dtype=_WIRES[wire - 1])
        for unit in agreed[len(self._begun) : most if dropped else None]:
            self._begin(plan, unit, empty=bool(dropped))
        averages = [rows for pending in self._begun.values() for rows in pending.wait()]
        stream: Any = current_stream(plan.state.meshes.device)
        for rows in averages:
            if rows is not None and stream is not None:
                rows.record_stream(stream)  # their memory is the side stream's
        if dropped:
            _warn_once(
                "gradients have changed after their last backward, as microbatch(model, is_last=True) has told it: "
                "what was averaged over dp_replicate during that backward is in vain, and averaged anew. Where each "
                "step does that, run the backward without telling, or change gradients with te_fsdp.scale_gradients "
                "and clip_grad_norm_"
            )
            return {}
        there = zip(shards, averages, exist, strict=True)
        return {id(shard.parameter): rows if exists else None for shard, rows, exists in there}

    def _all_know_the_last(self, plan: _Plan) -> bool:
        """Whether all ranks have had ``microbatch(is_last=True)`` since the last step. Collective over the model's.

        Ranks that have not cannot know that others have, so that all ask: in the first steps, and then less and less
        often, as most loops that have not used it by then never will.
        """
        plan.steps += 1
        if plan.steps > _ASKED_ALWAYS and plan.steps & (plan.steps - 1):
            return False
        known = int(plan.state.last_microbatches != self._averaged)
        seen = torch.tensor([known, -known], dtype=torch.int32, device=plan.state.meshes.device)
        maximum(seen, plan.state.meshes.device_mesh)
        some, all_know = map(bool, seen)
        if some and not all_know:
            _warn_once(
                "microbatch(model, is_last=True) was used on some ranks only: averages over dp_replicate wait for the "
                "step. Use it on all ranks for the last backward of a step"
            )
        return all_know

    def _agree(self, plan: _Plan) -> None:
        """Settle the order of units, after the first last backward. Collective over the world."""
        if not dist.is_gloo_available():
            plan.order.agreed = ()
            return
        if self._groups is None:
            root, device = plan.state.meshes.device_mesh, plan.state.meshes.device
            backends = (dist.get_default_backend_for_device(device.type), "gloo")
            averages, question = (own_group(root, OUTER, backend) for backend in backends)
            self._groups = averages, question
            # Connected here, where all ranks come by, and not in the midst of a backward.
            dist.all_reduce(torch.zeros(1, device=device), group=averages)
        plan.order.agree(plan.state.meshes)

    def _plan_now(self) -> _Plan | None:
        """The plan for what is averaged now; ``None`` where nothing of it can begin early. Local operation."""
        shards = self._shards()
        trained = tuple([id(shard.parameter) for shard in shards])
        if trained not in self._plans:
            if len(self._plans) > _MOST_PLANS:
                self._plans.clear()
            self._plans[trained] = _planned(shards)
        return self._plans[trained]


def _planned(shards: list[OptimizerShard]) -> _Plan | None:
    states = {id(state): state for shard in shards if (state := state_of(shard.parameter)) is not None}
    if len(states) != 1 or len({shard.ranks for shard in shards}) != 1:
        return None
    (state,) = states.values()
    units: dict[str, Averaging] = {}
    groups: list[str] = []
    place = {id(shard.parameter): at for at, shard in enumerate(shards)}
    for name, unit in state.modules.items():
        own = [[place[id(p)] for p in group if id(p) in place] for group in _fsdp2.sharded_by_group(unit)]
        if any(own):
            units[name] = Averaging([shards[at] for at in sorted(itertools.chain(*own))], flags=False)
            groups += [name for members in own if members]
    return _Plan(state, units, groups, UnitOrder(list(units))) if units else None


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)
