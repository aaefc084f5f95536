"""Explicit all-gathers of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from te_fsdp.errors import PlacementError, require_kind, shorten
from te_fsdp.kept_weights import apply_frozen, expose_unsharded_params
from te_fsdp.sharded_model import (
    ShardedModel,
    record_unsharded_params,
    refuse_in_backward,
    require_sharded_model,
)
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch
from te_fsdp.upstream.torch_mixed_lists import foreach_writes


@_torch.runs_eagerly
def start_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Start to all-gather units before their forward.

    Forward waits for them. Weights that were all-gathered and then changed are gathered again only after
    :func:`release_params` or the optimizer's step. Collective over ``dp_shard``: one all-gather per unit that is not
    unsharded. Call it on all ranks.

    Args:
        model: The sharded model.
        units: Names of units, ``""`` for the root's direct parameters. ``None``: all units, in the model's order.

    Raises:
        OrderError: The call is made during backward.
        PlacementError: A name does not belong to a sharded unit.
    """
    state = require_sharded_model(model, "start_param_gather")
    refuse_in_backward("start_param_gather")
    for name in sharded_units(state, units, "start_param_gather"):
        unit: Any = state.modules[name]
        # A unit whose shards are exposed still has its weights. This frees them if they are stale.
        expose_unsharded_params(state, name, unit)
        if name not in state.unsharded.gathers and not _fsdp2.is_unit_unsharded(unit):
            foreach_writes().count(state)
            state.unsharded.gathers[name] = unit.unshard(async_op=True)


@_torch.runs_eagerly
def finish_param_gather(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """All-gather units: wait for started all-gathers, and start the remaining ones.

    Arguments and errors are those of :func:`start_param_gather`.
    """
    start_param_gather(model, units)
    state = require_sharded_model(model, "finish_param_gather")
    for gather in state.unsharded.gathers.values():
        gather.wait()
    state.unsharded.gathers.clear()
    for _, unit in state.gathered():
        record_unsharded_params(unit)


@_torch.runs_eagerly
def release_params(model: nn.Module, units: Iterable[str] | None = None) -> None:
    """Free unsharded weights; the next forward all-gathers the weights of that time. Local operation.

    Afterwards ``model.parameters()`` returns shards with the values of the last step. Arguments and errors are those
    of :func:`start_param_gather`.
    """
    state = require_sharded_model(model, "release_params")
    refuse_in_backward("release_params")
    for name in sharded_units(state, units, "release_params"):
        unit: Any = state.modules[name]
        if name in state.unsharded.gathers:
            # The all-gather still writes to the memory that `reshard` frees.
            state.unsharded.gathers.pop(name).wait()
        apply_frozen(state, name)
        state.unsharded.kept.pop(name, None)
        unit.reshard()
        state.unsharded.versions.pop(name, None)


def sharded_units(state: ShardedModel, units: Iterable[str] | None, where: str) -> list[str]:
    """Return the names of the selected units, outer before inner; raise PlacementError for other names."""
    # `state.modules` has inner units first.
    order = list(reversed(state.modules))
    require_kind(where, "units", () if units is None else units, Iterable, expected="names of units, or None")
    selected = set(order if units is None else [units] if isinstance(units, str) else units)
    unknown = sorted(selected - set(order))
    if unknown:
        raise PlacementError(
            f"{where}: {unknown[0]!r} is not a sharded unit",
            expected=f"names of FSDP2 units: {shorten(order, 8)}",
            got='a unit with strategy="no_shard"' if unknown[0] in state.units else None,
            fix="pass names of units, as in te_fsdp.report(model), or omit units for all of them",
        )
    return [name for name in order if name in selected]
