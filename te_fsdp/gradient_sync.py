"""Control of gradient synchronization by the training loop.

A gradient is complete when ``.grad`` of the sharded parameter is the mean over all ranks and microbatches so far.
Until then FSDP2 (or :mod:`te_fsdp.features.replicated_gradients`) stores unreduced gradients outside of ``.grad``.

A training loop can mark the last microbatch:

    plain loop      each backward counts as the last one of its step: correct for every strategy
    microbatch      is_last=False: others follow; as little communication as the strategy permits
    no_sync, sync   no reduction at all, or a reduction in each backward, for every strategy
    start_grad_reduce, start_param_gather: explicit reductions and all-gathers

Contexts restore the previous setting, also after an exception. Modules without ``fully_shard`` raise OrderError.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from te_fsdp.errors import OrderError, require_flags
from te_fsdp.layout import SyncMode
from te_fsdp.recovery import recover_from_exception
from te_fsdp.sharded_model import ShardedModel, refuse_in_backward, require_sharded_model
from te_fsdp.upstream import fsdp2_gradients as _fsdp2_gradients, fsdp2_state as _fsdp2
from te_fsdp.upstream.torch_dtensor import in_backward, runs_eagerly


@runs_eagerly
def start_grad_reduce(model: nn.Module) -> None:
    """Start the reduction of all unreduced gradients, outside of backward.

    Use it for an explicit reduction: run all backwards in :func:`no_sync`, or with :func:`set_auto_sync` off.
    Gradients are complete after :func:`finish_grad_reduce`. Without unreduced gradients it has no effect.

    Collective over data parallel: a reduce-scatter per unit (and an all-reduce with HSDP), and one all-reduce per
    dtype for ``no_shard`` parameters. Call it on all ranks.

    Raises:
        OrderError: The call is made during backward, or a backward has failed.
    """
    state = require_sharded_model(model, "start_grad_reduce")
    refuse_in_backward("start_grad_reduce")
    raise_if_backward_failed(state, "start_grad_reduce")
    state.sync.completed = True
    if not state.pending():
        return
    # First FSDP2's units, then the components: collectives must start in one order on all ranks.
    for root in state.roots():
        _fsdp2.reduce_outside_backward(root)
    for reduce in state.components.reduce_gradients:
        reduce()
    state.sync.unfinished = True


@runs_eagerly
def finish_grad_reduce(model: nn.Module) -> None:
    """Complete all gradients: start the remaining reductions of :func:`start_grad_reduce`, and wait for all of them.

    The wait is on the device. Collective over data parallel if there are unreduced gradients. Weights that were kept
    stay unsharded until the optimizer's step.

    With HFSDP (``outer_strategy="optim"``) the optimizer's step averages gradients over ``dp_replicate``, and each
    rank gets the rows that it updates. Before that, reads of ``.grad`` raise.

    Raises:
        OrderError: As in :func:`start_grad_reduce`.
    """
    state = require_sharded_model(model, "finish_grad_reduce")
    start_grad_reduce(model)
    wait_for_reductions(state)


def wait_for_reductions(state: ShardedModel) -> None:
    """Make the current stream wait for all started reductions; without any it has no cost. Local operation."""
    if state.sync.unfinished:
        for root in state.roots():
            _fsdp2.wait_for_reductions(root)
        # In the other modes, the next backward may start reductions again.
        state.sync.unfinished = state.sync.mode is not SyncMode.LAST


def require_reduced(state: ShardedModel, where: str, only: Iterable[torch.Tensor] | None = None) -> None:
    """Wait for started reductions; raise OrderError if a gradient, or one of ``only``, is still unreduced. Local."""
    wait_for_reductions(state)
    raise_if_backward_failed(state, where)
    pending = state.pending()
    # A later step then skips this search. In the other modes the next backward may leave gradients unreduced again.
    if not pending:
        state.sync.waiting = state.sync.mode is not SyncMode.LAST
    if pending and only is not None:
        pending = {key: pending[key] for key in map(id, only) if key in pending}
    if pending:
        expected = "a last backward that reduces the accumulated gradients"
        got = "only backwards in te_fsdp.no_sync, or microbatches with is_last=False"
        fix = "run the last backward with is_last=True or outside of the context, or call "
        fix += "te_fsdp.finish_grad_reduce(model)"
        if in_backward():  # a hook, while other gradients are not reduced
            expected = "a call after backward, which reduces them when it ends"
            got = "a call within backward, as in register_post_accumulate_grad_hook"
            fix = "call it after backward(), or step an optimizer of the hook's parameter alone"
        what = f"gradients of {len(pending)} parameter(s) were not reduced, such as {next(iter(pending.values()))}"
        why = "Each rank has the gradient of its own microbatches only"
        raise OrderError(f"{where}: {what}", expected=expected, got=got, why=why, fix=fix)


def raise_if_backward_failed(state: ShardedModel, where: str) -> None:
    """Raise OrderError if a backward or a step has failed, on any rank, since gradients were last cleared."""
    # A backward of another rank may have failed. Its flag arrives with an all-reduce of the last backward.
    for settle in state.components.settle:
        state.sync.failed |= settle()
    if state.sync.dropped and all(p.grad is None for p in state.parameters().values()):
        state.sync.dropped = False  # all gradients were cleared, so none is incomplete
    if not refresh_failed(state):
        return
    raise OrderError(
        f"{where}: a backward or a step has raised since gradients were cleared, here or on another rank",
        expected="gradients of complete microbatches",
        got="gradients that include the failed microbatch for some units only, or gradients of a previous step",
        fix="call te_fsdp.zero_grad(model) and run all microbatches of the step again",
    )


def refresh_failed(state: ShardedModel) -> bool:
    """Reset ``failed`` if the gradients of the failed backward or step were cleared; return it. Local operation."""
    if (
        state.sync.failed
        and not state.sync.dropped
        and all(p.grad is None for p in state.parameters().values())
    ):
        state.sync.failed = False
    return state.sync.failed


@runs_eagerly
def zero_grad(model: nn.Module, *, set_to_none: bool = True) -> None:
    """Clear all gradients, including unreduced ones. Local operation.

    ``model.zero_grad()`` does the same. ``optimizer.zero_grad()``, ``zero_grad()`` of a submodule, and ``.grad =
    None`` clear the gradients of their parameters. After an exception between microbatches they are not always
    sufficient. With ``set_to_none=False`` reduced gradients are filled with zeros.

    Raises:
        OrderError: The call is made during backward.
    """
    require_flags("zero_grad", set_to_none=set_to_none)
    state = require_sharded_model(model, "zero_grad")
    refuse_in_backward("zero_grad")
    # FSDP2 may still have gradients of a failed backward, which the next one would reduce.
    recover_from_exception(state)
    # A reduction that ends later would write to ``.grad`` after it was cleared.
    wait_for_reductions(state)
    drop_unreduced_gradients(state)
    for settle in state.components.settle:
        settle()  # clears the flag of another rank's abandoned reduction
    parameters = state.parameters().values()
    for parameter in parameters:
        # TE's FusedAdam may read this attribute in place of ``.grad``.
        if getattr(parameter, "decoupled_grad", None) is not None:
            parameter.decoupled_grad = None  # type: ignore[attr-defined]
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach().zero_()  # a view of a bucket cannot be detached in place
    state.sync.failed = state.sync.dropped = False
    for zero in state.components.zero_grad:
        zero(parameters)


class ZeroGrad:
    """Replacement for ``zero_grad`` of one model. It also clears the state of a failed backward and of HFSDP.

    The markers of :mod:`te_fsdp.features.unreduced_gradients` detect all other ways to clear ``.grad``.
    """

    def __init__(self, state: ShardedModel) -> None:
        # Weak, because the model owns this object.
        self._state = weakref.ref(state)
        functools.update_wrapper(self, type(state.model).zero_grad)

    @runs_eagerly
    def __call__(self, set_to_none: bool = True) -> None:
        """Clear all gradients of the model, and data derived from them. Local operation."""
        state = self._state()
        assert state is not None  # owned by the model, which is alive during its own method
        # In backward only the module's own method runs, as without te_fsdp.
        if not in_backward():
            zero_grad(state.model, set_to_none=set_to_none)
        type(state.model).zero_grad(state.model, set_to_none)  # may be the user's override


def drop_unreduced_gradients(state: ShardedModel) -> None:
    """Drop all unreduced gradients. Local operation."""
    for unit in state.modules.values():
        _fsdp2_gradients.drop_unreduced_gradients(unit)
    for drop in state.components.drop_unreduced:
        drop()
    state.sync.waiting = state.sync.mode is not SyncMode.LAST


def microbatch(model: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context for one microbatch's forward and backward; ``is_last``: whether the optimizer's step follows.

    In all but the last microbatch, gradients are reduced only if the strategy shards gradients (``optim_grads`` and
    ``optim_grads_params``), and not over ``dp_replicate``. Weights stay unsharded if the strategy keeps them (all
    strategies except ``optim_grads_params``). So before the last microbatch, ``model.parameters()`` may return
    unsharded parameters, and ``.grad`` is incomplete: clip, scale and read gradients after it. In the last one HFSDP
    (``outer_strategy="optim"``) starts to average gradients over ``dp_replicate`` during backward, if the last one of
    the first step was also marked. Local operation. ``is_last`` is the same on all ranks, also on ranks without data.
    """
    require_flags("microbatch", is_last=is_last)
    mode = SyncMode.LAST if is_last else SyncMode.ACCUMULATE
    return _in_sync_mode(model, mode, "microbatch", last=is_last)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which backward reduces no gradients: they accumulate unsharded on each rank.

    It saves communication and needs memory for one unsharded gradient per parameter. The first backward outside of the
    context (or :func:`start_grad_reduce`) reduces the accumulated gradients.
    """
    return _in_sync_mode(model, SyncMode.NO_SYNC, "no_sync")


def sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context in which each backward reduces all gradients and reshards weights, as in a plain loop."""
    return _in_sync_mode(model, SyncMode.LAST, "sync")


