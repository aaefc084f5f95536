"""When gradients are reduced and weights gathered, by hand too; what loops do with all gradients: wait, scale, forget.

A gradient is complete when ``.grad`` of the sharded parameter holds the mean over all ranks and microbatches so far.
Until then FSDP2 (or ``no_shard_reduce``) holds what waits apart from ``.grad``.

Loops that can tell say which microbatch is the last one:

    plain loop      each backward counts as the last one of its step: right for every strategy
    microbatch      is_last=False: others follow; costs the least that the strategy can do
    no_sync, sync   no reduction at all, reduction in each backward, whatever the strategy
    start_grad_reduce, start_param_gather: reduce and gather at places of one's own

Contexts put back what was set before them, also when they end by an exception. ``model`` is always the one that
:func:`te_fsdp.fully_shard` was called on; any other raises :class:`OrderError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import OrderError, PlacementError, require_flags
from te_fsdp.layout import SyncMode
from te_fsdp.sharded_model import (
    ShardedModel,
    expose_unsharded_params,
    get_sharded_model,
    record_unsharded_params,
    recover_from_exception,
    refuse_in_backward,
    require_sharded_model,
    versions_of,
)
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_state as _fsdp2,
    fsdp2_units,
)

if TYPE_CHECKING:
    from torch import nn


def start_grad_reduce(model: nn.Module) -> None:
    """Start the reduction of all gradients that wait for it, outside of backward.

    For loops that reduce at a place of their own: run all backwards in :func:`no_sync`, or with
    :func:`set_auto_sync` off. Gradients are complete after :func:`finish_grad_reduce`. Does nothing where nothing
    waits. FSDP2 has no public call for it: uses its private one, on each supported torch version.

    Collective over data parallel: a reduce-scatter for each unit (and an all-reduce with HSDP), one all-reduce per
    dtype for ``no_shard`` parameters. Call it on all ranks.

    Raises:
        OrderError: A call from inside of backward; gradients of a failed backward.
    """
    state = require_sharded_model(model, "start_grad_reduce")
    refuse_in_backward("start_grad_reduce")
    raise_if_backward_failed(state, "start_grad_reduce")
    if not state.pending():
        return
    for root in state.roots():
        _fsdp2.reduce_outside_backward(root)
    for reduce in state.components.reduce_gradients:
        reduce()
    state.sync.unfinished = True


def finish_grad_reduce(model: nn.Module) -> None:
    """Complete all gradients: starts what :func:`start_grad_reduce` has not started, and waits on the device.

    Collective over data parallel if gradients wait for their reduction. Weights that were kept stay gathered until the
    optimizer's step.

    With HFSDP (``outer_strategy="optim"``) gradients are averaged over ``dp_replicate`` by the optimizer's step, each
    rank getting the rows that it updates; ``.grad`` refuses to be read.

    Raises:
        OrderError: As :func:`start_grad_reduce`.
    """
    start_grad_reduce(model)
    wait_for_reductions(require_sharded_model(model, "finish_grad_reduce"))


def wait_for_reductions(state: ShardedModel) -> None:
    """Let the current stream wait for all reductions under way; costs nothing if none is. Local operation."""
    if state.sync.unfinished:
        for root in state.roots():
            _fsdp2.wait_for_reductions(root)
        state.sync.unfinished = state.sync.mode is not SyncMode.LAST


def require_reduced(state: ShardedModel, where: str, only: Iterable[torch.Tensor] | None = None) -> None:
    """Wait for reductions under way; :class:`OrderError` if a gradient, or one of ``only``, still waits. Local."""
    wait_for_reductions(state)
    raise_if_backward_failed(state, where)
    pending = state.pending()
    if not pending:
        state.sync.waiting = state.sync.mode is not SyncMode.LAST
    if pending and only is not None:
        pending = {key: pending[key] for key in map(id, only) if key in pending}
    if pending:
        raise OrderError(
            f"{where}: gradients of {len(pending)} parameter(s) were not reduced, such as "
            f"{next(iter(pending.values()))}",
            expected="a last backward that reduces what has added up",
            got="backwards in te_fsdp.no_sync, or microbatches with is_last=False, alone",
            why="Each rank has the gradient of its own microbatches only",
            fix="run the last backward with is_last=True or outside of the context, or call "
            "te_fsdp.finish_grad_reduce(model)",
        )


def refuse_pending_gradients(model: nn.Module) -> None:
    """Raise OrderError between two microbatches of a step: a save would leave their gradients out. Local operation.

    These are gradients that wait for their reduction, of units of torch's own ``fully_shard`` as well. Strategies that
    reduce in each microbatch have them in ``.grad``.
    """
    pending: dict[int, str] = {}
    units: set[nn.Module] = set()
    for state in filter(None, map(get_sharded_model, model.modules())):
        pending |= state.pending()
        # In other modes a step may have used the values of .grad already.
        if state.sync.waiting and state.sync.mode is SyncMode.LAST:
            pending |= {id(p): name for name, p in state.parameters().items() if p.grad is not None}
        units.update(state.modules.values())
    plain = [
        module for module in model.modules() if fsdp2_units.is_fsdp_module(module) and module not in units
    ]
    records = [
        _fsdp2.sharded_param_of(record)
        for unit in plain
        for record in _fsdp2_gradients.params_with_unreduced_gradients(unit)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()} if records else {}
    pending |= {id(p): names.get(id(p)) or f"one of shape {tuple(p.shape)}" for p in records}
    if not pending:
        return
    raise OrderError(
        f"checkpoint.save: {len(pending)} parameter(s) have gradients of a step that is not complete, such as "
        f"{next(iter(pending.values()))}",
        expected="a call between two steps",
        got="a call after a microbatch that was not the last one, before optimizer.step()",
        why="A checkpoint holds no gradients: a resumed run would lack these microbatches",
        fix="save after optimizer.step(), or discard the microbatches first (te_fsdp.zero_grad(model))",
    )


def raise_if_backward_failed(state: ShardedModel, where: str) -> None:
    """:class:`OrderError` if a backward or a step has failed since gradients were last cleared, here or elsewhere."""
    for settle in state.components.settle:
        state.sync.failed |= settle()
    if state.sync.dropped and all(p.grad is None for p in state.parameters().values()):
        state.sync.dropped = False  # there is nothing that could lack what was dropped
    if not has_failed_backward(state):
        return
    raise OrderError(
        f"{where}: a backward or a step has raised since gradients were cleared, here or on another rank",
        expected="gradients of whole microbatches",
        got="those of some units with the failed microbatch and those of others without, or those of another step",
        fix="call te_fsdp.zero_grad(model) and run all microbatches of the step again",
    )


def has_failed_backward(state: ShardedModel) -> bool:
    """Whether there are gradients of a backward or a step that has failed; not after they were cleared."""
    if (
        state.sync.failed
        and not state.sync.dropped
        and all(p.grad is None for p in state.parameters().values())
    ):
        state.sync.failed = False
    return state.sync.failed


def zero_grad(model: nn.Module, *, set_to_none: bool = True) -> None:
    """Clear all gradients, including unreduced ones. Local operation.

    ``model.zero_grad()`` does the same. ``optimizer.zero_grad()``, ``zero_grad()`` of another module, and ``.grad =
    None`` clear the gradients of their parameters. They do not always suffice after an exception between microbatches.
    Without ``set_to_none`` reduced gradients are filled with zeros. Inside backward it raises :class:`OrderError`.
    """
    require_flags("zero_grad", set_to_none=set_to_none)
    state = require_sharded_model(model, "zero_grad")
    refuse_in_backward("zero_grad")
    recover_from_exception(state)
    wait_for_reductions(state)
    drop_unreduced_gradients(state)
    for settle in state.components.settle:
        settle()  # clears the flag of another rank's abandoned reduction
    parameters = state.parameters().values()
    for parameter in parameters:
        if getattr(parameter, "decoupled_grad", None) is not None:
            parameter.decoupled_grad = None  # type: ignore[attr-defined]
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach().zero_()  # a view of a bucket cannot be detached in place
    state.sync.failed = state.sync.dropped = False
    for zero in state.components.zero_grad:
        zero(parameters)


def drop_unreduced_gradients(state: ShardedModel) -> None:
    """Drop all unreduced gradients. Local operation."""
    for unit in state.modules.values():
        _fsdp2_gradients.drop_unreduced_gradients(unit)
    for drop in state.components.drop_unreduced:
        drop()
    state.sync.waiting = state.sync.mode is not SyncMode.LAST


def microbatch(model: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Context of one microbatch's forward and backward: whether it is the last one before the optimizer step.

    In all but the last one, gradients are reduced only where the strategy cuts gradients (``optim_grads`` and
    ``optim_grads_params``), and not over ``dp_replicate``; weights stay gathered where it keeps them (all strategies
    but ``optim_grads_params``). Until the last one, ``model.parameters()`` may then be the gathered parameters, and
    ``.grad`` incomplete: clip, scale and read gradients after it. In the last one HFSDP (``outer_strategy="optim"``)
    begins to average gradients over ``dp_replicate`` while backward runs, if that of the first step was told as well.
    Local operation; ``is_last`` is the same on all ranks, also on those that have no data for it.
    """
    require_flags("microbatch", is_last=is_last)
    mode = SyncMode.LAST if is_last else SyncMode.ACCUMULATE
    return _in_sync_mode(model, mode, "microbatch", last=is_last)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which backward reduces no gradients, whatever the strategy: they add up whole on each rank.

    Saves communication and costs memory: one whole gradient for each parameter. The first backward outside of it (or
    :func:`start_grad_reduce`) reduces what has added up. Otherwise as :func:`microbatch` with ``is_last=False``.
    """
    return _in_sync_mode(model, SyncMode.NO_SYNC, "no_sync")


def sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which each backward reduces all gradients and releases weights, as a plain loop's does."""
    return _in_sync_mode(model, SyncMode.LAST, "sync")


