"""Which microbatch is the last one: when gradients are reduced and weights gathered, for loops that can tell.

    plain loop      each backward counts as the last one of its step: right for every strategy
    microbatch      is_last=False: others follow; costs the least that the strategy can do
    no_sync, sync   no reduction at all, reduction in each backward, whatever the strategy
    reductions, gathers (modules beside this one): reduce and gather at places of one's own

Contexts put back what was set before them, also when they end by an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from te_fsdp.layout.storage import Pace
from te_fsdp.sharding.state import ShardingState, required_state

if TYPE_CHECKING:
    from torch import nn

__all__ = ["microbatch", "no_sync", "set_auto_sync", "set_pace", "sync"]


def microbatch(model: nn.Module, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Context of one microbatch's forward and backward: whether it is the last one before the optimizer step.

    In all but the last one, gradients are reduced only where the strategy cuts gradients (``optim_grads`` and
    ``optim_grads_params``), and not over ``dp_replicate``; weights stay gathered where it keeps them (all strategies
    but ``optim_grads_params``). Until the last one, ``model.parameters()`` may then be the gathered parameters, and
    ``.grad`` incomplete: clip, scale and read gradients after it. In the last one HFSDP (``outer_strategy="optim"``)
    begins to average gradients over ``dp_replicate`` while backward runs. Local operation.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        is_last: The same on all ranks, also on those that have no data for it.

    Raises:
        OrderError: A model without sharding state.
    """
    return _paced(model, Pace.LAST if is_last else Pace.MORE, "microbatch", told_last=is_last)


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which backward reduces no gradients, whatever the strategy: they add up whole on each rank.

    Saves communication and costs memory: one whole gradient for each parameter. The first backward outside of it (or
    :func:`start_grad_reduce`) reduces what has added up. Otherwise as :func:`microbatch` with ``is_last=False``.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.

    Raises:
        OrderError: A model without sharding state.
    """
    return _paced(model, Pace.LOCAL, "no_sync")


def sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Context in which each backward reduces all gradients and releases weights, as a plain loop's does.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.

    Raises:
        OrderError: A model without sharding state.
    """
    return _paced(model, Pace.LAST, "sync")


def set_auto_sync(model: nn.Module, enabled: bool) -> None:
    """Whether each backward counts as the last one of its step (the default), until this is called again.

    With ``enabled=False`` each backward counts as one that others follow, as in :func:`microbatch` with
    ``is_last=False``: enable it again before the last one, or reduce with :func:`start_grad_reduce`. Inside of a
    context of this module it holds until the context ends. Local operation.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        enabled: The same on all ranks.

    Raises:
        OrderError: A model without sharding state.
    """
    set_pace(required_state(model, "set_auto_sync"), Pace.LAST if enabled else Pace.MORE)


@contextlib.contextmanager
def _paced(model: nn.Module, pace: Pace, where: str, *, told_last: bool = False) -> Iterator[None]:
    state = required_state(model, where)
    before = state.pace, state.told_last
    state.told += told_last
    set_pace(state, pace, told_last=told_last)
    try:
        yield
    finally:
        set_pace(state, before[0], told_last=before[1])


def set_pace(state: ShardingState, pace: Pace, *, told_last: bool = False) -> None:
    """Tell FSDP2, and the parameters that it does not manage, how the backwards to come count. Local operation.

    Args:
        state: The model's state.
        pace: How they count.
        told_last: Whether no other one follows before the step, which ``Pace.LAST`` alone does not say.
    """
    state.told_last = told_last
    if pace is state.pace:
        return
    state.pace = pace
    last = pace is Pace.LAST
    state.unfinished |= not last
    for name, unit in state.modules.items():
        row = state.units[name]
        fsdp: Any = unit
        fsdp.set_requires_gradient_sync(row.reduces(pace), recurse=False)
        fsdp.set_requires_all_reduce(last, recurse=False)  # the other one has set it too
        fsdp.set_reshard_after_backward(row.releases(pace), recurse=False)
        fsdp.set_is_last_backward(last)  # of the tree; each unit has its own before the first forward
    if state.replicated is not None:
        state.replicated.set_gradient_sync(last)
