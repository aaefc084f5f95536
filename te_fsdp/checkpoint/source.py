"""Where a load reads from: the files of a save of ours, or tensors that lie in files of other kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from te_fsdp.agree import all_agree
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.portable.lazy import Lazy, Stack
from te_fsdp.checkpoint.reading import Rectangle, Staged, read_metadata, read_stored

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
        staged: What was read and has not been copied yet.
    """

    path: Path
    manifest: Manifest
    tensors: Mapping[str, Lazy] | None = None
    kind: str = "te_fsdp"
    notes: list[str] = field(default_factory=list)

    staged: Staged = field(default_factory=Staged, repr=False)

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's, of files that are ours; checked when it is first asked for. Local operation."""
        return read_metadata(self.path, self.manifest)

    def described(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor in the files, by key. Local operation."""
        if self.tensors is not None:
            return {key: (tensor.shape, tensor.dtype) for key, tensor in self.tensors.items()}
        saved = self.metadata.state_dict_metadata.items()
        return {
            k: (tuple(m.size), m.properties.dtype) for k, m in saved if isinstance(m, TensorStorageMetadata)
        }

    def stage(self, entries: dict[str, Entry]) -> None:
        """Read what goes into entries into memory of the host, and check it; the entries' own is left alone.

        Collective over the world. No rank reads more than the stored pieces that its own rows lie in.

        Raises:
            CheckpointError: Any rank failed; raised on all of them. Nothing has changed.
        """
        all_agree(lambda: self._stage(self.staged.expect(entries)))

    def _stage(self, wanted: list[Rectangle]) -> None:
        if self.tensors is None:
            read_stored(self.path, self.manifest, self.metadata, wanted, self.staged)
            return
        for place in wanted:
            key, offsets, shape = place
            values = torch.empty(shape, dtype=self.tensors[key].dtype, device="cpu")
            _fill_piece(self.tensors[key], Piece(offsets, values))
            self.staged.parts[place] = [((0,) * len(shape), values)]

    def read(self, entries: dict[str, Entry]) -> None:
        """:meth:`stage`, and copy at once. Collective over the world."""
        self.stage(entries)
        self.staged.fill(entries)


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
