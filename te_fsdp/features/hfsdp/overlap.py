"""Averages of gradients over ``dp_replicate``, in the step or overlapped with its last backward."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from te_fsdp.collectives.agreement import maximum
from te_fsdp.collectives.async_work import Pending, SideStream, UnitOrder, current_stream
from te_fsdp.collectives.groups import separate_group
from te_fsdp.collectives.redistribute import GradComm, PackedLayout, redistribute
from te_fsdp.features.hfsdp.optimizer_shards import (
    ALIGNED,
    OUTER,
    OptimizerShard,
    copy_pairs,
    group_by_key,
    is_sent_alone,
)
from te_fsdp.lifecycle import gradients_of
from te_fsdp.sharded_model import ShardedModel, sharded_model_of
from te_fsdp.tensor_version import TensorVersion
from te_fsdp.upstream import fsdp2_units, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_hooks import profiler_range

_log = logging.getLogger("te_fsdp")


# [Note: gradients over replicas] Gradients below fp32 are sent in their dtype by an all-to-all and summed in fp32
# here. This equals a reduce-scatter in fp32 with half of the bytes. A replica whose backward did not use a parameter
# sends zeros. After the packed rows each replica sends one flag per parameter, 1 if it has a gradient.
class GradientAveraging:
    """Average of the gradients of some parameters over the replicas (or their sum, if the user requests it)."""

    # Grouping and offsets do not change between steps and are computed once. Shards have one order on all replicas.
    def __init__(self, shards: Sequence[OptimizerShard]) -> None:
        self.shards = tuple(shards)
        self._is_sent_alone = [is_sent_alone(shard.rows) for shard in shards]
        self._numels = [math.prod(shard.shape) for shard in shards]
        # Indices of gradients with the same replicas and dtypes, and the offsets of the small ones in a packed buffer.
        self._kinds: list[tuple[list[int], PackedLayout]] = []
        self._dtypes: list[torch.dtype | None] | None = None

    def _group_gradients(self) -> None:
        """Compute the grouping, which is valid while gradients keep their dtypes."""
        dtypes = [getattr(shard.parameter, "grad_dtype", None) for shard in self.shards]
        if dtypes != self._dtypes:
            self._dtypes, self._kinds = dtypes, []
            kinds = [(shard.ranks, shard.dtype, shard.sent) for shard in self.shards]
            for indices in group_by_key(range(len(kinds)), kinds):
                small = tuple([self.shards[n].rows.numel for n in indices if not self._is_sent_alone[n]])
                self._kinds.append((indices, PackedLayout(small, ALIGNED, len(indices))))

    def start(
        self,
        gradients: Sequence[torch.Tensor | None],
        comm: GradComm | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Pending[list[torch.Tensor | None]]:
        """Start with local gradients (``None`` for missing ones), which must not change until the end.

        Collective over the replicas, with the same calls on all. Per group and dtype one reduce-scatter, and one per
        large tensor, in the communication dtype of the model's :class:`GradComm`, or of ``comm``. If it is the
        gradients' own dtype and below the shards', all-to-alls are used and the sum is computed here. Temporary
        memory: packed gradients, gradients in a different communication dtype, and the result of all-to-alls. With a
        dedicated ``group``, nothing waits before the result is requested if there are no streams. The result has this
        rank's rows in the order of the shards; ``None`` if no replica has a gradient.
        """
        received: list[torch.Tensor | None] = [None] * len(self.shards)
        works: list[Pending[torch.Tensor]] = []
        # Gradients missing on this rank, with the number of replicas that have one.
        flags: list[tuple[int, torch.Tensor]] = []

        def reduce(source: torch.Tensor, shape: Sequence[int], of: OptimizerShard, by: Any) -> torch.Tensor:
            """Start the reduce-scatter of ``source``; return its output, of the given shape."""
            output = torch.empty(shape, dtype=of.dtype, device=source.device)
            if output.numel():
                ranks, flat, late = group or of.group, output.view(-1), group is not None and output.is_cpu
                works.append(redistribute(source, of.partial, Shard(0), ranks, by, into=flat, async_op=late))
            return output

        self._group_gradients()
        for indices, buffer in self._kinds:
            first = self.shards[indices[0]]
            by = comm or first.comm
            if first.sent != first.dtype and (by is None or by.dtype is None):
                by = replace(by or GradComm(), fp32_sum=True)
            packed = self._packed(indices, buffer, gradients)
            result = reduce(packed.view(-1), packed.shape[1:], first, by)
            averages = iter(buffer.views(result))
            for flag, index in enumerate(indices, buffer.numel - buffer.trailing):
                shard, gradient = self.shards[index], gradients[index]
                if not self._is_sent_alone[index]:
                    received[index] = next(averages)[: self._numels[index]].view(shard.shape)
                else:
                    own = (
                        packed.new_zeros(shard.rows.shape) if gradient is None else gradient.to(packed.dtype)
                    )
                    received[index] = reduce(own.contiguous().view(-1), shard.shape, first, by)
                if gradient is None:
                    flags.append((index, result[flag]))

        def finish() -> list[torch.Tensor | None]:
            for work in works:
                work.wait()
            for index, replicas in flags:
                if not bool(replicas > 0):  # waits for the device, only on ranks without a gradient
                    received[index] = None
            return received

        return Pending(finish)

    def _packed(
        self, indices: list[int], buffer: PackedLayout, gradients: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Pack each replica's rows of the small gradients, followed by the flags, replica by replica."""
        first, flags = self.shards[indices[0]], buffer.numel - buffer.trailing
        device = _torch.local_of(first.parameter).device
        # Padding of uneven rows and alignment gaps are sent, too. They must be zeros, not uninitialized memory.
        memory = torch.zeros(first.size, buffer.numel, dtype=first.sent, device=device)
        memory[:, flags:] = 1
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        views = iter(buffer.views(memory))
        for flag, index in enumerate(indices, flags):
            shard, gradient = self.shards[index], gradients[index]
            if gradient is None:
                memory[:, flag] = 0
            if self._is_sent_alone[index]:
                continue
            piece = next(views)
            if gradient is not None:
                copies += [(target, rows) for rows, target in shard.rows.pairs(gradient, piece)]
        copy_pairs(copies)
        return memory


