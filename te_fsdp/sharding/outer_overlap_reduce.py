"""Overlapped reductions over the outer axis: averages over replicas that begin while a step's last backward runs.

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
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp import _fsdp2, _torch
from te_fsdp.agree import maximum
from te_fsdp.move.pending import Pending, SideStream, UnitOrder, current_stream, own_group
from te_fsdp.move.start import COMM_DTYPES, GradComm
from te_fsdp.sharding.outer_collectives import OUTER, Average, Averaging, OptimizerShard, comm_for
from te_fsdp.sharding.state import ShardingState, state_of
from te_fsdp.step_hooks import Seen, gradients_of

_log = logging.getLogger("te_fsdp")

#: Steps in each of which the ranks ask whether all know their last backward; after these in the 16th, 32nd, ...
_ASKED_ALWAYS = 8
#: Sets of trained parameters whose plans are kept.
_MOST_PLANS = 8
#: Dtypes that gradients may cross the wire in, ``None`` for their own: ranks compare their places here.
_WIRES = (None, *COMM_DTYPES)


@dataclass(eq=False)
class _Plan:
    """What is sent together, as long as the same parameters are trained.

    Attributes:
        state: Of the model.
        units: Name -> its parameters, in the optimizer's order.
        groups: For each of FSDP2's parameter groups that holds some of them, its unit.
        order: In which units begin.
        steps: How many there were before the ranks agreed on it.
    """

    state: ShardingState
    units: dict[str, Averaging]
    groups: list[str]
    order: UnitOrder
    steps: int = 0


class _Begun(NamedTuple):
    """A unit whose averages are under way.

    Attributes:
        unit: Its name.
        sources: For each parameter the gradient that was sent; ``None``: there was none.
        pending: The averages, in the order of the parameters.
    """

    unit: str
    sources: list[Seen | None]
    pending: Pending[list[Average]]


class EarlyAverages:
    """The averages of one optimizer's gradients that may begin in backward.

    Args:
        shards: What the optimizer trains and averages now, in its order; the same on all replicas.
    """

    def __init__(self, shards: Callable[[], list[OptimizerShard]]) -> None:
        self._shards = shards
        self._plans: dict[tuple[int, ...], _Plan | None] = {}
        self._averaged = 0  # ``last_microbatches`` at the last step
        # For the averages, and for the question at the step.
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._side = SideStream()
        self._begin_anew(None)

    def _begin_anew(self, plan: _Plan | None, backward: int = 0) -> None:
        """Nothing has begun since the last step. Local operation.

        Args:
            plan: Of the parameters that are trained; ``None`` where nothing of theirs can begin early.
            backward: Which of the loop's last backwards runs (``ShardingState.last_microbatches``); 0: none.
        """
        self._plan, self._backward = plan, backward
        self._begun: list[_Begun] = []  # in the agreed order
        self._events: dict[str, list[Any]] = {}  # unit -> after what its gradients are final
        self._comm: GradComm | None = None  # how gradients were sent when the first of them began
        self._stale = False  # whether gradients have changed since, so that all is dropped

    # --- during backward

    @torch.no_grad()
    def reduced(self, state: ShardingState, unit: str, group: int, event: Any) -> None:
        """FSDP2 has enqueued the reduction of a parameter group: begin what may begin.

        Collective over the replicas: a reduce-scatter per dtype of each unit, and one for each large tensor. Nothing is
        waited for.

        Args:
            state: Of the model.
            unit: The unit's name.
            group: Number of the parameter group in it.
            event: After which its gradients are final; ``None`` without streams.
        """
        backward = state.last_microbatches
        if self._begun:  # then these gradients are others than those that were sent?
            self._stale |= self._backward != backward or any(begun.unit == unit for begun in self._begun)
        if not state.last_microbatch or self._stale:
            return
        if self._backward != backward:  # the first unit that this backward leaves
            self._begin_anew(self._plan_of(self._shards()), backward)
            if self._plan is not None:
                self._plan.order.begin(self._plan.groups)
        plan = self._plan
        if plan is None or unit not in plan.units:
            return
        self._events.setdefault(unit, []).append(event)
        plan.order.arrived(unit, (unit, group))
        while (complete := plan.order.next(len(self._begun))) is not None:
            self._begin(plan, complete)

    def _begin(self, plan: _Plan, unit: str, *, empty: bool = False) -> None:
        """Begin a unit's averages, with zeros if they are to be dropped. Collective over the replicas."""
        shards = plan.units[unit].shards
        given = [None] * len(shards) if empty else gradients_of([shard.parameter for shard in shards])
        local = [None if g is None else _torch.local_of(g) for g in given]
        if self._comm is None:
            self._comm = replace(comm_for(shards[0]) or GradComm())
        assert self._groups is not None
        # A stream of its own waits for each move before the next begins, and frees what that has brought.
        own = {"group": self._groups[0], "async_op": plan.state.meshes.device.type == "cpu"}
        start = functools.partial(plan.units[unit].start, local, comm=self._comm, flags=False, **own)
        with (
            torch.profiler.record_function(f"te_fsdp::average {unit}"),
            self._side.after_current(plan.state.meshes.device, self._events.pop(unit, [])),
        ):
            pending = self._side.begun(start, local)
        self._begun.append(_Begun(unit, Seen.now(given), pending))

    # --- between backward and step

    @property
    def expected(self) -> bool:
        """Whether averages may be under way on some rank: there was a last microbatch since the last step.

        The same on all ranks.
        """
        plan = self._plan_of(self._shards())
        return plan is not None and bool(plan.order.agreed) and plan.state.last_microbatches != self._averaged

    def forget(self) -> None:
        """Gradients are cleared. What is under way will be dropped when the others come to it. Local operation."""
        self._stale = bool(self._begun)
        if not self._stale:
            self._backward = 0

    @torch.no_grad()
    def finish(self, shards: list[OptimizerShard]) -> dict[int, Average | None]:
        """Complete what has begun on any of the replicas.

        Collective over the replicas: the reductions that have not begun here, and one all-reduce of a few integers and
        one for each parameter, on the CPU, once the ranks have agreed on an order. Before that, over the world: an
        all-reduce of two integers in the first steps, then in ever fewer, and once all have had a last microbatch,
        process groups are made, and two integers for each unit all-reduced.

        Args:
            shards: What is to be averaged.

        Returns:
            ``id`` of a parameter -> its average, ``None`` where no replica has a gradient; empty if all is yet to be
            averaged. Parameters of units that never begin early are left out.
        """
        plan = self._plan_of(shards)
        if not self._begun:
            self._begin_anew(plan)
        self._stale |= self._plan is not plan
        try:
            found: dict[int, Average | None] = {}
            if self._plan is not None and self._plan.order.agreed:
                found = self._complete(self._plan, self._plan.order.agreed)
            if plan is not None and plan.order.agreed is None and self._all_know_the_last(plan):
                self._agree(plan)
            return found
        finally:
            self._begin_anew(None)
            if plan is not None:
                self._averaged = plan.state.last_microbatches

    def _complete(self, plan: _Plan, agreed: tuple[str, ...]) -> dict[int, Average | None]:
        """What :meth:`finish` does where the order is known."""
        shards = [shard for unit in agreed for shard in plan.units[unit].shards]
        for begun in self._begun:
            found = gradients_of([shard.parameter for shard in plan.units[begun.unit].shards])
            self._stale |= not all(Seen.are_same(begun.sources, found))
        wire = 0 if self._comm is None else 1 + _WIRES.index(self._comm.dtype)
        has = [gradient is not None for gradient in gradients_of([shard.parameter for shard in shards])]
        asked = torch.tensor([len(self._begun), self._stale, wire, *has], dtype=torch.int32)
        assert self._groups is not None
        maximum(asked, self._groups[1])
        most, dropped, wire, *exist = asked.tolist()
        if most == 0:
            return {}
        if self._comm is None:  # others have begun, maybe where gradients were sent in another dtype
            self._comm = replace(comm_for(shards[0]) or GradComm(), dtype=_WIRES[wire - 1])
        for unit in agreed[len(self._begun) : most if dropped else None]:
            self._begin(plan, unit, empty=bool(dropped))
        averages = [average for begun in self._begun for average in begun.pending.wait()]
        stream: Any = current_stream(plan.state.meshes.device)
        for average in averages if stream is not None else ():
            average.rows.record_stream(stream)  # their memory is the side stream's
        if dropped:
            _warn_once(
                "gradients have changed after their last backward, as microbatch(model, is_last=True) has told it: "
                "what was averaged over dp_replicate during that backward is in vain, and averaged anew. Where each "
                "step does that, run the backward without telling, or change gradients with te_fsdp.scale_gradients "
                "and clip_grad_norm_"
            )
            return {}
        there = zip(shards, averages, exist, strict=True)
        return {id(shard.parameter): average if exists else None for shard, average, exists in there}

    def _all_know_the_last(self, plan: _Plan) -> bool:
        """Whether all ranks have had ``microbatch(is_last=True)`` since the last step; the same on all ranks.

        Ranks that have not cannot know that others have, so that all ask: in the first steps, and then less and less
        often, as most loops that have not used it by then never will. Collective over all ranks that hold this model.
        """
        plan.steps += 1
        if plan.steps > _ASKED_ALWAYS and plan.steps & (plan.steps - 1):
            return False
        known = int(plan.state.last_microbatches != self._averaged)
        seen = torch.tensor([known, -known], dtype=torch.int32, device=plan.state.meshes.device)
        maximum(seen, plan.state.meshes.device_mesh)
        some, not_all = bool(seen[0]), bool(seen[1] + 1)
        if some and not_all:
            _warn_once(
                "microbatch(model, is_last=True) was used on some ranks only: averages over dp_replicate wait for the "
                "step. Use it on all ranks for the last backward of a step"
            )
        return some and not not_all

    def _agree(self, plan: _Plan) -> None:
        """Settle the order of units, after the first last backward. Collective over the world."""
        if not dist.is_gloo_available():
            plan.order.agreed = ()
            return
        if self._groups is None:
            root, kind = plan.state.meshes.device_mesh, plan.state.meshes.device.type
            backends = (dist.get_default_backend_for_device(kind), "gloo")
            averages, question = (own_group(root, OUTER, backend) for backend in backends)
            self._groups = averages, question
            # Connected here, where all ranks come by, and not in the midst of a backward.
            dist.all_reduce(torch.zeros(1, device=plan.state.meshes.device), group=self._groups[0])
        plan.order.agree(plan.state.meshes)

    def _plan_of(self, shards: list[OptimizerShard]) -> _Plan | None:
        """The plan for parameters; ``None`` where nothing of theirs can begin early. Local operation."""
        trained = tuple(id(shard.parameter) for shard in shards)
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
            units[name] = Averaging([shards[at] for at in sorted(at for members in own for at in members)])
            groups += [name for members in own if members]
    return _Plan(state, units, groups, UnitOrder(list(units))) if units else None


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning(text)
