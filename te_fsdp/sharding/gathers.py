"""Gathers by hand: units gathered ahead of their forward, and released."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from te_fsdp import _fsdp2
from te_fsdp.errors import PlacementError
from te_fsdp.sharding.state import (
    ShardingState,
    mark_gathered,
    refuse_in_backward,
    required_state,
    versions_of,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["finish_param_gather", "release_params", "start_param_gather"]


def start_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Start to gather units ahead of their forward.

    Forward waits for them by itself. Weights that were gathered and then changed are gathered anew only after
    :func:`release_params` or the optimizer's step.

    Collective over ``dp_shard``: an all-gather for each unit that is not gathered; call it on all ranks.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        units: Names of units, ``""`` for the root's own; ``None``: all, in the order of the model.

    Raises:
        OrderError: A model without sharding state; a call from inside of backward.
        PlacementError: A name that is no sharded unit's.
    """
    state = required_state(model, "start_param_gather")
    refuse_in_backward("start_param_gather")
    state.pending_gathers.wait()
    for name in _sharded_units(state, units, "start_param_gather"):
        unit: Any = state.modules[name]
        if name not in state.gathers and not _fsdp2.is_gathered(unit):
            state.versions[name] = versions_of(unit)
            state.gathers[name] = unit.unshard(async_op=True)


def finish_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Gather units now: waits for what :func:`start_param_gather` has started, and starts the rest.

    Like the other two it also waits for new weights on their way (``shard_optimizer(..., overlap_gather=True)``).

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        units: As for :func:`start_param_gather`.

    Raises:
        OrderError, PlacementError: As :func:`start_param_gather`.
    """
    start_param_gather(model, units)
    state = required_state(model, "finish_param_gather")
    for gather in state.gathers.values():
        gather.wait()
    state.gathers.clear()
    for _, unit in state.gathered():
        mark_gathered(unit)


def release_params(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Release gathered weights: the next forward gathers them as they are then. Local operation.

    Afterwards ``model.parameters()`` are the shards, with the values that the last step gave them.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        units: As for :func:`start_param_gather`.

    Raises:
        OrderError, PlacementError: As :func:`start_param_gather`.
    """
    state = required_state(model, "release_params")
    refuse_in_backward("release_params")
    state.pending_gathers.wait()
    for name in _sharded_units(state, units, "release_params"):
        unit: Any = state.modules[name]
        if name in state.gathers:
            state.gathers.pop(name).wait()
        unit.reshard()
        state.versions.pop(name, None)


def _sharded_units(state: ShardingState, units: Iterable[str] | None, where: str) -> list[str]:
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
