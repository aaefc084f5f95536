"""``register_forward_method``: methods other than ``forward`` that need gathered weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.fsdp import register_fsdp_forward_method

from te_fsdp import _torch
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.parameters import is_exempt, places_of
from te_fsdp.sharding.state import sharding_state
from te_fsdp.sharding.steps import watch_method

if TYPE_CHECKING:
    from torch import nn

__all__ = ["register_forward_method"]


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
