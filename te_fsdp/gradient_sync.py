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
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import OrderError, PlacementError, require_flags, require_number
from te_fsdp.features.hfsdp.gradients import OuterAverages, averages_of
from te_fsdp.layout import SyncMode
from te_fsdp.lifecycle import gradients_of
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
    torch_dtensor as _torch,
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
    if state.replicated is not None and state.replicated.pending:
        state.replicated.reduce()
    state.unfinished = True


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


def _averages(state: ShardedModel) -> list[OuterAverages]:
    """Those of the optimizers that keep their state in rows; asked for only where there may be some."""
    if state.outer != "optim" and state.outer_optimizer is None:
        return []
    return averages_of(state.parameters().values())


def wait_for_reductions(state: ShardedModel) -> None:
    """Let the current stream wait for all reductions under way; costs nothing if none is. Local operation."""
    if state.unfinished:
        for root in state.roots():
            _fsdp2.wait_for_reductions(root)
        state.unfinished = state.sync_mode is not SyncMode.LAST


def require_reduced(state: ShardedModel, where: str, only: Iterable[torch.Tensor] | None = None) -> None:
    """Wait for reductions under way; :class:`OrderError` if a gradient, or one of ``only``, still waits. Local."""
    wait_for_reductions(state)
    raise_if_backward_failed(state, where)
    pending = state.pending()
    if not pending:
        state.waiting = state.sync_mode is not SyncMode.LAST
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
        if state.waiting and state.sync_mode is SyncMode.LAST:  # else a step may have taken what is in .grad
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
    if state.replicated is not None and state.replicated.settle():
        state.failed = True
    if state.dropped and all(p.grad is None for p in state.parameters().values()):
        state.dropped = False  # there is nothing that could lack what was dropped
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
    if state.failed and not state.dropped and all(p.grad is None for p in state.parameters().values()):
        state.failed = False
    return state.failed


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
    if state.replicated is not None:
        state.replicated.settle()  # what another rank has given up is forgotten as well
    parameters = state.parameters().values()
    for averages in _averages(state):
        averages.forget(parameters)
    for parameter in parameters:
        if getattr(parameter, "decoupled_grad", None) is not None:
            parameter.decoupled_grad = None  # type: ignore[attr-defined]
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.detach().zero_()  # a view of a bucket cannot be detached in place
    state.failed = state.dropped = False
    if state.nan_report is not None:
        state.nan_report.forget()


def drop_unreduced_gradients(state: ShardedModel) -> None:
    """Drop all unreduced gradients. Local operation."""
    for unit in state.modules.values():
        _fsdp2_gradients.drop_unreduced_gradients(unit)
    if state.replicated is not None:
        state.replicated.forget_unreduced()
    state.unreduced.unmark_all()
    state.waiting = state.sync_mode is not SyncMode.LAST


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float | torch.Tensor) -> None:
    """Multiply all gradients in place, for example by the inverse of a number of tokens, the same on all ranks.

    Local operation; but with HFSDP, after a backward that :func:`te_fsdp.microbatch` has marked as the last one, it
    completes the averages over ``dp_replicate``, as :func:`te_fsdp.clip_grad_norm_` does, and works on these. A factor
    that is a tensor has one element.

    Raises:
        OrderError: Gradients that wait for their reduction, or that have changed since they were averaged.
    """
    state = require_sharded_model(model, "scale_gradients")
    if not isinstance(factor, torch.Tensor):
        require_number("scale_gradients", "factor", factor, least=-math.inf, fix="factor=1 / tokens")
    require_reduced(state, "scale_gradients")
    number = torch.as_tensor(factor, dtype=torch.float32).reshape(())
    averaging = _averages(state)
    for averages in averaging:
        averages.finish()
    # Averages in the places of the gradients that they are of: what a step now would use.
    rows = {key: average for averages in averaging for key, average in averages.made.items()}
    own = [gradient for gradient in gradients_of(state.parameters().values()) if gradient is not None]
    _torch.multiply_all_(
        _torch.local_tensors_of(rows.get(id(gradient), gradient) for gradient in own), number
    )
    for averages in averaging:
        averages.multiplied(number)


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
    before = state.sync_mode, state.last_microbatch
    state.last_microbatches += last
    set_sync_mode(state, mode, last_microbatch=last)
    try:
        yield
    finally:
        set_sync_mode(state, before[0], last_microbatch=before[1])


def set_sync_mode(state: ShardedModel, mode: SyncMode, *, last_microbatch: bool = False) -> None:
    """Tell FSDP2, and the parameters that it does not manage, how the backwards to come count. Local operation.

    ``SyncMode.LAST`` alone does not say that no other one follows before the step, as ``last_microbatch`` does.
    """
    state.last_microbatch = last_microbatch
    if mode is state.sync_mode:
        return
    state.sync_mode = mode
    last = mode is SyncMode.LAST
    state.unfinished |= not last
    state.waiting |= not last
    for name, unit in state.modules.items():
        row = state.units[name]
        fsdp: Any = unit
        fsdp.set_requires_gradient_sync(row.reduces(mode), recurse=False)
        fsdp.set_requires_all_reduce(last, recurse=False)  # the other one has set it too
        fsdp.set_reshard_after_backward(row.releases(mode), recurse=False)
        fsdp.set_is_last_backward(last)  # of the tree; each unit has its own before the first forward
    if state.replicated is not None:
        state.replicated.set_gradient_sync(last)


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
        if name not in state.gathers and not _fsdp2.is_unit_unsharded(unit):
            state.versions[name] = versions_of(unit)
            state.gathers[name] = unit.unshard(async_op=True)


def finish_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Gather units now: waits for what :func:`start_param_gather` has started, and starts the rest.

    Takes and raises what :func:`start_param_gather` does.
    """
    start_param_gather(model, units)
    state = require_sharded_model(model, "finish_param_gather")
    for gather in state.gathers.values():
        gather.wait()
    state.gathers.clear()
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
        if name in state.gathers:
            state.gathers.pop(name).wait()
        unit.reshard()
        state.versions.pop(name, None)


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
