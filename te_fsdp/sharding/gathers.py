"""Gathers by hand: units gathered ahead of their forward, and released; methods besides ``forward`` that gather."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import register_fsdp_forward_method

from te_fsdp import _fsdp2, _torch
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.parameters import is_exempt, places_of
from te_fsdp.sharding.state import (
    ShardingState,
    mark_gathered,
    refuse_in_backward,
    required_state,
    sharding_state,
    versions_of,
)
from te_fsdp.sharding.steps import watch_method

if TYPE_CHECKING:
    from torch import nn

__all__ = ["finish_param_gather", "register_forward_method", "release_params", "start_param_gather"]


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
    """Whether all parameters in a module are exempt from sharding, and there are some."""
    own = [is_exempt(place.owner, place.name) for place in places_of(module)]
    return bool(own) and all(own)
