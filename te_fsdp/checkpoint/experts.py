"""Weights of grouped layers: one tensor of the files for all experts, however a module holds them.

TE's ``GroupedLinear`` has a parameter per expert, or a single one for all. The files have one tensor with a leading
expert dim, under global indices:

    weight0 (out, in), weight1, ...    or    weight (experts, out, in)    ->    weight (experts, out, in)
    bias0 (out), bias1, ...            or    bias (experts, out)          ->    bias (experts, out)

What belongs to one expert (a scale, an optimizer's step) gets the same leading dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_fsdp import _te
from te_fsdp.binding import binding_of
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.errors import CheckpointError, message
from te_fsdp.layout.experts import expert_index

if TYPE_CHECKING:
    from torch import nn

__all__ = ["GROUPED", "ExpertPlace", "join_experts", "own_experts", "per_expert", "place_of", "stacked_name"]

#: Layout of a grouped tensor in the manifest.
GROUPED = "grouped"


@dataclass(frozen=True)
class ExpertPlace:
    """Where one expert's own parameter lies in the tensor of all.

    Attributes:
        index: Global index.
        total: Number of experts.
    """

    index: int
    total: int

    def lift(self, entry: Entry) -> Entry:
        """An entry of the expert's own tensor as one of the tensor of all; views of the same memory."""
        pieces = tuple(Piece((self.index, *p.offsets), p.tensor.unsqueeze(0)) for p in entry.pieces)
        return Entry((self.total, *entry.shape), entry.dtype, pieces)


def own_experts(module: nn.Module) -> tuple[int, int, int] | None:
    """First expert, their number and that of all experts of a ``GroupedLinear``; ``None`` for other modules."""
    if _te.kind_of(module) != "GroupedLinear":
        return None
    binding = binding_of(module)
    experts = binding.experts if binding is not None else None
    if experts is not None:
        return experts.first, experts.count, experts.total
    return 0, int(module.num_gemms), int(module.num_gemms)  # type: ignore[arg-type]


def place_of(module: nn.Module, name: str) -> ExpertPlace | None:
    """Where a module's own parameter lies in a grouped tensor; ``None`` for one that is a tensor of its own.

    Args:
        module: The owner.
        name: The registered name: under expert parallelism it has the global index.
    """
    index = expert_index(name)
    experts = own_experts(module) if index is not None else None
    if experts is None or index is None:
        return None
    first, count, total = experts
    if not first <= index < first + count:
        raise CheckpointError(
            message(
                f"{type(module).__name__}.{name}",
                expected=f"experts {first} to {first + count - 1} of {total}",
                got=f"expert {index}",
                fix="do not register parameters of experts by hand",
            )
        )
    return ExpertPlace(index, total)


def stacked_name(name: str) -> str:
    """``"experts.weight"`` of ``"experts.weight3"``."""
    return name.rstrip("0123456789")


def per_expert(described: dict[str, Any], place: ExpertPlace | None) -> dict[str, Any] | None:
    """A saved state's description for one parameter.

    Args:
        described: The manifest's. ``experts`` lists those that have the state, where each expert has its own, and
            ``scalar`` tells whether it is one number for each.
        place: Of the parameter; ``None``: it holds all experts, or the tensor is no grouped one.

    Returns:
        With the shape of the parameter's own state, and ``at``, its place in the files' tensor (``None``: it is that
        tensor). A parameter for all experts takes the number of the first. ``None``: this expert has no such state.
    """
    experts, shape = described.get("experts"), described.get("shape", [])
    if place is not None and experts is not None and place.index not in experts:
        return None
    if "dtype" not in described:
        return described
    if place is None:
        is_number = bool(described.get("scalar"))
        at = ExpertPlace(experts[0], shape[0]) if is_number and experts else None
    else:
        # Saved by a module with one parameter, a number is one for all.
        at = place if experts is not None or len(shape) > 1 else None
    return {**described, "shape": shape if at is None else shape[1:], "at": at}


def join_experts(states: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]], label: str) -> None:
    """Add descriptions of states of some experts to those of others.

    Args:
        states: By name of the state; changed.
        more: The same of other experts.
        label: Name of the tensor of all, for messages.

    Raises:
        CheckpointError: The same state of another shape, dtype or value.
    """
    for key, described in more.items():
        have = states.setdefault(key, described)
        if {**have, "experts": None} != {**described, "experts": None}:
            raise CheckpointError(
                message(
                    f"optimizer.state.{label}.{key}: experts {have['experts']} and {described['experts']}",
                    expected="the same kind of state for all experts of a layer",
                    got=f"{_told(have)} and {_told(described)}",
                    fix="give all experts of a layer to one optimizer, with the same options",
                )
            )
        states[key] = {**have, "experts": sorted({*have["experts"], *described["experts"]})}


def _told(described: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in described.items() if key != "experts")
