"""Functions that run around ``optimizer.step()`` of sharded models, and their ``zero_grad()``.

before a step    :data:`BEFORE_STEP`: gradients are complete, or it raises; replicas over tp get equal ones
after a step     :data:`AFTER_STEP`: kept weights are released, so that the next forward gathers the new ones
"""

from __future__ import annotations

import functools
import struct
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from te_fsdp.checks.first_step import before_first_step
from te_fsdp.collectives.agreement import are_equal, raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call, is_capturing
from te_fsdp.errors import MeshError, OrderError, shorten
from te_fsdp.features.hfsdp.gradients import check_step
from te_fsdp.features.main_params import is_low_precision, main_parameters_of, optimizer_shard_in
from te_fsdp.features.main_weights import main_weight, register_optimizer, use_fused_adam_master_weights
from te_fsdp.gradient_sync import require_reduced, zero_grad
from te_fsdp.lifecycle import (
    StepFunctions,
    gradients_of,
    refuse_replaced,
    require_equal_gradients,
    sync_tp_replicas,
)
from te_fsdp.quantized.amax import refresh_quantized, require_main_weights, restore_optimizer_params
from te_fsdp.records import get_record
from te_fsdp.sharded_model import ShardedModel, shard_of, undo_step
from te_fsdp.unit_communication import invalidate_gathers
from te_fsdp.upstream import fsdp2_patches as _fsdp2_patches, te as _te, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.lifecycle import Step


def refuse_gathered(step: Step) -> None:
    """Raise for gathered parameters, which the model has while its weights are kept between microbatches."""
    for parameter, facts in step.held:
        if facts.record is not None and shard_of(parameter) is not parameter:
            raise OrderError(
                f"{step.where}: a gathered parameter of shape {tuple(parameter.shape)}",
                expected="sharded parameters",
                got="one of those that the model has while its weights are kept between microbatches",
                why="Its update would be lost",
                fix="build the optimizer before the first forward, or after te_fsdp.release_params(model)",
            )


def record_stepping_optimizer(step: Step) -> None:
    """Note whose step it is, for :func:`te_fsdp.sharded_model.recover_from_exception`."""
    for state, _ in step.models:
        state.stepping = weakref.ref(step.optimizer)
        register_optimizer(step.optimizer)


def refuse_closure(step: Step) -> None:
    """Raise if a closure's forward and backward would meet what is done for the step alone."""
    if not step.models or step.closure is None:
        return
    held = [get_record(parameter) for _, parameters in step.models for parameter in parameters]
    if _has_mixed_groups(step.optimizer) or any(
        f.tp_replica or (f.plan is not None and f.plan.gradient_dtype is not None) for f in held if f
    ):
        raise OrderError(
            f"{step.where}(closure) of a model with tensor parallelism, with parameters that "
            "are not sharded, or with gradients in main_grads_dtype",
            expected="step() after backward()",
            got="a closure",
            why="Its gradients would come too late to be made equal over tp, or cast",
            fix="call backward() first, then step() without a closure",
        )


def wait_for_gradients(step: Step) -> None:
    """Wait for reductions under way; raise if a gradient was not reduced, or if a backward has failed."""
    for state, parameters in step.models:
        require_reduced(state, step.where, parameters)


def check_nan_report(step: Step) -> None:
    """Raise or log what :func:`te_fsdp.report_nan` has seen. Collective over the world where it watches a model."""
    for state, _ in step.models:
        if state.nan_report is not None:
            state.nan_report.check()


def wrap_closure(step: Step) -> None:
    """Look at the gradients that a closure leaves, and at the losses that steer ``LBFGS``, after each call of it.

    What is looked at before a step is over by then. ``LBFGS`` decides by the loss where to stop, and where a search
    along its direction goes on: ranks whose losses differ would part, and wait for each other.
    """
    if step.closure is not None and step.models:
        step.closure = functools.partial(_run_closure, step, step.closure)


