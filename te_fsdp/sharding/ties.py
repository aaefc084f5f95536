"""Tied parameters: all owners must be gathered together.

FSDP2 cuts a parameter for the unit that owns it. Owned by two units it is cut twice: torch 2.11 then trains two
parameters in silence, and torch 2.13 raises in the first forward, when the optimizer is built already.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from te_fsdp.errors import PlacementError
from te_fsdp.parameters import places_of

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.quantized.shards import Key

__all__ = ["check_ties", "unit_by_module"]


def check_ties(model: nn.Module, units: Collection[str], exempt: Collection[Key] = ()) -> None:
    """Raise if a parameter belongs to several units. Local operation; the same on all ranks of one model.

    Args:
        model: The root.
        units: Names of the units, ``""`` for the root.
        exempt: Parameters that no unit gathers, by owner's id and name.

    Raises:
        PlacementError: Names the parameter's owners and their units.
    """
    owners: dict[int, dict[str, str]] = {}
    inside = unit_by_module(model, units)
    for place in places_of(model, remove_duplicate=False):
        if (id(place.owner), place.name) not in exempt:
            owners.setdefault(id(place.parameter), {})[place.label] = inside[place.path]
    for places in owners.values():
        if len(set(places.values())) > 1:
            raise PlacementError(
                f"{', '.join(places)}: one parameter in several units",
                expected="all owners of a tied parameter in one unit",
                got=", ".join(f"{label} in {unit or 'the root'}" for label, unit in places.items()),
                why="FSDP2 would cut it once for each, and train them apart",
                fix="make no unit of these owners, so that the root gathers it, or one unit of a module that "
                "contains them all, or exempt it: te_fsdp.fsdp_no_shard(parameter)",
            )


def unit_by_module(model: nn.Module, units: Collection[str]) -> dict[str, str]:
    """The innermost unit around each module, by name; a module of several names has them all. Local operation.

    Args:
        model: The root.
        units: Names of the units; the root is one in any case.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    named = {id(modules[name]): name for name in units}
    inside: dict[str, str] = {}
    for name, module in modules.items():  # parents come before their children
        inside[name] = named.get(id(module), inside[name.rpartition(".")[0]] if name else "")
    return inside
