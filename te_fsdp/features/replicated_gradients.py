"""Gradients of parameters that are replicated over data parallel, reduced over the ranks exactly once.

    backward            .grad <- unreduced gradients of earlier backwards; autograd accumulates into it
    end of backward     .grad <- previous .grad + sum over the ranks of the unreduced gradients (or these are stored
                        if this backward must not reduce)

So ``.grad`` is the reduced gradient or ``None`` whenever no backward is running, and a plain loop over microbatches
accumulates reduced gradients. A reduced gradient is never reduced again.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.async_work import UnitOrder, current_stream
from te_fsdp.collectives.groups import group_of_ranks
from te_fsdp.collectives.rendezvous import is_capturing, is_simulated
from te_fsdp.component import Component
from te_fsdp.errors import OrderError, shorten
from te_fsdp.features.hfsdp.gradients import apply_deferred_grad_scale
from te_fsdp.features.unreduced_gradients import UnreducedGradients
from te_fsdp.layout import REPLICATED
from te_fsdp.lifecycle import runs_if
from te_fsdp.mesh import Meshes
from te_fsdp.replicated_params import (
    Bucket,
    GradientSlot,
    Reduction,
    ReductionGroup,
    ReplicatedParameter,
    pack,
)
from te_fsdp.sharded_model import ShardedModel, attach_state_to_params, get_sharded_model
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    fsdp2_units,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)

_log = logging.getLogger("te_fsdp")


# [Note: when gradients are sent] Gradients of a unit with strategy ``no_shard`` are sent together once
# backward has left the unit (:mod:`te_fsdp.collectives.async_work`), or at the end of backward if the unit
# may not start early. All others are sent together at the end, ordered by parameter name, which is the same
# on all ranks. A parameter without a gradient on this rank is sent as zeros with a flag, because another rank
# may have one.
class ReplicatedGradients(Component):
    """Reduces the gradients of a model's replicated parameters by the end of each backward.

    The reduction is triggered by the gradients of the root's outputs.

    Args:
        units: Names of units with replicated parameters, in the order in which backward leaves them.
        grads_dtype: Accumulation dtype of gradients; ``None``: the parameters' own.
        average: Divide gradients by the number of data-parallel ranks (for experts, too), whose data the mean loss
            covers. Otherwise gradients are sums.
        with_fsdp2: Whether FSDP2 manages other parameters of the model. Its reductions and early reductions then need
            separate process groups, which are created here. Collective over the world.
    """

    def __init__(
        self,
        model: nn.Module,
        replicated: Sequence[ReplicatedParameter],
        meshes: Meshes,
        *,
        units: Sequence[str] = (),
        grads_dtype: torch.dtype | None = None,
        average: bool = True,
        with_fsdp2: bool = False,
    ) -> None:
        # Collectives of one process group must start in one order on all ranks. FSDP2 and these reductions
        # start independently of each other.
        separate = with_fsdp2 and bool(units)
        divisor = meshes.size("dp_replicate") * meshes.size("dp_shard") if average else 1
        root = meshes.device_mesh if separate else None
        dense = experts = ReductionGroup.of(meshes.fsdp, "data", root, divisor)
        if (mesh := meshes.expert_mesh) is not None:
            root = mesh if separate else None
            experts = ReductionGroup.of(meshes.expert_fsdp, "expert_data", root, divisor)
        self._slots = []
        for parameter in replicated:
            plan = parameter.plan
            ranks = experts if plan.experts else dense
            partial = plan.rule is not None and plan.rule.partial_grad and meshes.size("tp") > 1
            # Sums over tp have no defined time in backward. The few parameters that need one are reduced at its end,
            # and so are a user's DTensors, whose gradients may be partial.
            sums = partial or (plan.rule is None and isinstance(parameter.parameter, DTensor))
            at_end = sums or ranks.group is None or plan.storage.strategy == REPLICATED
            self._slots.append(
                GradientSlot(parameter, ranks, partial, None if at_end else plan.unit, grads_dtype)
            )
        self._model, self._meshes, self._device = weakref.ref(model), meshes, meshes.device
        self._sync, self._owes, self._running, self._marked = True, False, False, False
        #: Slots whose ``.grad`` accumulates the gradient of the running backward.
        self._accumulating: dict[GradientSlot, None] = {}
        #: Slots whose gradient is in a bucket that the running backward has sent.
        self._taken: set[GradientSlot] = set()
        self._hooked: list[tuple[Any, Any]] = []  #: Parameters with post-accumulate hooks, and the hooks
        sent = {slot.unit for slot in self._slots}
        self._units = [unit for unit in units if unit in sent]
        self._order, self._trained = UnitOrder(self._units), tuple[GradientSlot, ...]()
        #: The order of units by the trained slots, because freezing may change it and later change it back.
        self._orders = {self._trained: self._order}
        #: Buckets that start during backward, with their units, and the others.
        self._buckets: tuple[list[tuple[str, Bucket]], list[Bucket]] | None = None
        self._reduction: Reduction | None = None
        #: Streams on which the running backward may have computed gradients.
        self._streams: list[torch.Stream] = []
        self._flag_group: Any = None
        if self._units and dist.is_gloo_available() and not is_simulated():
            # Use the CPU, so that nothing waits for the device. Not the world: other pipeline stages have other
            # models.
            self._flag_group = group_of_ranks(
                meshes.device_mesh.mesh.flatten().tolist(), "no_shard flags", "gloo"
            )
        self._is_captured = False  #: Whether the last backward was recorded as a graph
        self._abort_flag: tuple[Any, torch.Tensor] | None = None
        self._aborted = False
        self.before_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise OrderError(
            "deepcopy of a model with no_shard parameters after fully_shard",
            expected="a model that is not sharded",
            why="The copy's gradients would be reduced together with those of the original",
            fix="copy the model before te_fsdp.fully_shard",
        )

    @property
    def _state(self) -> ShardedModel | None:
        model = self._model()
        return None if model is None else get_sharded_model(model)

    # ------------------------------------------------------------------------------------------------------- phases

    def unreduced(self) -> list[str]:
        """Return the names of the parameters with gradients that are not reduced yet."""
        # These are all trained ones after a backward without a reduction. Other ranks may have gradients that this rank
        # does not have, and all ranks must join the reduction or raise.
        return [
            slot.replicated.plan.label
            for slot in self._slots
            if slot.unreduced is not None
            or slot in self._accumulating
            or slot in self._taken
            or (self._owes and slot.parameter.requires_grad)
        ]

    def recover(self) -> bool:
        """Drop the gradients of a backward that raised, and restore ``.grad`` from before it.

        Collective over data parallel if reductions may have begun in that backward.
        """
        if not self._running or _torch.in_backward():
            return False
        # Other ranks may be waiting in reductions that this rank has not started. These are completed together with
        # the next backward of ranks that raised before theirs had begun. `settle` notifies those.
        started, self._reduction = self._reduction, None
        self._restore_gradients()
        # Nothing of a capture has run, and no rank uses a capture that failed on one.
        if started is not None and started.early and not self._is_captured:
            started.abandon()
            self._send_abort_flag(True)
            self.settle()  # this rank has the answer
        return True

    def settle(self) -> bool:
        """Return whether a rank has abandoned a reduction since the previous call, which left NaN on this rank.

        Waits for the asynchronous all-reduce of the flags, which each rank starts after its reduction.
        """
        if self._abort_flag is not None:
            work, is_aborted = self._abort_flag
            work.wait()
            self._abort_flag, self._aborted = None, self._aborted or bool(is_aborted)
        was_abandoned, self._aborted = self._aborted, False
        return was_abandoned

    def _send_abort_flag(self, is_aborted: bool) -> None:
        """Start the all-reduce of the "aborted" flag for the reduction just completed, without waiting.

        Collective over all ranks with this model: one all-reduce of one integer, on the CPU.
        """
        if self._flag_group is not None:
            self._aborted = self.settle()
            # Asynchronous: a rank must not wait in each backward for a flag that is almost always 0.
            flag = torch.tensor(is_aborted, dtype=torch.int32)
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._flag_group, async_op=True)
            self._abort_flag = work, flag

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next backwards reduce gradients when they end."""
        self._sync = enabled

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Reduce the gradients that are not reduced yet, if there are some, and add them to ``.grad``.

        Collective over data parallel, on all ranks: an all-reduce per unit, dtype and process group, and one for all
        gradients without a unit. A tensor larger than a bucket has its own. Partial gradients add one over tp.
        Until the ranks have agreed on an order, all gradients are sent without a unit.
        """
        if not self.unreduced():
            return
        self._owes = False
        self._finish(self._new_reduction())

    def reduce_after_microbatches(self) -> None:
        """Reduce the gradients of a pipeline's microbatches, once a stage enables reductions again.

        Collective as :meth:`reduce_gradients`, outside of backward; within one its own end does that.
        """
        if self._sync and not self._running:
            self.reduce_gradients()

    def waiting(self) -> list[torch.Tensor]:
        """Return the unreduced local gradients of this rank."""
        return [_torch.local_of(slot.unreduced) for slot in self._slots if slot.unreduced is not None]

    def drop_unreduced(self) -> None:
        """Drop the gradients that are not reduced yet. ``.grad`` has the reduced ones."""
        self._owes = False
        for slot in self._slots:
            slot.unreduced = None

    def reduced_parameters(self) -> list[torch.Tensor]:
        """Return the replicated parameters."""
        return [slot.parameter for slot in self._slots]

    def before_forward(self) -> None:
        """Register hooks on the current parameters. Loading and initialization replace parameters. Local operation."""
        replaced = False
        for slot in self._slots:
            parameter = slot.parameter
            if not parameter.requires_grad or (slot.hooked is not None and slot.hooked() is parameter):
                continue
            for handle in slot.handles:
                handle.remove()
            slot.hooked, replaced = weakref.ref(parameter), True
            self._buckets = None
            # autograd refuses a gradient of a different dtype than ``grad_dtype``.
            if slot.grads_dtype is not None and parameter.dtype != slot.grads_dtype:
                parameter.grad_dtype = slot.grads_dtype
            slot.handles = [parameter.register_hook(functools.partial(self._before_accumulation, slot))]
        if replaced and (state := self._state) is not None:
            attach_state_to_params(state)  # optimizer hooks identify a model by its parameters

    def before_conversion(self) -> None:
        """Remove the hooks on parameters, which the next forward registers again. Local operation."""
        # A conversion swaps quantized parameters with ``torch.utils.swap_tensors``. It rejects parameters with weak
        # references and removes their hooks.
        for slot in self._slots:
            for handle in slot.handles:
                handle.remove()
            slot.handles, slot.hooked = [], None

    def after_materialize(self) -> None:
        """Watch replaced parameters; ``InitError`` unless all ranks have equal values. Collective over the world."""
        self.before_forward()
        state = self._state
        for check in state.checks.renewed if state is not None else ():
            check([slot.replicated for slot in self._slots], self._meshes)

    # -------------------------------------------------------------------------------------------------- the hooks

    def after_forward(self, trained: Sequence[torch.Tensor]) -> None:
        """Make every rank that runs backward participate in the reduction, even without such a gradient. Local."""
        for tensor in trained:
            tensor.register_hook(self._begin)

    def _begin(self, gradient: torch.Tensor) -> None:
        """Start a reduction with the first gradient of each backward. Local operation."""
        if not self._running:
            state = self._state
            for check in state.checks.backward if state is not None else ():
                check(state)
            self._unmark()
            self._running, self._is_captured = True, is_capturing()
            hooked = [slot.hooked() for slot in self._slots if slot.hooked is not None]
            self._hooked = _torch_autograd.suspend_accumulation_hooks([p for p in hooked if p is not None])
            self._reduction = self._new_reduction() if self._sync else None
            self._order.begin(slot.unit for slot in self._trained if slot.unit is not None)
            # The streams of this backward: autograd runs each node on the stream of its forward.
            self._streams.clear()
            _torch_autograd.at_end_of_backward(self._end)

    def _before_accumulation(self, slot: GradientSlot, gradient: torch.Tensor) -> None:
        """Move ``.grad`` aside, so that only unreduced gradients accumulate. It is a pre-accumulation hook."""
        self._begin(gradient)
        if slot in self._taken:
            raise OrderError(
                f"{slot.replicated.plan.label}: a gradient after the reduction of its unit has begun",
                expected="the same uses of the parameter as in the first backward that reduced",
                got="a further use in a nested backward (checkpoint with use_reentrant=True)",
                fix="checkpoint with use_reentrant=False, or run backward in te_fsdp.no_sync(model) and call "
                "te_fsdp.finish_grad_reduce(model)",
            )
        if self._reduction is not None:
            stream = current_stream(self._device)
            if stream is not None and stream not in self._streams:
                self._streams.append(stream)
            # Start the units that backward has left, but not the unit of this gradient, which is accumulated after
            # the hooks of its parameter.
            self._reduction.start(lambda unit: unit != slot.unit and self._order.is_complete(unit))
        if slot.unit is not None:
            self._order.arrived(slot.unit, slot)
        if slot not in self._accumulating:
            parameter = slot.parameter
            # A reduced gradient that stayed here would be summed over the ranks a second time.
            slot.reduced, parameter.grad = parameter.grad, slot.unreduced
            slot.unreduced = None
            self._accumulating[slot] = None

    def _end(self) -> None:
        reduction, self._reduction = self._reduction, None
        self._restore_gradients(keep=True)
        self._owes = reduction is None
        if (state := self._state) is not None:
            state.sync.completed = reduction is not None
        if reduction is None:
            self._mark()
        else:
            self._finish(reduction)
            if self._order.agreed is None:
                self._order.agree(self._meshes.device_mesh, self._device)
                self._buckets = None

    def _restore_gradients(self, *, keep: bool = False) -> None:
        """Restore the previous ``.grad``. Store the gradients of this backward (``keep``), or drop them."""
        for slot in self._accumulating:
            parameter = slot.parameter
            slot.unreduced = parameter.grad if keep else None
            # Gradients that were cleared since then stay cleared.
            if keep or parameter.grad is not None:
                parameter.grad = slot.reduced
            slot.reduced = None
        _torch_autograd.resume_accumulation_hooks(self._hooked)
        self._accumulating.clear()
        self._taken.clear()
        self._running = False

    # ---------------------------------------------------------------------------------------------- the reduction

    def _new_reduction(self) -> Reduction:
        """Create a reduction of all trained gradients, not started."""
        trained = tuple(slot for slot in self._slots if slot.parameter.requires_grad)
        if trained != self._trained:
            self._trained, self._buckets = trained, None
            self._order = self._orders.setdefault(trained, UnitOrder(self._units))
        if self._buckets is None:
            # Send unit by unit even without an early start. The summation order depends on the position in a bucket,
            # and the first backward must give the same bits as a later one of a resumed training.
            agreed = self._order.agreed or ()
            units: dict[str | None, list[GradientSlot]] = {unit: [] for unit in agreed}
            for slot in trained:
                units.setdefault(slot.unit, []).append(slot)
            packed = [
                (unit, bucket)
                for unit, parameters in units.items()
                for bucket in pack(parameters, self._meshes.tp_or_none)
            ]
            early = [(unit, bucket) for unit, bucket in packed if unit is not None and unit in agreed]
            self._buckets = early, [bucket for unit, bucket in packed if unit not in agreed]
        early, rest = self._buckets
        state = self._state
        comm = None if state is None else state.sync.comm
        # In a wider dtype than the accumulation dtype, gradients in flight would take more memory than before.
        if comm is not None and any(comm.sent_dtype(b.dtype).itemsize > b.dtype.itemsize for _, b in early):
            early, rest = [], [*(bucket for _, bucket in early), *rest]
        return Reduction(early, rest, comm, self._take_gradient)

    def _mark(self) -> None:
        """Mark all trained parameters, since other ranks may have gradients that this rank does not have."""
        state: Any = self._state
        for slot in self._slots:
            if slot.parameter.requires_grad:
                state.components.get(UnreducedGradients).mark(slot.parameter, slot, owner=self)
                self._marked = True

    def _unmark(self) -> None:
        """Remove the markers and drop cleared gradients."""
        if self._marked:
            state: Any = self._state
            unreduced = state.components.get(UnreducedGradients)
            unreduced.drop_cleared()
            unreduced.unmark(slot.parameter for slot in self._slots)
            self._marked = False

    @torch.no_grad()
    def _finish(self, reduction: Reduction) -> None:
        self._unmark()
        slots, parameters = [], []
        for slot, value in reduction.finish():
            parameter = slot.parameter
            slots.append(slot)
            parameters.append(parameter)
            if parameter.grad is not None:
                # The earlier gradient may have a scale that is applied lazily (HFSDP). The new one has none.
                apply_deferred_grad_scale(parameter, parameter.grad)
                _torch.local_of(parameter.grad).add_(value)
            elif isinstance(parameter, DTensor):
                spec = _torch.spec_of(parameter)
                if slot.specs[0] is not spec or slot.specs[1].tensor_meta.dtype != value.dtype:
                    slot.specs = spec, _torch.with_dtype(spec, value.dtype)
                parameter.grad = _torch.dtensor(value, slot.specs[1])
            else:
                parameter.grad = value
        try:
            for index, hooks in _torch_autograd.accumulation_hooks(parameters).items():
                # In one process, the gradients of earlier layers do not exist yet, and a step would leave them out.
                self._taken = set(slots[index + 1 :])
                for hook in hooks:
                    hook(parameters[index])
        finally:
            self._taken.clear()
        if reduction.early and not is_capturing():
            self._send_abort_flag(False)

    def _take_gradient(self, slot: GradientSlot) -> torch.Tensor | None:
        """Return a slot's gradient for a bucket. Ownership of the gradient passes to the bucket."""
        gradient, slot.unreduced = slot.unreduced, None
        if slot in self._accumulating:  # backward is still running
            parameter = slot.parameter
            gradient, parameter.grad = parameter.grad, slot.reduced
            slot.reduced = None
            del self._accumulating[slot]
            self._taken.add(slot)
        if gradient is None:
            return None
        local, now = _torch.local_of(gradient), current_stream(self._device)
        for stream in self._streams:  # streams on which gradients may have been computed
            if now is not None and stream != now:
                now.wait_stream(stream)
                local.record_stream(now)
        # The bucket sums partial gradients of TE's modules over tp. A user's DTensor may have a partial gradient, such
        # as torch's RowwiseParallel embedding: its local tensor has a different shape than the parameter's.
        if isinstance(gradient, DTensor) and isinstance(slot.parameter, DTensor) and not slot.partial:
            placements = _torch.spec_of(slot.parameter).placements
            if _torch.spec_of(gradient).placements != placements:
                return _torch.local_of(gradient.redistribute(placements=placements))
        return local


