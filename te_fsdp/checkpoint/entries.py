"""What goes into a checkpoint, as rectangles of the original tensors: the unit that DCP plans with.

An entry is one tensor of the files, in the layout that a single process would have. A rank holds pieces of
it: views of its own local tensor, each with the place in the original where it belongs. Writing reads the
views, loading writes into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fsdp import _te

if TYPE_CHECKING:
    from te_fsdp.layout.boxes import Box

__all__ = ["Entry", "Piece", "add_entry", "cut_entry", "whole_entry"]


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
    def bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(p.tensor.numel() * p.tensor.element_size() for p in self.pieces)

    @property
    def is_empty(self) -> bool:
        """Whether the original has no element, so that there is nothing to store."""
        return math.prod(self.shape) == 0


def cut_entry(local: torch.Tensor, shape: Iterable[int], boxes: Iterable[Box]) -> Entry:
    """Entry of a tensor of which this rank holds boxes.

    Args:
        local: Plain local tensor.
        shape: Shape of the original.
        boxes: From :func:`te_fsdp.modules.shards.shard_info`.
    """
    assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
    local = local.detach()
    pieces = tuple(Piece(box.original, local[box.local_slices()]) for box in boxes)
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