def set_auto_sync(model: nn.Module, enabled: bool) -> None:
    """Whether each backward counts as the last one of its step (the default), until this is called again.

    With ``enabled=False`` each backward counts as one that others follow, as in :func:`microbatch` with
    ``is_last=False``: enable it again before the last one, or reduce with :func:`start_grad_reduce`. Inside of a
    context of this module it holds until the context ends. Local operation, the same on all ranks.
    """
    require_flags("set_auto_sync", enabled=enabled)
    set_sync_mode(
        require_sharded_model(model, "set_auto_sync"), SyncMode.LAST if enabled else SyncMode.ACCUMULATE
    )


@contextlib.contextmanager
def _in_sync_mode(model: nn.Module, mode: SyncMode, where: str, *, last: bool = False) -> Iterator[None]:
    state = require_sharded_model(model, where)
    before = state.sync.mode, state.sync.last_microbatch
    state.sync.last_microbatches += last
    set_sync_mode(state, mode, last_microbatch=last)
    try:
        yield
    finally:
        set_sync_mode(state, before[0], last_microbatch=before[1])


def set_sync_mode(state: ShardedModel, mode: SyncMode, *, last_microbatch: bool = False) -> None:
    """Tell FSDP2, and the parameters that it does not manage, how the backwards to come count. Local operation.

    ``SyncMode.LAST`` alone does not say that no other one follows before the step, as ``last_microbatch`` does.
    """
    state.sync.last_microbatch = last_microbatch
    if mode is state.sync.mode:
        return
    state.sync.mode = mode
    last = mode is SyncMode.LAST
    state.sync.unfinished |= not last
    state.sync.waiting |= not last
    for name, unit in state.modules.items():
        row = state.units[name]
        fsdp: Any = unit
        fsdp.set_requires_gradient_sync(row.reduces(mode), recurse=False)
        fsdp.set_requires_all_reduce(last, recurse=False)  # the other one has set it too
        fsdp.set_reshard_after_backward(row.releases(mode), recurse=False)
        fsdp.set_is_last_backward(last)  # of the tree; each unit has its own before the first forward
    for set_gradient_sync in state.components.set_gradient_sync:
        set_gradient_sync(last)


