"""What happens by itself around forward, other methods that gather, and ``optimizer.step()`` of sharded models.

before a forward   what an exception has left half done is mended; new weights on their way are waited for, stale
                   gathered ones refused
before a step      :data:`BEFORE_STEP`: gradients are complete, or it raises; replicas over tp get equal ones
after a step       :data:`AFTER_STEP`: kept weights are released, so that the next forward gathers the new ones
"""

from __future__ import annotations

import functools
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from te_fsdp import _fsdp2, _fsdp2_patches, _torch
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.modules.initialize import check_initialised
from te_fsdp.modules.inputs import check_inputs
from te_fsdp.modules.rank_checks import require_equal_gradients
from te_fsdp.parameters import attributes_of, carry_over, facts_of, is_replicated, places_of, plan_of
from te_fsdp.quantized.optimizer_steps import refresh_quantized, require_main_weights, take_out_main_weights
from te_fsdp.sharding.clearing import clear_with, clear_with_modules
from te_fsdp.sharding.closures import look_after_closure
from te_fsdp.sharding.comm_units import gather_anew
from te_fsdp.sharding.computed_alike import require_computed_alike, require_same_recipe
from te_fsdp.sharding.first_looks import (
    before_first_forward,
    before_first_step,
    leave_unset,
    refuse_conversion,
    refuse_inference_mode,
)
from te_fsdp.sharding.kept_weights import show_gathered, show_shards
from te_fsdp.sharding.main_weights import (
    lend_main_weights,
    note_written,
    optimizers_of,
    refuse_edited,
    remember,
)
from te_fsdp.sharding.outer_averages import check_step
from te_fsdp.sharding.precision import gradient_dtype
from te_fsdp.sharding.reductions import (
    has_failed,
    require_reduced,
    require_sound,
)
from te_fsdp.sharding.state import (
    ShardingState,
    end_step,
    is_assigned,
    mark,
    mark_gathered,
    recover,
    refuse_assigned,
    shard_of,
    sharding_state,
    state_of,
    versions_of,
)
from te_fsdp.step_hooks import (
    StepFunctions,
    gradients_of,
    refuse_replaced,
    replacing,
    run_around_steps,
    sync_tp_replicas,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from te_fsdp.step_hooks import Step


def watch_steps() -> None:
    """Take part in every optimizer step from now on; later calls do nothing."""
    run_around_steps(BEFORE_STEP, AFTER_STEP)


def watch_forward(state: ShardingState) -> None:
    """Look after the weights of a model before each forward of it and of its units."""
    for name, unit in state.modules.items():
        # Before FSDP2's own hook, which gathers.
        before = _torch.untraced(functools.partial(_before_unit, state, name))
        unit.register_forward_pre_hook(before, prepend=True)
        if state.units[name].gather != "pass":
            _fsdp2_patches.before_unshard(unit, functools.partial(show_gathered, state, name, unit))
    state.model.register_forward_pre_hook(
        _torch.untraced(functools.partial(_before_forward, state)), prepend=True
    )
    state.model.register_forward_hook(_torch.untraced(functools.partial(_after_forward, state)))
    _fsdp2_patches.around_apply(state.model, functools.partial(_apply_and_carry, state))
    clear_with_modules()


def _apply_and_carry(state: ShardingState, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """``Module._apply``, which swaps DTensors for new ones: Python attributes, te_fsdp's marks too, stay behind.

    So does the dtype of their gradients. Gradients of another dtype, which torch refuses then, are set aside meanwhile.
    """
    state.pending_gathers.wait()
    refuse_conversion(state, args[0])
    known, gradients = {}, {}
    for name, parameter in state.parameters().items():
        known[name] = attributes_of(parameter)
        plan = plan_of(parameter)
        if plan is not None and plan.gradient_dtype is not None:
            gradients[name], parameter.grad = parameter.grad, None
    try:
        with replacing(state.model, "to_empty, or another call that converts the model"):
            result = stock(*args, **kwargs)
        if "to_empty" in getattr(args[0], "__qualname__", ""):
            leave_unset(state.model)
            state.emptied = state.on_meta = True
        return result
    except NotImplementedError as error:
        if "meta tensor" not in str(error):
            raise
        raise OrderError(
            f"{type(state.model).__name__}: a move to a device before its parameters have values",
            expected="te_fsdp.materialize(model), which puts them where they belong",
            got="parameters on meta",
            fix="call te_fsdp.materialize(model, seed=...) in its place",
        ) from error
    finally:
        for name, parameter in state.parameters().items():
            carry_over(known[name], parameter)
            if name in gradients:
                gradient = gradients[name]
                parameter.grad_dtype = gradient_dtype(parameter)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
        mark(state, moved=True)


# ------------------------------------------------------------------------------------------------------------- forward


def watch_method(unit: nn.Module, method: str) -> None:
    """Look after the weights and gradients of a unit, or of the model, around one more method, as around forward."""
    found = next(map(state_of, map(shard_of, unit.parameters())), None)
    if found is None:
        return  # torch's own fully_shard has sharded it
    state, stock = found, getattr(unit, method)
    names = [name for name, own in state.modules.items() if own is unit]
    replicated = state.replicated if unit is state.model else None
    check = _torch.untraced(check_inputs)

    @functools.wraps(stock)
    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if unit is state.model:
            _before_forward(state, unit, args)
            check(unit, args, kwargs, method)
        if replicated is not None:
            replicated.attach()
        for name in names:
            _before_unit(state, name, unit, args)
        state.methods += unit is state.model
        try:
            output = stock(*args, **kwargs)
        finally:
            state.methods -= unit is state.model
        _after_forward(state, unit, args, output)
        if replicated is not None:
            replicated.watch(output)
        return output

    setattr(unit, method, MethodType(watched, unit))


def _check_initialised(state: ShardingState) -> None:
    """Before FSDP2 does: it would advise ``to_empty``, which leaves whatever the memory held. Local operation."""
    check_initialised(state.parameters().items())
    before_first_forward(state)
    state.on_meta = False


def _before_forward(state: ShardingState, module: nn.Module, args: Any) -> None:
    if state.on_meta:
        _check_initialised(state)
    if not _torch.in_backward() and not state.methods:
        refuse_inference_mode(state)
        recover(state)
        has_failed(state)  # gradients that were cleared since are forgotten before there are new ones
        if state.replicated is not None and state.replicated.settle():
            # Now and not at the step: this rank's reductions would meet those of another microbatch.
            state.failed = True
            require_sound(state, "forward")
        for root in state.roots() if state.unfinished else ():
            _fsdp2.forget_forward_order(root)
        if not _is_marked(state):
            mark(state)
        require_computed_alike(state)
        if state.waiting and not state.cleared:
            # Optimizers are met at their first step: those of a first microbatch that is given up are looked for.
            for optimizer in optimizers_of(state.parameters().values()):
                clear_with(optimizer, state)
            state.cleared = True


def _is_marked(state: ShardingState) -> bool:
    """Whether the parameters are still those that were marked: initialisation and loading replace them.

    Those that FSDP2 does not manage are marked anew by what reduces their gradients.

    Raises:
        OrderError: ``.data`` of one was assigned. Of each unit one is looked at: whoever does that does it to all.
    """
    for unit in state.modules.values():
        first = next(iter(_fsdp2.sharded_parameters(unit)), None)
        if first is not None and is_assigned(first):
            refuse_assigned(state)
        if first is not None and state_of(first) is None:
            return False
    return True


def _before_unit(state: ShardingState, name: str, unit: nn.Module, args: Any) -> None:
    """Wait for the unit's new weights; raise if it would run with some that were changed since they were gathered."""
    if state.on_meta:
        _check_initialised(state)
    state.pending_gathers.before_forward(name, unit)
    if name in state.aside:
        show_gathered(state, name, unit)
    if _torch.in_backward():  # recomputed activations
        _fsdp2.begin_again(unit)
        return
    require_same_recipe(state, name)
    started = state.gathers.pop(name, None) is not None  # this forward waits for it
    if not started and not _fsdp2.is_gathered(unit):
        # Released again in each forward and backward: only start_param_gather can make these stale.
        if state.units[name].gather == "pass":
            state.versions.pop(name, None)
        else:
            state.versions[name] = versions_of(unit)
        return
    gathered_at = state.versions.get(name)
    if gathered_at is None:
        return
    now = versions_of(unit)
    changed = [key for key, version in gathered_at.items() if now.get(key, version) != version]
    if changed:
        names = {id(parameter): own for own, parameter in state.parameters().items()}
        raise OrderError(
            f"{names[changed[0]]}: forward with a gathered weight from before the last update",
            expected="weights gathered after the optimizer's step",
            got="a shard that was written to while the whole weight was kept",
            why="Only the steps of torch.optim.Optimizer's subclasses release kept weights by themselves",
            fix="call te_fsdp.release_params(model) after the update",
        )


def _after_forward(state: ShardingState, module: nn.Module, args: Any, output: Any) -> None:
    """Gathered parameters that are kept are those that ``model.parameters()`` gives: let them be recognised."""
    for name, unit in state.modules.items():
        kept = state.units[name].gather != "pass"
        if kept and name not in state.recognised and _fsdp2.is_gathered(unit):
            mark_gathered(unit)
            state.recognised.add(name)
    if module is state.model and not (torch.is_grad_enabled() or state.methods or _torch.in_backward()):
        show_shards(state)


def register_forward_method(module: nn.Module, method: str) -> None:
    """Let a method of a unit gather the unit's weights as ``forward`` does, for example ``generate`` or ``encode``.

    FSDP2 gathers in the hooks of ``forward``; a method that is called on its own sees shards and fails. Local
    operation; the method itself becomes collective, as ``forward`` is. Nothing is gathered for modules that are not
    sharded (:func:`te_fsdp.fsdp_no_shard`), whose weights are always whole; if the whole model is one, its gradients
    are watched.

    Args:
        module: A unit of a model after :func:`te_fsdp.fully_shard`, or its root.
        method: Name of the method.

    Raises:
        OrderError: The module is no unit.
        PlacementError: It has no such method.

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``, which does nothing for other modules.
    """
    if not callable(getattr(module, method, None)):
        raise PlacementError(
            f"register_forward_method: {type(module).__name__} has no method {method!r}",
            expected="the name of a method",
        )
    if _torch.is_fsdp_module(module):
        register_fsdp_forward_method(module, method)
        watch_method(module, method)
    elif sharding_state(module) is not None:
        watch_method(module, method)
    elif not _is_whole(module):
        raise OrderError(
            f"register_forward_method({type(module).__name__}, {method!r})",
            expected="a unit, after te_fsdp.fully_shard",
            got="a module that gathers nothing by itself",
            why="Its weights are gathered by the unit around it, so the method would see shards",
            fix="call it after te_fsdp.fully_shard(..., units=...) that makes a unit of this module, or register "
            "a method of the unit",
        )


def _is_whole(module: nn.Module) -> bool:
    """Whether all parameters in a module are replicated, and there are some."""
    own = [is_replicated(place.owner, place.name) for place in places_of(module)]
    return bool(own) and all(own)


# --------------------------------------------------------------------------------------------------------------- steps


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


def wait_for_new_weights(step: Step) -> None:
    """Wait for new weights of the step before; note whose step it is, for :func:`te_fsdp.sharding.state.recover`."""
    for state, _ in step.models:
        state.pending_gathers.wait()
        state.stepping = weakref.ref(step.optimizer)
        remember(step.optimizer)
        clear_with(step.optimizer, state)


def refuse_closure(step: Step) -> None:
    """Raise if a closure's forward and backward would meet what is done for the step alone."""
    if not step.models or step.closure is None:
        return
    held = [facts_of(parameter) for _, parameters in step.models for parameter in parameters]
    if _mixes(step.optimizer) or any(
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


def look_for_nan(step: Step) -> None:
    """Raise or log what :func:`te_fsdp.report_nan` has seen. Collective over the world where it watches a model."""
    for state, _ in step.models:
        if state.nan_report is not None:
            state.nan_report.check()


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
    if step.models and _mixes(step.optimizer):
        mixing = step.models[0][0].mixing
        mixing.close()
        mixing.enter_context(implicit_replication())


def _mixes(optimizer: Optimizer) -> bool:
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


def take_back(step: Step) -> None:
    """Undo :func:`cast_gradients` and :func:`allow_mixed_parameters`. The next forward does, if a step raised."""
    for state, _ in step.models:
        end_step(state)


def forget_nan(step: Step) -> None:
    """Begin to look for NaN anew."""
    for state, _ in step.models:
        if state.nan_report is not None:
            state.nan_report.forget()


def release_weights(step: Step) -> None:
    """Release weights that were kept or are being gathered, so that the next forward gathers the new ones."""
    for state, _ in step.models:
        gather_anew(state)
        for gather in state.gathers.values():
            gather.wait()
        state.gathers.clear()
        for _, unit in state.gathered():
            unit.reshard()
        kept = dict(state.gathered())
        state.versions = {name: versions for name, versions in state.versions.items() if name in kept}


#: Around every step of an optimizer of sharded models, in this order (:mod:`te_fsdp.step_hooks`); bound ones have a
#: part of it (``modules/apply.py``). In between, ``MainParameters`` puts main weights in the parameters' places and
#: takes them out again by hooks of the optimizer's own, since torch runs those before these once the step is over:
#: what the user registers on the optimizer afterwards (an average of the weights, say) sees parameters with their
#: new values.
BEFORE_STEP: StepFunctions = (
    take_out_main_weights,
    refuse_replaced,
    require_main_weights,
    refuse_gathered,
    wait_for_new_weights,
    refuse_closure,
    before_first_step,
    refuse_edited,
    wait_for_gradients,
    look_for_nan,
    look_after_closure,
    require_outer_averages,
    require_equal_gradients,
    sync_tp_replicas,
    cast_gradients,
    allow_mixed_parameters,
    lend_main_weights,
)
AFTER_STEP: StepFunctions = (
    refresh_quantized,
    count_versions,
    note_written,
    take_back,
    forget_nan,
    release_weights,
)
