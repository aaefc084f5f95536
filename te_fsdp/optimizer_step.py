"""Functions that run around ``optimizer.step()`` of sharded models, and their ``zero_grad()``.

before a step    :data:`BEFORE_STEP`: gradients are complete, or it raises; replicas over tp get equal ones
after a step     :data:`AFTER_STEP`: kept weights are released, so that the next forward gathers the new ones
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from te_fsdp.features.main_weights import register_optimizer, use_fused_adam_master_weights
from te_fsdp.gradient_sync import wait_for_reductions, zero_grad
from te_fsdp.layout import SyncMode
from te_fsdp.lifecycle import StepFunctions, gradients_of, run_checks, sync_tp_replicas
from te_fsdp.quantized.amax import refresh_quantized, restore_optimizer_params
from te_fsdp.sharded_model import ShardedModel, undo_step
from te_fsdp.unit_communication import invalidate_gathers
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.lifecycle import Step


def record_stepping_optimizer(step: Step) -> None:
    """Note whose step it is, for :func:`te_fsdp.sharded_model.recover_from_exception`."""
    for state, _ in step.models:
        state.stepping = weakref.ref(step.optimizer)
        register_optimizer(step.optimizer)


def wait_for_gradients(step: Step) -> None:
    """Let the current stream wait for reductions under way."""
    for state, _ in step.models:
        wait_for_reductions(state)


def check_nan_report(step: Step) -> None:
    """Raise or log what :func:`te_fsdp.report_nan` has seen. Collective over the world where it watches a model."""
    for state, _ in step.models:
        if state.nan_report is not None:
            state.nan_report.check()


def wrap_closure(step: Step) -> None:
    """Check gradients after each call of a closure too, because the checks before the step are over by then."""
    if step.closure is not None and step.models:
        step.closure = functools.partial(_run_closure, step, step.closure)


def _run_closure(step: Step, closure: Callable[[], Any]) -> Any:
    """Call a closure and check what it has computed. Collective as the checks are."""
    loss = closure()
    for check in step.checks.closure:
        check(step, loss)
    wait_for_gradients(step)
    check_nan_report(step)
    return loss


def cast_gradients(step: Step) -> None:
    """Give main gradients (``main_grads_dtype``) in the parameters' dtype to optimizers that need it so."""
    for state, parameters in step.models:
        if state.precision_plan is not None:
            state.precision_plan.cast_gradients(step.optimizer, parameters)


def allow_mixed_parameters(step: Step) -> None:
    """Let torch's foreach and fused kernels take DTensors and other parameters together.

    Optimizers choose these kernels by themselves on GPUs. Parameters that are not sharded count as replicated; updates
    are by element, so that each rank's part is what it would be alone.
    """
    if step.models and has_mixed_groups(step.optimizer):
        mixing = step.models[0][0].mixing
        mixing.close()
        mixing.enter_context(implicit_replication())


def has_mixed_groups(optimizer: Optimizer) -> bool:
    """Return whether torch would refuse a group's foreach and fused kernels, because only some are DTensors."""
    for group in optimizer.param_groups:
        if len({isinstance(parameter, DTensor) for parameter in group["params"]}) == 2:
            return True
    return False


def count_versions(step: Step) -> None:
    """Count the change of each parameter, which foreach and fused kernels do not for DTensors (torch 2.11 to 2.13)."""
    for _, parameters in step.models:
        changed = zip(parameters, gradients_of(parameters), strict=True)
        # What has no gradient stays as it is: a graph that waits for its backward may still need it.
        increment_version([parameter for parameter, gradient in changed if gradient is not None])


def run_checks_after_step(step: Step) -> None:
    """Run the checks that record the state of weights after a step."""
    for check in step.checks.stepped:
        check(step)


def undo_casts(step: Step) -> None:
    """Undo :func:`cast_gradients` and :func:`allow_mixed_parameters`. The next forward does, if a step raised."""
    for state, _ in step.models:
        undo_step(state)


def reset_nan_report(step: Step) -> None:
    """Begin to look for NaN anew."""
    for state, _ in step.models:
        if state.nan_report is not None:
            state.nan_report.forget()


def release_weights(step: Step) -> None:
    """Release weights that were kept or are being gathered, so that the next forward gathers the new ones."""
    for state, _ in step.models:
        invalidate_gathers(state)
        for gather in state.gathers.values():
            gather.wait()
        state.gathers.clear()
        for _, unit in state.gathered():
            unit.reshard()
        if state.versions:
            kept = dict(state.gathered())
            state.versions = {name: versions for name, versions in state.versions.items() if name in kept}
        if state.waiting and state.sync_mode is SyncMode.LAST and not state.pending():
            state.waiting = False


#: Around every step of an optimizer of sharded models, in this order (:mod:`te_fsdp.lifecycle`); bound ones have a
#: part of it (``bind_device_mesh.py``). In between, ``MainParameters`` puts main weights in the parameters' places and
#: takes them out again by hooks of the optimizer's own, since torch runs those before these once the step is over:
#: what the user registers on the optimizer afterwards (an average of the weights, say) sees parameters with their
#: new values.
BEFORE_STEP: StepFunctions = (
    restore_optimizer_params,
    record_stepping_optimizer,
    wait_for_gradients,
    run_checks,
    check_nan_report,
    wrap_closure,
    sync_tp_replicas,
    cast_gradients,
    allow_mixed_parameters,
    use_fused_adam_master_weights,
)
AFTER_STEP: StepFunctions = (
    refresh_quantized,
    count_versions,
    run_checks_after_step,
    undo_casts,
    reset_nan_report,
    release_weights,
)


# ------------------------------------------------------------------------------------------------------------ clearing


def wrap_zero_grad(state: ShardedModel) -> None:
    """Let ``model.zero_grad()`` also clear the state of a failed backward and of HFSDP. Local operation.

    The markers of :mod:`te_fsdp.features.unreduced_gradients` detect all other ways to clear ``.grad``.
    """
    _fsdp2_patches.replace_zero_grad(state.model, _ZeroGrad(state))


class _ZeroGrad:
    """Replacement for ``zero_grad`` of one model."""

    def __init__(self, state: ShardedModel) -> None:
        self._state = weakref.ref(state)
        functools.update_wrapper(self, type(state.model).zero_grad)

    def __call__(self, set_to_none: bool = True) -> None:
        state = self._state()
        assert state is not None  # owned by the model, which is alive during its own method
        if not _torch.in_backward():
            zero_grad(state.model, set_to_none=set_to_none)
        type(state.model).zero_grad(state.model, set_to_none)  # may be the user's override