def start_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Start to gather units ahead of their forward.

    ``units`` are names, ``""`` for the root's own; without any all, in the model's order. Forward waits by itself.
    Weights that were gathered and then changed are gathered anew only after :func:`release_params` or the optimizer's
    step. Collective over ``dp_shard``: an all-gather for each unit that is not gathered; call it on all ranks.

    Raises:
        OrderError: A call from inside of backward.
        PlacementError: A name that is no sharded unit's.
    """
    state = require_sharded_model(model, "start_param_gather")
    refuse_in_backward("start_param_gather")
    for name in _sharded_units(state, units, "start_param_gather"):
        unit: Any = state.modules[name]
        expose_unsharded_params(state, name, unit)
        if name not in state.unsharded.gathers and not _fsdp2.is_unit_unsharded(unit):
            state.unsharded.versions[name] = versions_of(unit)
            state.unsharded.gathers[name] = unit.unshard(async_op=True)


def finish_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Gather units now: waits for what :func:`start_param_gather` has started, and starts the rest.

    Takes and raises what :func:`start_param_gather` does.
    """
    start_param_gather(model, units)
    state = require_sharded_model(model, "finish_param_gather")
    for gather in state.unsharded.gathers.values():
        gather.wait()
    state.unsharded.gathers.clear()
    for _, unit in state.gathered():
        record_unsharded_params(unit)


def release_params(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Release gathered weights: the next forward gathers them as they are then. Local operation.

    Afterwards ``model.parameters()`` are the shards, with the values that the last step gave them. Takes and raises
    what :func:`start_param_gather` does.
    """
    state = require_sharded_model(model, "release_params")
    refuse_in_backward("release_params")
    for name in _sharded_units(state, units, "release_params"):
        unit: Any = state.modules[name]
        if name in state.unsharded.gathers:
            state.unsharded.gathers.pop(name).wait()
        unit.reshard()
        state.unsharded.versions.pop(name, None)


def _sharded_units(state: ShardedModel, units: Iterable[str] | None, where: str) -> list[str]:
    """Names of the units meant, outer before inner."""
    order = list(reversed(state.modules))
    wanted = set(order if units is None else [units] if isinstance(units, str) else units)
    unknown = sorted(wanted - set(order))
    if unknown:
        raise PlacementError(
            f"{where}: {unknown[0]!r} is no sharded unit",
            expected=f"names out of {order[:8]}",
            fix="name modules as model.named_modules() does; units of strategy no_shard are never gathered",
        )
    return [name for name in order if name in wanted]
