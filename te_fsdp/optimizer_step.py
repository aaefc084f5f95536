"""Functions that run around ``optimizer.step()`` of sharded models.

    before a step    complete gradients, or raise; make gradients of tp replicas equal
    after a step     reshard weights, so that the next forward all-gathers the new ones

Their order is in ``BEFORE_STEP`` and ``AFTER_STEP`` of :mod:`te_fsdp.components`.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer

from te_fsdp.gradient_sync import wait_for_reductions
from te_fsdp.layout import SyncMode
from te_fsdp.lifecycle import Step, gradients_of, runs_if
from te_fsdp.records import PARAMETER
from te_fsdp.recovery import undo_step
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch

#: The optimizers that have main weights, or have begun a step on parameters of a sharded model. The references are
#: weak, so that te_fsdp does not keep optimizers and their state alive.
registered_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def record_stepping_optimizer(step: Step) -> None:
    """Record the optimizer of the step, for :func:`te_fsdp.recovery.recover_from_exception`."""
    for state, _ in step.models:
        state.step.optimizer = weakref.ref(step.optimizer)
        registered_optimizers.add(step.optimizer)


def wait_for_gradients(step: Step) -> None:
    """Make the current stream wait for started reductions."""
    for state, _ in step.models:
        if state.sync.unfinished:
            wait_for_reductions(state)


def check_gradients(step: Step) -> None:
    """Run ``check_gradients`` of each component. Collective over the world with :func:`te_fsdp.report_nan`."""
    for state, _ in step.models:
        for check in state.components.check_gradients:
            check()


@runs_if("closure")
def wrap_closure(step: Step) -> None:
    """Check gradients also after each call of a closure, because the checks before the step have already run."""
    closure = step.closure
    if closure is None or not step.models:
        return

    def run_closure() -> Any:
        loss = closure()
        for check in step.checks.closure:
            check(step, loss)
        # The closure has run a backward inside of step(), after the hooks that wait and check.
        wait_for_gradients(step)
        check_gradients(step)
        return loss

    step.closure = run_closure


def prepare_components(step: Step) -> None:
    """Run ``prepare_step`` of each component: cast main gradients (``main_grads_dtype``) to the parameters' dtype."""
    for state, parameters in step.models:
        for prepare in state.components.prepare_step:
            prepare(step.optimizer, parameters)


def allow_mixed_parameters(step: Step) -> None:
    """Make torch's foreach and fused kernels accept DTensors and other parameters together.

    On GPUs optimizers choose these kernels by default. Parameters that are not sharded count as replicated. Updates
    are elementwise, so that each rank's shard gets the same update as separately.
    """
    if step.models and has_mixed_groups(step.optimizer):
        # torch's switch is global, so the exit stack of one model is enough.
        mixing = step.models[0][0].step.mixing
        # A step that raised did not reach :func:`undo_preparations`.
        mixing.close()
        mixing.enter_context(implicit_replication())


def has_mixed_groups(optimizer: Optimizer) -> bool:
    """Return whether a step gets DTensors and plain tensors in a group, which foreach and fused kernels refuse."""
    # Loops, because this runs in each step, and a generator costs a call per parameter.
    for group in optimizer.param_groups:
        kinds = set[bool]()
        for parameter in group["params"]:
            record = parameter.__dict__.get(PARAMETER)
            # A DTensor over the replicas replaces a plain parameter with sharded state.
            has_shard = bool(record and record.main_parameters)
            kinds.add(has_shard or isinstance(parameter, DTensor))
        if len(kinds) == 2:
            return True
    return False


def increment_versions(step: Step) -> None:
    """Increment version counters, which foreach and fused kernels skip for DTensors (torch 2.11 to 2.13)."""
    for _, parameters in step.models:
        # Parameters without gradients keep their version: a pending backward may still need them.
        changed = []
        for parameter, gradient in zip(parameters, gradients_of(parameters), strict=True):
            if gradient is not None:
                changed.append(parameter)
        increment_version(changed)


def undo_preparations(step: Step) -> None:
    """Undo :func:`prepare_components` and :func:`allow_mixed_parameters`. If a step raised, the next forward does."""
    for state, _ in step.models:
        undo_step(state)


def finish_components(step: Step) -> None:
    """Run ``finish_step`` of each component."""
    for state, _ in step.models:
        for finish in state.components.finish_step:
            finish()


def release_weights(step: Step) -> None:
    """Reshard units that are unsharded or being all-gathered, so that the next forward all-gathers the new weights."""
    for state, parameters in step.models:
        # Explicit all-gathers of the old weights must end before their memory is freed.
        for gather in state.unsharded.gathers.values():
            gather.wait()
        state.unsharded.gathers.clear()
        gathered = state.gathered()
        stepped = {id(parameter) for parameter in parameters} if gathered and _torch.in_backward() else None
        for _, unit in gathered:
            # The backward that runs still needs the units that this step has not updated.
            if stepped is not None and stepped.isdisjoint(map(id, _fsdp2.sharded_parameters(unit))):
                continue
            FSDPModule.reshard(unit)  # type: ignore[bad-argument-type]  # not a call of the user
        state.computed.calls = state.computed.calls and ((), ())
        if state.unsharded.versions:
            # Versions of units that were resharded do not apply to the next all-gather.
            gathered = dict(state.gathered())
            for name in state.unsharded.versions.keys() - gathered.keys():
                del state.unsharded.versions[name]
        # Later forwards then need not search for cleared gradients of earlier microbatches.
        if state.sync.waiting and state.sync.mode is SyncMode.LAST and not state.pending():
            state.sync.waiting = False