def set_auto_sync(model: nn.Module, enabled: bool) -> None:
    """Set whether each backward counts as the last one of its step (the default), until the next call.

    With ``enabled=False`` each backward counts as a microbatch with ``is_last=False`` (see :func:`microbatch`). Enable
    it again before the last one, or reduce with :func:`start_grad_reduce`. Inside a context of this module the setting
    lasts until the context ends. Local operation; call it with the same argument on all ranks.
    """
    require_flags("set_auto_sync", enabled=enabled)
    set_sync_mode(
        require_sharded_model(model, "set_auto_sync"), SyncMode.LAST if enabled else SyncMode.ACCUMULATE
    )


@contextlib.contextmanager
def _in_sync_mode(model: nn.Module, mode: SyncMode, where: str, *, last: bool = False) -> Iterator[None]:
    """Set the mode in the context, and restore the previous one at its end. Local operation."""
    state = require_sharded_model(model, where)
    # Contexts nest: the end of an inner one returns to the mode of the outer one.
    before = state.sync.mode, state.sync.last_microbatch
    state.sync.last_microbatches += last
    set_sync_mode(state, mode, last_microbatch=last)
    try:
        yield
    finally:
        set_sync_mode(state, before[0], last_microbatch=before[1])


def set_sync_mode(state: ShardedModel, mode: SyncMode, *, last_microbatch: bool = False) -> None:
    """Set how FSDP2, and the reduction of replicated parameters, treat the next backwards. Local operation.

    ``last_microbatch``: the optimizer's step follows. With ``SyncMode.LAST`` alone, more backwards may follow.
    """
    state.sync.last_microbatch = last_microbatch
    if mode is state.sync.mode:
        return
    state.sync.mode = mode
    last = mode is SyncMode.LAST
    state.sync.unfinished |= not last
    state.sync.waiting |= not last
    if not last:
        state.sync.completed = False
    for name, unit in state.modules.items():
        row = state.units[name]
        fsdp: Any = unit
        # The class's methods, because checks watch the user's calls of the unit's own.
        FSDPModule.set_requires_gradient_sync(fsdp, row.reduces(mode), recurse=False)
        # HSDP reduces over dp_replicate once per step. set_requires_gradient_sync has set this one too.
        FSDPModule.set_requires_all_reduce(fsdp, last, recurse=False)
        FSDPModule.set_reshard_after_backward(fsdp, row.releases(mode), recurse=False)
        # ``set_is_last_backward`` stays at its default: each backward ends by waiting for its reductions, so that
        # kernels that read, clear or scale ``.grad`` between microbatches come after them.
    for set_gradient_sync in state.components.set_gradient_sync:
        set_gradient_sync(last)
