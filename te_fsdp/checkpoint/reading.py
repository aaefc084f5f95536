"""Tensors out of a checkpoint's files, into memory of the host: read once, checked, and only then used.

DCP says what lies where (``.metadata``) and which stored pieces overlap which rectangles. Reading is ours: DCP's reader
takes a piece from its file once for each rectangle, checks nothing, and writes into the model as it goes.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.manifest import DCP_METADATA, Manifest
from te_fsdp.checkpoint.portable import dcp
from te_fsdp.checkpoint.portable.lazy import slices
from te_fsdp.checkpoint.portable.torch_files import Window
from te_fsdp.checkpoint.sums import CheckedFile, DamagedFileError, without_collector

__all__ = ["Rectangle", "Staged", "read_stored", "rectangle"]

#: A part of a tensor of the files: its key, where it begins, its shape.
Rectangle = tuple[str, tuple[int, ...], tuple[int, ...]]

#: Bytes of neighbouring pieces that are read together.
_RUN = 1 << 20
#: Reading and summing up release the interpreter, so that threads help.
_THREADS = 4


def rectangle(key: str, piece: Piece) -> Rectangle:
    """What of a tensor of the files a piece holds."""
    return key, tuple(piece.offsets), tuple(piece.tensor.shape)


@dataclass
class Staged:
    """What was read for a load, on the host, until it has been copied to where it belongs.

    Attributes:
        parts: By rectangle: where each part of it begins, and its values.
        uses: How often each rectangle is still wanted. With the last copy its memory is freed.
    """

    parts: dict[Rectangle, list[tuple[tuple[int, ...], torch.Tensor]]] = field(default_factory=dict)
    uses: Counter[Rectangle] = field(default_factory=Counter)

    def expect(self, places: Iterable[Rectangle]) -> list[Rectangle]:
        """Note what :meth:`copy` will be called with, each time; what of it is still to be read. Local operation."""
        wanted = []
        for place in places:
            self.uses[place] += 1
            if math.prod(place[2]) and place not in self.parts:
                self.parts[place] = []
                wanted.append(place)
        return wanted

    def copy(self, place: Rectangle, into: torch.Tensor) -> None:
        """Copy what was read of a rectangle into memory of its shape. Local operation."""
        self.uses[place] -= 1
        parts = self.parts.get(place, []) if self.uses[place] else self.parts.pop(place, [])
        for offsets, values in parts:
            into[slices(offsets, values.shape)].copy_(values)

    def new(self, place: Rectangle, device: torch.device) -> torch.Tensor:
        """What was read of a rectangle that is not empty, as a new tensor. Local operation."""
        into = torch.empty(place[2], dtype=self.parts[place][0][1].dtype, device=device)
        self.copy(place, into)
        return into

    def fill(self, entries: dict[str, Entry]) -> None:
        """Copy what was read into the memory of entries. Local operation."""
        for key, entry in entries.items():
            for piece in entry.pieces:
                self.copy(rectangle(key, piece), piece.tensor)


#: A stored piece, and what is wanted of it, each with the rectangle that it is for.
_Wanted = tuple[dcp.Piece, list[tuple[ReadItem, Rectangle]]]


def read_stored(
    path: Path, manifest: Manifest, metadata: Metadata, wanted: list[Rectangle], into: Staged
) -> None:
    """Read rectangles from the files of a checkpoint of te_fsdp. Local operation; each byte is read once.

    Args:
        path: The directory.
        manifest: Says what the files must be.
        metadata: Says what lies where.
        wanted: What is read.
        into: Takes it.

    Raises:
        CheckpointError: Files that are not as they were saved, or that lack something.
    """
    with without_collector():
        by_file = _pieces(path, metadata, wanted)
    with ThreadPoolExecutor(_THREADS, "te_fsdp load") as pool:
        for name, pieces in by_file.items():
            taken: list[_Wanted] = []
            try:
                with CheckedFile(path / name, manifest.files.get(name), manifest.save_id) as file:
                    for taken, data in _read_ahead(pool, file, _runs(pieces)):
                        _take(data, taken, into)
            except (OSError, DamagedFileError) as error:
                keys = sorted({f", of {piece.window.key}" for piece, _ in taken})
                damaged(path, [f"{name}: {error}{''.join(keys[:3])}"])


def _pieces(path: Path, metadata: Metadata, wanted: list[Rectangle]) -> dict[str, list[_Wanted]]:
    """What is read, by file, in its order there."""
    by_key: dict[str, list[Rectangle]] = {}
    for place in wanted:
        by_key.setdefault(place[0], []).append(place)
    found: dict[str, dict[int, _Wanted]] = {}
    heads: dcp.Heads = {}
    for key, places in by_key.items():
        saved, covered = metadata.state_dict_metadata.get(key), 0
        if isinstance(saved, TensorStorageMetadata) and len(saved.size) == len(places[0][1]):
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in places
            ]
            for item in create_read_items_for_chunk_list(key, saved, chunks):
                where = metadata.storage_data[item.storage_index]
                in_file = found.setdefault(where.relative_path, {})
                if where.offset not in in_file:
                    window = Window(path / where.relative_path, key, where.offset, where.length)
                    shape = tuple(saved.chunks[item.storage_index.index or 0].sizes)
                    in_file[where.offset] = dcp.Piece(window, shape, saved.properties.dtype, heads), []
                in_file[where.offset][1].append((item, places[item.dest_index.index or 0]))
                covered += math.prod(item.lengths)
        if covered != sum(math.prod(sizes) for _, _, sizes in places):
            damaged(path, [f"{DCP_METADATA}: {key} is not there, or not all of it"])
    return {name: [at[offset] for offset in sorted(at)] for name, at in found.items()}


def _runs(pieces: list[_Wanted]) -> Iterator[list[_Wanted]]:
    """Small pieces that lie side by side together, large ones alone."""
    run: list[_Wanted] = []
    begin = end = 0
    for wanted in pieces:
        window = wanted[0].window
        if run and (window.offset != end or window.offset + window.length - begin > _RUN):
            yield run
            run = []
        begin, end = (begin if run else window.offset), window.offset + window.length
        run.append(wanted)
    if run:
        yield run


def _read_ahead(
    pool: ThreadPoolExecutor, file: CheckedFile, runs: Iterable[list[_Wanted]]
) -> Iterator[tuple[list[_Wanted], torch.Tensor]]:
    """Each run with its bytes; a few are read in advance, which bounds the memory for what is not wanted of them."""
    pending: deque[tuple[list[_Wanted], Future[torch.Tensor]]] = deque()
    try:
        for run in runs:
            windows = [piece.window for piece, _ in run]
            read = pool.submit(file.read, windows[0].offset, [window.length for window in windows])
            pending.append((run, read))
            if len(pending) > 2 * _THREADS:
                first, data = pending.popleft()
                yield first, data.result()
        while pending:
            first, data = pending.popleft()
            yield first, data.result()
    finally:
        wait(data for _, data in pending if not data.cancel())


def _take(data: torch.Tensor, run: list[_Wanted], into: Staged) -> None:
    """Keep what is wanted of some pieces."""
    at = 0
    for piece, items in run:
        raw = data[at : at + piece.window.length]
        at += piece.window.length
        # Neighbours begin anywhere, where elements of several bytes cannot.
        tensor = piece.within(raw if len(run) == 1 else raw.clone())
        wanted = sum(math.prod(item.lengths) for item, _ in items)
        for item, place in items:
            values = tensor[slices(item.storage_offsets, item.lengths)]
            # A view keeps all of the piece in memory.
            values = values if 2 * wanted >= tensor.numel() else values.clone()
            into.parts[place].append((tuple(item.dest_offsets), values))
