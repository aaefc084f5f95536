"""Where a load reads from: the files of a save of ours, or tensors that lie in files of other kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from te_fsdp.checkpoint.collective import all_agree
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.planner import read_entries
from te_fsdp.checkpoint.portable.lazy import Lazy, Stack

__all__ = ["Source"]


@dataclass
class Source:
    """A checkpoint that is being loaded.

    Attributes:
        path: The directory.
        manifest: What it holds.
        tensors: By the keys that our files have; ``None``: the files are ours, and DCP reads them.
        kind: What wrote it, in words.
        notes: What was taken of a foreign directory and what was not, in words.
    """

    path: Path
    manifest: Manifest
    tensors: Mapping[str, Lazy] | None = None
    kind: str = "te_fsdp"
    notes: list[str] = field(default_factory=list)

    def read(self, entries: dict[str, Entry]) -> None:
        """Fill the memory of entries. Collective over the world; no rank reads more than its own rows.

        Raises:
            CheckpointError: Any rank failed; raised on all of them. Some tensors may have been filled.
        """
        if self.tensors is None:
            read_entries(self.path, entries)
            return
        tensors = self.tensors
        all_agree(lambda: _fill(tensors, entries))


def _fill(tensors: Mapping[str, Lazy], entries: dict[str, Entry]) -> None:
    for key, entry in entries.items():
        for piece in entry.pieces:
            _fill_piece(tensors[key], piece)


def _fill_piece(tensor: Lazy, piece: Piece) -> None:
    """Copy the rows of a piece, a block at a time."""
    target = piece.tensor
    if not target.numel():
        return
    if isinstance(tensor, Stack):  # no expert's rows are read for another's
        for index, part in enumerate(target, piece.offsets[0]):
            _fill_piece(tensor.select(index), Piece(piece.offsets[1:], part))
        return
    if not target.ndim:
        target.copy_(tensor.whole().reshape(()))
        return
    begin, end = piece.offsets[0], piece.offsets[0] + target.shape[0]
    columns = tuple(
        slice(at, at + size) for at, size in zip(piece.offsets[1:], target.shape[1:], strict=True)
    )
    for first, last in tensor.blocks():
        low, high = max(first, begin), min(last, end)
        if low < high:
            target[low - begin : high - begin].copy_(tensor.rows(low, high)[(slice(None), *columns)])
