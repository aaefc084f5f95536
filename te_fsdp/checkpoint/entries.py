"""What goes into a checkpoint, as rectangles of the original tensors: the unit that DCP plans with.

An entry is one tensor of the files, in the layout that a single process would have. A rank holds pieces of
it: views of its own local tensor, each with the place in the original where it belongs. Writing reads the
views, loading writes into them.

The weights of a layer's experts are one tensor of the files, with a leading expert dim under global indices, however
a module holds them: TE's ``GroupedLinear`` has a parameter per expert, or a single one for all.

    weight0 (out, in), weight1, ...    or    weight (experts, out, in)    ->    weight (experts, out, in)
    bias0 (out), bias1, ...            or    bias (experts, out)          ->    bias (experts, out)

What belongs to one expert (a scale, an optimizer's step) gets the same leading dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.errors import CheckpointError

if TYPE_CHECKING:
    from te_fsdp.layout.rules import Box

#: Layout of a grouped tensor in the manifest.
GROUPED = "grouped"


@dataclass(frozen=True)
class Piece:
    """A rectangle of the original and the view of local memory that holds it.

    Attributes:
        offsets: Where it lies in the original.
        tensor: View of the rank's own tensor; its shape is the rectangle's.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the files.

    Attributes:
        shape: Shape of the original.
        dtype: Element type.
        pieces: What this rank holds of it; none on a rank that holds nothing. What several ranks hold must be
            equal, which is checked before it is written once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the original has no element, so that there is nothing to store."""
        return math.prod(self.shape) == 0


def cut_entry(local: torch.Tensor, shape: Sequence[int], boxes: Iterable[Box]) -> Entry:
    """Entry of a tensor of which this rank holds boxes.

    Args:
        local: Plain local tensor.
        shape: Shape of the original.
        boxes: From :func:`te_fsdp.parameters.shard_info`.
    """
    assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
    if local.shape == torch.Size(shape):
        return whole_entry(local)
    local, own = local.detach(), tuple(local.shape)
    # Most shards are one box: no view of all of them is made for it.
    pieces = tuple(Piece(b.original, local if b.sizes == own else local[b.local_slices()]) for b in boxes)
    return Entry(tuple(shape), local.dtype, pieces)


def whole_entry(tensor: torch.Tensor) -> Entry:
    """Entry of a tensor that every rank holds whole."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    return Entry(shape, tensor.dtype, (Piece((0,) * len(shape), tensor),))


def add_entry(entries: dict[str, Entry], key: str, entry: Entry) -> None:
    """Add an entry under a key; of one that is there already, the pieces are kept beside the new ones."""
    have = entries.get(key)
    if have is not None:
        entry = Entry(entry.shape, entry.dtype, (*have.pieces, *entry.pieces))
    entries[key] = entry


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


def of_all_experts(described: dict[str, Any], place: ExpertPlace, whole: Sequence[int]) -> dict[str, Any]:
    """The inverse of :func:`per_expert`: a state of one expert's parameter as one of the tensor of all.

    Args:
        described: Of the expert's own state.
        place: Of the expert.
        whole: Shape of the expert's own weight.
    """
    found = {**described, "experts": [place.index]}
    if "dtype" in described:
        shape = described["shape"]
        found |= {"shape": [place.total, *shape], "scalar": shape in ([], [1]) and shape != [*whole]}
    return found


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
            both = [{k: v for k, v in one.items() if k != "experts"} for one in (have, described)]
            kinds = [", ".join(f"{k} {v}" for k, v in one.items()) for one in both]
            raise CheckpointError(
                f"optimizer.state.{label}.{key}: experts {have['experts']} and {described['experts']}",
                expected="the same kind of state for all experts of a layer",
                got=" and ".join(kinds),
                fix="give all experts of a layer to one optimizer, with the same options",
            )
        states[key] = {**have, "experts": sorted({*have["experts"], *described["experts"]})}
