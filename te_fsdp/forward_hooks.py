"""Hooks around a sharded model's forwards: recovery, waits for new weights, checks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from te_fsdp import kept_weights
from te_fsdp.gradient_sync import ZeroGrad, raise_if_backward_failed, refresh_failed
from te_fsdp.recovery import recover_from_exception
from te_fsdp.sharded_model import (
    ShardedModel,
    attach_state_to_params,
    record_unsharded_params,
    sharded_model_of,
)
from te_fsdp.upstream import (
    fsdp2_containers as _fsdp2_containers,
    fsdp2_patches as _fsdp2_patches,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.torch_mixed_lists import foreach_writes


def register_forward_hooks(state: ShardedModel) -> None:
    """Register the hooks around each forward of a model and of its units. Local operation."""
    # Hooks are not compiled: they read the state of a step, which a traced graph would contain as constants.
    for name, unit in state.modules.items():
        after = _torch.disable_compile(functools.partial(after_unit, state, name))
        unit.register_forward_hook(after, always_call=True)
        handle: list[Any] = []
        choose = _torch.disable_compile(functools.partial(choose_root, state, handle))
        # Before FSDP2's hook, which chooses the root and all-gathers.
        handle.append(unit.register_forward_pre_hook(choose, prepend=True))
        before = _torch.disable_compile(functools.partial(before_unit, state, name))
        unit.register_forward_pre_hook(before, prepend=True)
        before_unshard = functools.partial(kept_weights.before_unshard, state, name, unit)
        fsdp2_units.call_before(unit, "unshard", before_unshard)
    first = _torch.disable_compile(functools.partial(before_forward, state))
    state.model.register_forward_pre_hook(first, prepend=True)
    # After FSDP2's hook, so that only units that are kept are still unsharded.
    last = _torch.disable_compile(functools.partial(after_forward, state))
    state.model.register_forward_hook(last, always_call=True)
    _fsdp2_patches.replace_zero_grad(state.model, ZeroGrad(state))


def _check_initialized(state: ShardedModel) -> None:
    """Run the checks of parameters that may have been on meta until now. Local operation."""
    for check in state.checks.initialized:
        check(state)
    state.checked.on_meta = False


def before_forward(state: ShardedModel, module: nn.Module, args: Any) -> None:
    """Prepare a forward of the model, or a call of a registered method of it. Collective as its checks are."""
    if state.checked.on_meta:
        run = functools.partial(_check_initialized, state)
        for first in state.checks.first:
            run = functools.partial(first, state, run)
        run()
    # Recomputation in backward, and forwards inside a registered method, belong to a forward that has begun.
    # backward_id() != -1 is in_backward(), without a Python call: these hooks run in every step.
    if _torch.backward_id() == -1 and not state.computed.methods:
        recover_from_exception(state)
        for prepare in state.components.before_forward:
            prepare()
        refresh_failed(state)  # forget cleared gradients before new ones exist
        for settle in state.components.settle:
            if settle():
                # Raise now, not in the step: this rank's reductions would match those of a different microbatch.
                state.sync.failed = True
                raise_if_backward_failed(state, "forward")
        # Initialization and loading replace all parameters, so one of each unit shows whether they still have the
        # state. The reduction of their gradients marks parameters that FSDP2 does not manage.
        for first in _fsdp2.first_sharded_parameters(state.modules.values()):
            if sharded_model_of(first) is None:
                attach_state_to_params(state)
                break
        for check in state.checks.forward:
            check(state)
        if state.sync.waiting:
            for drop in state.components.drop_cleared:
                drop()


def before_unit(state: ShardedModel, name: str, unit: nn.Module, args: Any) -> None:
    """Prepare a unit before FSDP2 all-gathers it for its forward. Collective as its checks are."""
    if state.checked.on_meta:
        _check_initialized(state)
    if name in state.unsharded.exposed:
        kept_weights.expose_unsharded_params(state, name, unit)
    if _torch.backward_id() != -1:  # recomputed activations
        _fsdp2.allow_recompute(unit)
        return
    started = state.unsharded.gathers.pop(name, None) is not None  # this forward waits for it
    if started and not state.unsharded.exposed:
        foreach_writes().ignore(state)
    if name in state.unsharded.kept and not _fsdp2.is_unit_unsharded(unit):
        # A load or an evaluation has resharded the unit. Its all-gather is not a write of the user.
        kept_weights.apply_frozen(state, name)
        state.unsharded.kept.pop(name)
    for prepare in state.components.before_unit:
        prepare(name)
    for check in state.checks.unit:
        check(state, name, unit, started)


def after_unit(state: ShardedModel, name: str, unit: nn.Module, args: Any, output: Any) -> None:
    """Expose shards after an evaluation; let FSDP2 find tensors in objects that a unit returns. Local operation.

    After an exception it restores the caller's containers.
    """
    if output is None and _fsdp2_containers.restore_after_exception(unit):
        return
    if not torch.is_grad_enabled() and state.units[name].gather != "pass":
        kept_weights.expose_after_evaluation(state, name, unit)
    if type(output) is torch.Tensor or not torch.is_grad_enabled() or _torch.backward_id() != -1:
        return
    # FSDP2 finds tensors in tuples, lists and dicts only. Others would get no all-gather in backward.
    opaque = _fsdp2_containers.opaque_in(output)
    if not opaque:
        return
    tensors = list(_fsdp2_containers.tensors_in(opaque))
    _fsdp2_containers.gather_in_backward_of(unit, [tensor for tensor in tensors if tensor.requires_grad])
    if not tensors and not any(isinstance(leaf, torch.Tensor) for leaf in _torch.flatten(output)[0]):
        for check in state.checks.output:
            check(name, unit, opaque)


def choose_root(state: ShardedModel, handle: list[Any], unit: nn.Module, args: Any) -> None:
    """Make the outermost unit around ``unit`` FSDP2's root, before its first forward. Local operation.

    ``handle`` contains the handle of this hook, which removes itself.
    """
    while handle:
        handle.pop().remove()
    # FSDP2 makes the first unit that runs forward the root of its tree. If that is an inner unit (a script calls an
    # encoder first), FSDP2 raises in the first forward of the model.
    if _fsdp2.is_bound_to_root(unit):
        return
    around = [state.model] if fsdp2_units.is_fsdp_module(state.model) else []
    around += reversed(state.modules.values())
    for outer in around:
        if outer is not unit and any(inner is unit for inner in outer.modules()):
            _fsdp2.make_root(outer)
            return


def after_forward(state: ShardedModel, module: nn.Module, args: Any, output: Any) -> None:
    """Record the units that stay unsharded; call components and checks after a forward of the root with gradients.

    After a forward without gradients the sharded parameters are registered. Collective as its checks are.
    """
    if output is None:  # or the forward has raised: no order of units to compare
        state.computed.running = None
    if output is None and kept_weights.expose_after_exception(state):
        return
    for name, unit in state.modules.items():
        # The first forward creates the unsharded parameters, which ``model.parameters()`` returns until they are freed.
        # From then on te_fsdp can swap them without FSDP2.
        if state.units[name].gather != "pass" and _fsdp2.is_unit_unsharded(unit):
            if name not in state.unsharded.recorded:
                record_unsharded_params(unit)
                state.unsharded.recorded.add(name)
            if torch.is_grad_enabled() and name not in state.unsharded.kept:
                kept_weights.record_kept(state, name, unit)
    if module is state.model and not state.computed.methods and _torch.backward_id() == -1:
        for check in state.checks.ended if output is not None else ():  # None after an exception
            check(state)
        if torch.is_grad_enabled():
            trained = [tensor for tensor in _fsdp2_containers.tensors_in(output) if tensor.requires_grad]
            for after in state.components.after_forward:
                after(trained)
            for check in state.checks.trained:
                check(state, trained)
        else:
            # After an evaluation users may read or write weights, and must find the sharded parameters.
            kept_weights.end_evaluation(state)