# ------------------------------------------------------------------------------------------- during the last backward


@dataclass(eq=False)
class _OverlapPlan:
    """Grouping of gradients by unit, valid while the same parameters are trained."""

    shards: list[OptimizerShard]  #: All shards to average
    state: ShardedModel | None  #: State of the model; ``None`` if nothing can start early
    units: dict[str, GradientAveraging]  #: Unit name -> its parameters, in the optimizer's order
    groups: list[str]  #: Unit of each FSDP2 parameter group with such parameters
    order: UnitOrder  #: Order in which units start
    comm: GradComm | None = None  #: Communication settings of the last step


# [Note: early averages] If all ranks mark the last backward of the first step (``microbatch(is_last=True)``), they
# agree on the order in which backward leaves units. Afterwards a unit starts once FSDP2 has enqueued its reduction and
# all previous units have started (``collectives/async_work.py``). The step starts the remaining units in the same
# order. So every replica runs the same collectives, whatever parameters it has used. Otherwise everything is averaged
# in the step.
#
# A started average is stale if its gradient has changed since: after an exception in backward, a further backward,
# ``zero_grad``, or an explicit change. The step checks this for all replicas over the CPU. Then all replicas complete
# the averages that any of them has started, drop them, and average everything again. The result is correct, but
# nothing was saved.
class EarlyAverages:
    """Averages of one optimizer's gradients that may start in backward. ``shards`` returns the current shards."""

    def __init__(self, shards: Callable[[], list[OptimizerShard]]) -> None:
        self._shards = shards
        self._plan: _OverlapPlan | None = None
        self._averaged = 0  # ``last_microbatches`` at the last step
        # For the averages, and for the check in the step.
        self._groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
        self._side = SideStream()
        self._reset(0)

    def _reset(self, backward: int) -> None:
        """Drop everything that has started since the last step.

        ``backward`` is the number of the running last backward (``last_microbatches``), 0 for none.
        """
        self._backward = backward
        # Pending averages by unit in the agreed order, and the gradients that were sent.
        self._started: dict[str, Pending[list[torch.Tensor | None]]] = {}
        self._sources: list[TensorVersion | None] = []
        self._events: dict[str, list[Any]] = {}  # unit -> events after which its gradients are final

    @torch.no_grad()
    def reduced(self, state: ShardedModel, unit: str, group: int, event: Any) -> None:
        """Start the averages that are possible after FSDP2 has enqueued a reduction that is final after ``event``.

        ``group`` is the index of the parameter group in ``unit``. Collective over the replicas: a reduce-scatter per
        dtype of each unit, and one per large tensor. Nothing is waited for.
        """
        backward = state.sync.last_microbatches
        if not state.sync.last_microbatch or (self._started and self._backward != backward):
            return  # the step compares the gradients that were sent with the current ones
        if self._backward != backward:  # the first unit that this backward leaves
            self._reset(backward)
            plan = self._plan_now()
            plan.order.begin(plan.groups)
        plan = self._plan
        if plan is not None and unit in plan.units:
            self._events.setdefault(unit, []).append(event)
            plan.order.arrived(unit, (unit, group))
            same_settings = plan.comm == state.sync.comm
            while same_settings and (complete := plan.order.next(len(self._started))) is not None:
                self._begin(plan, complete)

    def _begin(self, plan: _OverlapPlan, unit: str) -> None:
        """Start a unit's averages. Collective over the replicas."""
        averaging = plan.units[unit]
        gradients = gradients_of([shard.parameter for shard in averaging.shards])
        local = [None if g is None else _torch.local_of(g) for g in gradients]
        assert self._groups is not None and plan.state is not None
        start = functools.partial(averaging.start, local, plan.comm, self._groups[0])
        events = self._events.pop(unit, [])
        with (
            profiler_range(f"te_fsdp::average {unit}"),
            self._side.after_current(plan.state.meshes.device, events),
        ):
            # The side stream waits for each collective before the next one starts, and then frees its memory.
            self._started[unit] = self._side.start(start, local)
        self._sources += TensorVersion.now(gradients)

    # --- between backward and step

    @property
    def expected(self) -> bool:
        """Return whether averages may be pending on some rank. Identical on all ranks."""
        return self._plan is not None and bool(self._plan.order.agreed)

    @torch.no_grad()
    def finish(self) -> dict[int, torch.Tensor | None]:
        """Complete the averages that any replica has started. Returns ``id`` of a parameter -> its average.

        The average is ``None`` if no replica has a gradient. The result is empty if everything still has to be
        averaged, and omits parameters of units that never start early. Collective over the replicas: the reductions
        not started here, and one all-reduce of two integers on the CPU once the ranks have agreed on an order;
        :meth:`_agree` in the first step.
        """
        # Reductions that have begun belong to the plan that started them, also if parameters were frozen since.
        plan = self._plan if self._plan is not None and self._started else self._plan_now()
        marked = bool(plan.state and plan.units and plan.state.sync.last_microbatches != self._averaged)
        try:
            if plan.order.agreed:
                return self._complete(plan, plan.order.agreed)
            if plan.order.agreed is None:
                self._agree(plan, marked)
            # The averages are correct in the step too, only slower, so a warning is enough.
            if marked and not plan.order.agreed:
                _warn_once(
                    "microbatch(model, is_last=True) was not used on all ranks in the first step: so averages over "
                    "dp_replicate run in the step. Use it from the first step on, on all ranks, for the last "
                    "backward of a step"
                )
            return {}
        finally:
            self._reset(0)
            if plan.state is not None:
                self._averaged = plan.state.sync.last_microbatches
                # A copy, because the next step is compared with the settings of this one.
                plan.comm = copy.copy(plan.state.sync.comm)

    def _complete(self, plan: _OverlapPlan, agreed: tuple[str, ...]) -> dict[int, torch.Tensor | None]:
        """Implement :meth:`finish` once the order is agreed."""
        shards = [shard for unit in agreed for shard in plan.units[unit].shards]
        sent = gradients_of([shard.parameter for shard in shards[: len(self._sources)]])
        stale = plan.shards != self._shards() or not all(TensorVersion.are_same(self._sources, sent))
        flags = torch.tensor([len(self._started), stale], dtype=torch.int32)
        assert self._groups is not None and plan.state is not None
        maximum(flags, self._groups[1])
        started, dropped = flags.tolist()
        if started == 0:
            return {}
        for unit in agreed[len(self._started) : started if dropped else None]:
            self._begin(plan, unit)
        averages = [rows for pending in self._started.values() for rows in pending.wait()]
        stream: Any = current_stream(plan.state.meshes.device)
        for rows in averages:
            if rows is not None and stream is not None:
                rows.record_stream(stream)  # their memory belongs to the side stream
        if dropped:
            _warn_once(
                "gradients have changed after the last backward marked with microbatch(model, is_last=True): "
                "the averages over dp_replicate from that backward are discarded and computed again. If each "
                "step does this, do not mark the backward, or change gradients with te_fsdp.scale_gradients "
                "and clip_grad_norm_"
            )
            return {}
        return {id(shard.parameter): rows for shard, rows in zip(shards, averages, strict=True)}

    def _agree(self, plan: _OverlapPlan, marked: bool) -> None:
        """Agree on the order of units in the first step, if all ranks have marked its last backward.

        Else nothing starts early. Collective over the model's ranks (one integer), and then over the world: process
        groups are created, and two integers per unit are all-reduced.
        """
        assert plan.state is not None
        meshes = plan.state.meshes
        marked_by_all = torch.tensor([-int(marked)], dtype=torch.int32, device=meshes.device)
        maximum(marked_by_all, meshes.device_mesh)
        if not marked_by_all or not dist.is_gloo_available():
            plan.order.agreed = ()
            return
        if self._groups is None:
            backend = dist.get_default_backend_for_device(meshes.device.type)
            averages_group = separate_group(meshes.device_mesh, OUTER, "averages", backend)
            check_group = separate_group(meshes.device_mesh, OUTER, "question", "gloo")
            self._groups = averages_group, check_group
            # Establish the connections here, where all ranks participate, and not in the middle of a backward.
            dist.all_reduce(torch.zeros(1, device=meshes.device), group=averages_group)
        plan.order.agree(meshes.device_mesh, meshes.device)

    def _plan_now(self) -> _OverlapPlan:
        """Return the plan for the current shards. Local operation."""
        shards = self._shards()
        if self._plan is not None and self._plan.shards == shards:
            return self._plan
        states = {id(state): state for shard in shards if (state := sharded_model_of(shard.parameter))}
        # Units of several models, or over several replica groups, have no common order.
        have_common_order = len(states) == 1 and len({shard.ranks for shard in shards}) == 1
        state = next(iter(states.values())) if have_common_order else None
        units: dict[str, GradientAveraging] = {}
        groups: list[str] = []
        index = {id(shard.parameter): position for position, shard in enumerate(shards)}
        for name, unit in state.modules.items() if state is not None else ():
            parameters = map(fsdp2_units.shards_of, fsdp2_units.fsdp_parameter_groups(unit))
            groups_at = [[index[id(p)] for p in group if id(p) in index] for group in parameters]
            if any(groups_at):
                units[name] = GradientAveraging([shards[n] for n in sorted(itertools.chain(*groups_at))])
                groups += [name for members in groups_at if members]
        self._plan = _OverlapPlan(shards, state, units, groups, UnitOrder(list(units)))
        return self._plan


_warn_once = functools.cache(_log.warning)
