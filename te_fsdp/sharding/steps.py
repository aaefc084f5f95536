"""What happens by itself around forward and ``optimizer.step()``, for models of ``fully_shard``.

    before a forward   what an exception has left half done is mended; new weights on their way are waited for, stale
                       gathered ones refused
    before a step      gradients are complete, or it raises; outer reductions; copies over tp made equal; main
                       gradients; torch is told to take unsharded parameters and DTensors together
    after a step       main weights installed; kept weights released, so that the next forward gathers the new ones

The hooks of optimizers are torch's global ones, and look only at parameters that ``fully_shard`` has marked.
"""

from __future__ import annotations

import functools
import weakref
from types import MethodType
from typing import TYPE_CHECKING, Any, NoReturn

from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp import _fsdp2, _fsdp2_patches, _torch
from te_fsdp.errors import OrderError
from te_fsdp.modules import copies
from te_fsdp.modules.initialize import check_initialised
from te_fsdp.modules.inputs import check_inputs
from te_fsdp.modules.replaced import replacing
from te_fsdp.parameters import KEY, Facts, attributes_of, carry_over, facts_of
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharding.optimizer import remember
from te_fsdp.sharding.outer_gradients import check_step, gradients_of
from te_fsdp.sharding.precision_plan import gradient_dtype
from te_fsdp.sharding.reductions import has_failed, require_reduced, require_sound
from te_fsdp.sharding.state import (
    ShardingState,
    mark,
    mark_gathered,
    recover,
    shard_of,
    state_of,
    versions_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["watch_forward", "watch_method", "watch_steps"]


@functools.cache
def watch_steps() -> None:
    """Take part in every optimizer step from now on; later calls do nothing."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def watch_forward(state: ShardingState) -> None:
    """Look after the weights of a model before each forward of it and of its units."""
    for name, unit in state.modules.items():
        # Before FSDP2's own hook, which gathers.
        before = _torch.untraced(functools.partial(_before_unit, state, name))
        unit.register_forward_pre_hook(before, prepend=True)
    state.model.register_forward_pre_hook(
        _torch.untraced(functools.partial(_before_forward, state)), prepend=True
    )
    state.model.register_forward_hook(_torch.untraced(functools.partial(_after_forward, state)))
    _fsdp2_patches.around_apply(state.model, functools.partial(_apply_and_carry, state))


def _apply_and_carry(state: ShardingState, stock: Any, *args: Any, **kwargs: Any) -> Any:
    """``Module._apply``, which swaps DTensors for new ones: Python attributes, te_fsdp's marks too, stay behind.

    So does the dtype of their gradients. Gradients of another dtype, which torch refuses then, are set aside meanwhile.
    """
    state.arrivals.wait()
    known, gradients = {}, {}
    for name, parameter in state.parameters().items():
        known[name] = attributes_of(parameter)
        facts = facts_of(parameter)
        if facts is not None and facts.gradient is not None:
            gradients[name], parameter.grad = parameter.grad, None
    try:
        with replacing(state.model, "to_empty, or another call that converts the model"):
            return stock(*args, **kwargs)
    finally:
        for name, parameter in state.parameters().items():
            carry_over(known[name], parameter)
            if name in gradients:
                gradient = gradients[name]
                parameter.grad_dtype = gradient_dtype(parameter)
                parameter.grad = None if gradient is None else gradient.to(parameter.device)


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
    state.on_meta = False


def _before_forward(state: ShardingState, module: nn.Module, args: Any) -> None:
    if state.on_meta:
        _check_initialised(state)
    if not _torch.in_backward() and not state.methods:
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


def _is_marked(state: ShardingState) -> bool:
    """Whether the parameters are still those that were marked: initialisation and loading replace them.

    Those that FSDP2 does not manage are marked anew by what reduces their gradients.
    """
    firsts = (next(iter(_fsdp2.sharded_parameters(unit)), None) for unit in state.modules.values())
    return all(state_of(parameter) is not None for parameter in firsts if parameter is not None)


def _before_unit(state: ShardingState, name: str, unit: nn.Module, args: Any) -> None:
    """Wait for the unit's new weights; raise if it would run with some that were changed since they were gathered."""
    if state.on_meta:
        _check_initialised(state)
    state.arrivals.before_forward(name, unit)
    if _torch.in_backward():  # recomputed activations
        _fsdp2.begin_again(unit)
        return
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


# --------------------------------------------------------------------------------------------------------------- steps


def _models(optimizer: Optimizer) -> list[tuple[ShardingState, list[torch.Tensor]]]:
    """The models that an optimizer works on, each with the optimizer's parameters of it."""
    found: dict[int, tuple[ShardingState, list[torch.Tensor]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts: Facts | None = parameter.__dict__.get(KEY)  # no calls: this runs twice in each step
            if not facts:
                continue
            if facts.record is not None and shard_of(parameter) is not parameter:
                _refuse_gathered(optimizer, parameter)
            state = facts.state() if facts.state is not None else None
            if state is not None:
                found.setdefault(id(state), (state, []))[1].append(parameter)
    return list(found.values())


def _refuse_gathered(optimizer: Optimizer, parameter: torch.Tensor) -> NoReturn:
    raise OrderError(
        f"{type(optimizer).__name__}.step: a gathered parameter of shape {tuple(parameter.shape)}",
        expected="sharded parameters",
        got="one of those that the model has while its weights are kept between microbatches",
        why="Its update would be lost",
        fix="build the optimizer before the first forward, or after te_fsdp.release_params(model)",
    )


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    stand_ins = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if stand_ins is not None:
        stand_ins.put_back(optimizer)  # a step that raised has left them in
    models = _models(optimizer)
    where = f"{type(optimizer).__name__}.step"
    for state, _ in models:
        state.arrivals.wait()
        state.stepping = weakref.ref(optimizer)
        remember(optimizer)
    if models and (kwargs.get("closure") is not None or any(map(callable, args[1:]))):
        _refuse_closure(optimizer, [p for _, parameters in models for p in parameters])
    for state, parameters in models:
        require_reduced(state, where, parameters)
        for prepare in state.before_step:
            prepare(optimizer)
    if any(state.outer == "optim" for state, _ in models):
        check_step(optimizer)
    # What is cut over further axes is averaged in the optimizer's own hook, after this one, and taken over then.
    copies.take_over_gradients(
        [p for _, parameters in models for p in parameters if p.__dict__[KEY].stand_ins is None]
    )
    for state, parameters in models:
        if state.precision_plan is not None:
            state.precision_plan.before_step(optimizer, parameters)
    if models and _mixes(optimizer):
        mixing = models[0][0].mixing
        mixing.close()
        mixing.enter_context(implicit_replication())


def _refuse_closure(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """Raise if a closure's forward and backward would meet what is done for the step alone."""
    if _mixes(optimizer) or any(
        f.tp_replica or f.gradient is not None for f in map(facts_of, parameters) if f
    ):
        raise OrderError(
            f"{type(optimizer).__name__}.step(closure) of a model with tensor parallelism, with parameters that "
            "are not sharded, or with gradients in main_grads_dtype",
            expected="step() after backward()",
            got="a closure",
            why="Its gradients would come too late to be made equal over tp, or cast",
            fix="call backward() first, then step() without a closure",
        )


def _mixes(optimizer: Optimizer) -> bool:
    """Whether torch would refuse a group's foreach and fused kernels: some parameters are DTensors, others are not.

    Optimizers choose these kernels by themselves on GPUs. Parameters that are not sharded count as replicated; updates
    are by element, so that each rank's part is what it would be alone.
    """
    return any(
        len({isinstance(p, DTensor) for p in group["params"]}) == 2 for group in optimizer.param_groups
    )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for state, parameters in _models(optimizer):
        # Foreach and fused kernels change DTensors without counting it (torch 2.11 to 2.13). What has no gradient
        # stays as it is: a graph that waits for its backward may still need it.
        gradients = gradients_of(parameters)
        increment_version(
            [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        )
        state.mixing.close()
        state.stepping = None
        if state.precision_plan is not None:
            state.precision_plan.put_back()
        for finish in state.after_step:
            finish(optimizer)
        for gather in state.gathers.values():
            gather.wait()
        state.gathers.clear()
        for _, unit in state.gathered():
            unit.reshard()  # type: ignore[operator]
        kept = dict(state.gathered())
        state.versions = {name: versions for name, versions in state.versions.items() if name in kept}
