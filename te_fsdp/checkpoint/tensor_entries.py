"""Contents of a checkpoint as rectangles of the original tensors, in the layout of a single process.

An entry is one tensor of the files. A rank has pieces of it: views of its local tensor, each with its place in the
original. A save reads the views, a load writes into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import CheckpointError
from te_fsdp.upstream import te as _te

if TYPE_CHECKING:
    from te_fsdp.layout import Box

#: Layout of a grouped tensor in the manifest.
GROUPED = "grouped"


@dataclass(frozen=True)
class Piece:
    """A rectangle of the original: its offsets there, and the view of the rank's local tensor with its elements."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the files, in the shape of the original, with this rank's pieces, perhaps none.

    Pieces of several ranks must be equal, which is checked before they are written once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether the original has no elements, so that nothing is stored."""
        return math.prod(self.shape) == 0


def cut_entry(local: torch.Tensor, shape: Sequence[int], boxes: Iterable[Box]) -> Entry:
    """Return the entry of a tensor of this shape, of which this rank has these boxes in a plain local tensor."""
    assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
    if local.shape == torch.Size(shape):
        return whole_entry(local)
    local, own = local.detach(), tuple(local.shape)
    # Most shards are one box and need no view.
    pieces = tuple(Piece(b.original, local if b.sizes == own else local[b.local_slices()]) for b in boxes)
    return Entry(tuple(shape), local.dtype, pieces)


def whole_entry(tensor: torch.Tensor) -> Entry:
    """Return the entry of a tensor that every rank has completely."""
    shape = tuple(tensor.shape)
    return Entry(shape, tensor.dtype, (Piece((0,) * len(shape), tensor.detach()),))


def add_entry(entries: dict[str, Entry], key: str, entry: Entry) -> None:
    """Add an entry under a key; add the pieces to those of an existing entry."""
    have = entries[key].pieces if key in entries else ()
    entries[key] = replace(entry, pieces=(*have, *entry.pieces))


def views_of(
    leaves: list[torch.Tensor], entries: list[Entry]
) -> list[tuple[int, tuple[Any, ...] | None]] | None:
    """Return the places of the entries' pieces in the tensors that they are views of; ``None`` for other pieces."""
    if len(leaves) != len(entries):
        return None
    views: list[tuple[int, tuple[Any, ...] | None]] = []
    for at, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
        for part in () if entry.is_empty else (piece.tensor for piece in entry.pieces):
            # A piece in other memory is a copy, which would be stale in the next save.
            if part.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
                return None
            whole = part.shape == leaf.shape and part.data_ptr() == leaf.data_ptr()
            views.append((at, None if whole else (part.shape, part.stride(), part.storage_offset())))
    return views


# [Note: one tensor for all experts] The weights of a layer's experts are one tensor of the files, with a
# leading expert dim under global indices. TE's ``GroupedLinear`` has a parameter per expert, or a single one
# for all::
#
#     weight0 (out, in), weight1, ...    or    weight (experts, out, in)    ->    weight (experts, out, in)
#
# State of one expert (a scale, an optimizer's step) has the same leading dim.
@dataclass(frozen=True)
class ExpertPlace:
    """Place of one expert's parameter in the stacked tensor: its global index, and the number of experts."""

    index: int
    total: int


def as_grouped_entry(entry: Entry, place: ExpertPlace | None) -> Entry:
    """Return an expert's entry as one of the stacked tensor; entries without a place are unchanged."""
    if place is None:
        return entry
    pieces = tuple(Piece((place.index, *p.offsets), p.tensor.unsqueeze(0)) for p in entry.pieces)
    return Entry((place.total, *entry.shape), entry.dtype, pieces)


def stacked_name(name: str) -> str:
    """Return the name of the stacked tensor, such as ``"experts.weight"`` for ``"experts.weight3"``."""
    return name.rstrip("0123456789")


def per_expert(described: dict[str, Any], place: ExpertPlace | None) -> dict[str, Any] | None:
    """Return the description of a saved state for one parameter; ``None`` if this expert has no such state.

    ``experts`` in it lists the experts that have the state, if each has its own, and ``scalar`` whether it is one
    number for each. A parameter without a place has all experts, and takes the number of the first, or is not grouped.
    The result has the shape of the parameter's own state, and ``at``, its place in the files' tensor (``None``: it is
    that tensor).
    """
    experts, shape = described.get("experts"), described.get("shape", [])
    if place is not None and experts is not None and place.index not in experts:
        return None
    if "dtype" not in described:
        return described
    if place is None:
        at = ExpertPlace(experts[0], shape[0]) if described.get("scalar") and experts else None
    else:
        # A number saved by a module with one parameter belongs to all experts.
        at = place if experts is not None or len(shape) > 1 else None
    return {**described, "shape": shape if at is None else shape[1:], "at": at}


def of_all_experts(described: dict[str, Any], place: ExpertPlace, whole: Sequence[int]) -> dict[str, Any]:
    """Invert :func:`per_expert` for a state of one expert, whose own weight has the shape ``whole``."""
    found = {**described, "experts": [place.index]}
    if "dtype" in described:
        shape = described["shape"]
        found |= {"shape": [place.total, *shape], "scalar": shape in ([], [1]) and shape != [*whole]}
    return found


def join_experts(states: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]], label: str) -> None:
    """Add descriptions of states of more experts to ``states``, by name of the state.

    Raise CheckpointError for the same state with another shape, dtype or value. ``label`` is the stacked tensor's name.
    """
    for key, described in more.items():
        both = states.setdefault(key, described), described
        # Everything except the list of experts must be equal: the files have one description for all.
        (experts, kind), (others, other) = ((one["experts"], {**one, "experts": None}) for one in both)
        if kind != other:
            kinds = (", ".join(f"{k} {v}" for k, v in one.items() if k != "experts") for one in both)
            raise CheckpointError(
                f"optimizer.state.{label}.{key}: experts {experts} and {others}",
                expected="the same kind of state for all experts of a layer",
                got=" and ".join(kinds),
                fix="give all experts of a layer to one optimizer, with the same options",
            )
        states[key] = {**both[0], "experts": sorted({*experts, *others})}