def _run_closure(step: Step, closure: Callable[[], Any]) -> Any:
    """One call of a closure. Collective over the mesh for ``LBFGS``: one max all-reduce of two integers."""
    loss = closure()
    for state, parameters in step.models:
        require_reduced(state, f"{step.where}(closure)", parameters)
        if state.nan_report is not None:
            state.nan_report.check()
    mesh = step.models[0][0].meshes.device_mesh
    if not isinstance(step.optimizer, torch.optim.LBFGS) or mesh.size() == 1:
        return loss
    (bits,) = struct.unpack("q", struct.pack("d", float(loss)))
    halves = [bits >> 32, bits & 0xFFFFFFFF]
    if not bool(are_equal(halves, mesh).all()):
        raise MeshError(
            f"{step.where}(closure): losses that differ between ranks",
            expected="the same loss on all ranks, the mean over their data",
            got=f"here {float(loss)!r}",
            why="It decides by the loss where to stop: the ranks would part, and wait for each other",
            fix="after loss.backward(): loss = loss.detach().clone(); torch.distributed.all_reduce(loss); return "
            "loss / the number of ranks",
        )
    return loss


def require_outer_averages(step: Step) -> None:
    """Raise before a step of HFSDP whose gradients nobody would average over ``dp_replicate``."""
    if any(state.outer == "optim" for state, _ in step.models):
        check_step(step.optimizer)


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
    if step.models and _has_mixed_groups(step.optimizer):
        mixing = step.models[0][0].mixing
        mixing.close()
        mixing.enter_context(implicit_replication())


def _has_mixed_groups(optimizer: Optimizer) -> bool:
    """Whether torch would refuse a group's foreach and fused kernels: some parameters are DTensors, others are not."""
    return any(
        len({isinstance(p, DTensor) for p in group["params"]}) == 2 for group in optimizer.param_groups
    )


def count_versions(step: Step) -> None:
    """Count the change of each parameter, which foreach and fused kernels do not for DTensors (torch 2.11 to 2.13)."""
    for _, parameters in step.models:
        changed = zip(parameters, gradients_of(parameters), strict=True)
        # What has no gradient stays as it is: a graph that waits for its backward may still need it.
        increment_version([parameter for parameter, gradient in changed if gradient is not None])


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
        kept = dict(state.gathered())
        state.versions = {name: versions for name, versions in state.versions.items() if name in kept}


# ------------------------------------------------------------------------------------------------------ edited weights

#: Attribute of an optimizer: its low-precision parameters, as they were after its last step.
_WRITTEN = "_te_fsdp_written"
# How far a quantized weight may lie from its main weight, in parts of the norm: eight bits round to 1/30, four to 1/8.
_TO_8_BITS = 1 / 8
_TO_4_BITS = 1 / 4
# Largest error of E4M3 near zero. Delayed scaling begins with a scale of 1, at which small weights are rounded to that.
_NEAR_ZERO = 2.0**-10


class _WeightVersions(NamedTuple):
    """Low-precision parameters of an optimizer, how often each has been written to, and how many it has of all."""

    parameters: list[torch.Tensor]
    versions: list[int]
    held: int

    @classmethod
    def now(cls, optimizer: Optimizer) -> _WeightVersions:
        """Those of an optimizer; low-precision ones are looked for when it has got other parameters."""
        known: _WeightVersions | None = optimizer.__dict__.get(_WRITTEN)
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        if known is not None and known.held == held:
            parameters = known.parameters
        else:
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if is_low_precision(p)
            ]
        # New weights that arrive after the step are written to local tensors: only edits by parameters are seen then.
        overlaps = getattr(main_parameters_of(optimizer), "overlaps", False)
        return cls(parameters, _torch.versions_of(parameters, with_locals=not overlaps), held)