@runs_if("replicated")
def reduce_replicated_gradients(setup: Setup) -> None:
    """Reduce the gradients of the model's replicated parameters, and log which they are.

    Collective over the world if FSDP2 manages other parameters: it creates process groups.
    """
    plan, state, replicated = setup.plan, setup.state, setup.replicated
    if rank() == 0:
        parameters = [item.parameter for item in replicated]
        elements = sum(_torch.local_of(parameter).numel() for parameter in parameters)
        _log.info(
            "no_shard: %d parameters of %s elements are replicated on every data-parallel rank, %d of them trained: %s",
            len(replicated),
            f"{elements:,}",
            sum(parameter.requires_grad for parameter in parameters),
            shorten([item.plan.label for item in replicated], 3),
        )
    new = ReplicatedGradients(
        state.model,
        replicated,
        state.meshes,
        # In the order of backward, in which their reductions start.
        units=[name for name, row in reversed(plan.units.items()) if row.is_replicated],
        grads_dtype=None if state.precision is None else state.precision.policy.main_grads_dtype,
        average=state.average_gradients,
        with_fsdp2=bool(state.modules),
    )
    state.components.attach(new)
    # torch's pipeline stage informs only FSDP2's modules when the last microbatch runs.
    if state.meshes.pp is not None and fsdp2_units.is_fsdp_module(state.model):
        _fsdp2_patches.wrap_pipeline_step(state.model, new.set_gradient_sync, new.reduce_after_microbatches)