def record_weight_versions(step: Step) -> None:
    """Note after a step how often low-precision parameters were written to, all that te_fsdp writes included."""
    if step.models:
        setattr(step.optimizer, _WRITTEN, _WeightVersions.now(step.optimizer))


def refuse_edited(step: Step) -> None:
    """Raise where the step would write a main weight back over a weight that somebody has edited since the last one.

    Local operation that compares numbers of writes; where they say that a parameter was written to, and once before
    the first step, collective over the model's mesh, and values are compared with those of main weights. Raises
    ``OrderError`` on all ranks of the model; nothing has changed.
    """
    if not step.models:
        return
    known: _WeightVersions | None = step.optimizer.__dict__.get(_WRITTEN)
    parameters, versions, _ = _WeightVersions.now(step.optimizer)
    if not parameters or (known is not None and known.versions == versions) or is_capturing():
        return
    mesh = step.models[0][0].meshes.device_mesh
    together = collective_call(f"{step.where}: first, or after weights were edited", mesh)
    with together, raised_on_all_ranks(mesh, step.where):
        _refuse_those(step, [parameter for parameter in parameters if _differs(step.optimizer, parameter)])
    record_weight_versions(step)


@torch.no_grad()
def _differs(optimizer: Optimizer, parameter: torch.Tensor) -> bool:
    """Whether a parameter is something else than its fp32 main weight, rounded or quantized. Local operation."""
    main, local = main_weight(optimizer, parameter), _torch.local_of(parameter).detach()
    if main is None or main.dtype != torch.float32 or not main.numel():
        return False
    quantized, shard = _te.is_quantized(local), optimizer_shard_in(optimizer, parameter)
    value = local.dequantize(dtype=torch.float32) if quantized else local  # type: ignore[call-arg]
    value = value if shard is None else shard.of(value)
    if not quantized:
        rounded = main.to(value.dtype)
        return not bool(((value == rounded) | (value.isnan() & rounded.isnan())).all())
    kind = _te.format_of(local)
    limit = (_TO_8_BITS if kind is None or kind.name not in ("nvfp4", "hybrid") else _TO_4_BITS) * main.norm()
    if _te.has_delayed_scale(local):
        limit = limit + _NEAR_ZERO * main.numel() ** 0.5 * _te.inverse_scale_of(local)
    return bool((value - main).norm() > limit)


def _refuse_those(step: Step, edited: list[torch.Tensor]) -> None:
    if not edited:
        return
    names = step.names
    raise OrderError(
        f"{step.where}: {shorten([names.get(id(p), 'a parameter') for p in edited], 3)}",
        expected="weights that are their main weights, rounded or quantized",
        got=f"{len(edited)} that were edited since the last step, or since main weights were made",
        why="The step would write the main weights back: the edits would be lost",
        fix='edit optimizer.state[parameter]["master_param"] as well; or delete it from that state after the edit: the '
        "next step begins with a main weight of the edited weight",
    )


#: Around every step of an optimizer of sharded models, in this order (:mod:`te_fsdp.lifecycle`); bound ones have a
#: part of it (``bind_device_mesh.py``). In between, ``MainParameters`` puts main weights in the parameters' places and
#: takes them out again by hooks of the optimizer's own, since torch runs those before these once the step is over:
#: what the user registers on the optimizer afterwards (an average of the weights, say) sees parameters with their
#: new values.
BEFORE_STEP: StepFunctions = (
    restore_optimizer_params,
    refuse_replaced,
    require_main_weights,
    refuse_gathered,
    record_stepping_optimizer,
    refuse_closure,
    before_first_step,
    refuse_edited,
    wait_for_gradients,
    check_nan_report,
    wrap_closure,
    require_outer_averages,
    require_equal_gradients,
    sync_tp_replicas,
    cast_gradients,
    allow_mixed_parameters,
    use_fused_adam_master_weights,
)
AFTER_STEP: StepFunctions = (
    refresh_quantized,
    count_versions,
    record_weight_versions,
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
