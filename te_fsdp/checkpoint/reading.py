"""Tensors out of a checkpoint's files, into memory of the host: read once, checked, and only then used.

DCP says what lies where (``.metadata``) and which stored pieces overlap which rectangles. Reading is ours: DCP's reader
takes a piece from its file once for each rectangle, checks nothing, and writes into the model as it goes.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.extra import references
from te_fsdp.checkpoint.manifest import DCP_METADATA, Manifest, dtype_name
from te_fsdp.checkpoint.portable.torch_files import Heads, Window
from te_fsdp.checkpoint.sums import CheckedFile, DamagedFileError, crc32, without_collector
from te_fsdp.errors import CheckpointError, shorten

__all__ = [
    "Rectangle",
    "Staged",
    "check_metadata",
    "read_metadata",
    "read_stored",
    "rectangle",
    "stored_tensors",
    "unpickle_metadata",
]

#: A part of a tensor of the files: its key, where it begins, its shape.
Rectangle = tuple[str, tuple[int, ...], tuple[int, ...]]

#: Bytes of neighbouring pieces that are read together.
_RUN = 1 << 20
#: Reading and summing up release the interpreter, so that threads help.
_THREADS = 4

#: All that DCP's metadata is made of, besides dtypes.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = name in _KNOWN.get(module, ())
        if not known and module == "torch":
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of a checkpoint")
        return super().find_class(module, name)


def unpickle_metadata(data: bytes) -> Metadata:
    """DCP's ``.metadata``, a pickle, read with its own classes alone.

    Raises:
        pickle.UnpicklingError: It names something else, or is damaged. Damaged ones may raise anything.
    """
    with without_collector():
        metadata = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of DCP's Metadata")
    return metadata


def read_metadata(path: Path, manifest: Manifest | None = None) -> Metadata:
    """DCP's metadata of a directory, compared with the manifest's checksum before it is unpickled. Local operation.

    Args:
        path: The directory.
        manifest: Of a checkpoint of te_fsdp; also says of which save the metadata must be.

    Raises:
        CheckpointError: It is unreadable, has changed, or is of another save.
    """
    try:
        data = (path / DCP_METADATA).read_bytes()
        if manifest is not None and manifest.files.get(DCP_METADATA) != [len(data), crc32(data)]:
            raise DamagedFileError("its contents have changed (CRC-32)")
        metadata = unpickle_metadata(data)
        if manifest is not None:
            manifest.check_identity(getattr(metadata.storage_meta, "save_id", None))
    except Exception as error:
        kind = "" if isinstance(error, DamagedFileError) else f"{type(error).__name__}: "
        raise CheckpointError(
            f"{path}: unreadable {DCP_METADATA} ({kind}{error})",
            fix="the checkpoint is damaged, load an earlier one",
        ) from error
    return metadata


def check_metadata(path: Path, manifest: Manifest) -> Metadata:
    """Every tensor that the manifest lists is in DCP's metadata, which is returned, with its shape and dtype. Local.

    Raises:
        CheckpointError: The two disagree: the directory was put together from several, or damaged.
    """
    metadata = read_metadata(path, manifest)
    have, wrong = metadata.state_dict_metadata, []
    for key, shape, dtype in stored_tensors(manifest):
        saved = have.get(key)
        if not isinstance(saved, TensorStorageMetadata):
            wrong.append(f"{key} is missing")
            continue
        there = tuple(saved.size), dtype_name(saved.properties.dtype)
        if shape is not None and there != (tuple(shape), dtype):
            wrong.append(f"{key} is {there[0]} {there[1]} instead of {tuple(shape)} {dtype}")
    if wrong:
        raise CheckpointError(
            f"{path}: damaged checkpoint: {shorten(wrong)}",
            why="Its manifest and its tensors are not of one save",
            fix="load an earlier checkpoint, or copy this one again",
        )
    return metadata


def stored_tensors(
    manifest: Manifest, *, empty: bool = False
) -> Iterator[tuple[str, list[int] | None, str | None]]:
    """Key, shape and dtype of the tensors that a manifest lists and files hold; no shape for components.

    Args:
        manifest: Of a checkpoint.
        empty: Tensors without elements instead, which are stored nowhere.
    """
    plain: list[tuple[str, list[int], str]] = []
    for name, described in {**manifest.parameters, **manifest.buffers}.items():
        if described.get("format") is None:
            plain.append((f"model.{name}", described["shape"], described["dtype"]))
        elif not empty:
            yield from ((f"model.{name}:{part}", None, None) for part in described["components"])
    for name in manifest.delayed if not empty else ():
        for key in ("scaling_fwd", "scaling_bwd"):
            yield from ((f"delayed.{name}:{key}.{part}", None, None) for part in ("scale", "amax_history"))
    for name, states in (manifest.optimizer or {"state": {}})["state"].items():
        for key, described in states.items():
            if "dtype" in described:
                plain.append((f"optimizer.state.{name}.{key}", described["shape"], described["dtype"]))
    for described in references(manifest.extra):
        plain.append((described["key"], described["shape"], described["dtype"].removeprefix("torch.")))
    yield from (one for one in plain if empty != bool(math.prod(one[1])))


def rectangle(key: str, piece: Piece) -> Rectangle:
    """What of a tensor of the files a piece holds."""
    return key, tuple(piece.offsets), tuple(piece.tensor.shape)


@dataclass
class Staged:
    """What was read for a load, on the host, until it has been copied to where it belongs.

    Attributes:
        parts: By rectangle: where each part of it begins, and its values.
        uses: Pieces that wait for each rectangle. With the last of them its memory is freed.
    """

    parts: dict[Rectangle, list[tuple[tuple[int, ...], torch.Tensor]]] = field(default_factory=dict)
    uses: Counter[Rectangle] = field(default_factory=Counter)

    def expect(self, entries: dict[str, Entry]) -> list[Rectangle]:
        """Note pieces that :meth:`fill` will be called with; what is still to be read for them. Local operation."""
        wanted = []
        for key, entry in entries.items():
            for piece in entry.pieces if not entry.is_empty else ():
                place = rectangle(key, piece)
                self.uses[place] += 1
                if piece.tensor.numel() and place not in self.parts:
                    self.parts[place] = []
                    wanted.append(place)
        return wanted

    def fill(self, entries: dict[str, Entry]) -> None:
        """Copy what was read into the memory of entries. Local operation."""
        for key, entry in entries.items():
            for piece in entry.pieces if not entry.is_empty else ():
                place = rectangle(key, piece)
                self.uses[place] -= 1
                parts = self.parts.get(place, []) if self.uses[place] else self.parts.pop(place, [])
                for offsets, values in parts:
                    piece.tensor[_slices(offsets, values.shape)].copy_(values)


@dataclass
class _Stored:
    """A piece that is read.

    Attributes:
        key: Of the tensor.
        offset: Byte at which it begins.
        length: Its bytes.
        shape: According to DCP's metadata.
        dtype: According to DCP's metadata.
        items: What is wanted of it, each with the rectangle that it is for.
    """

    key: str
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    items: list[tuple[ReadItem, Rectangle]]


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
    heads = Heads()
    with ThreadPoolExecutor(_THREADS, "te_fsdp load") as pool:
        for name, pieces in _pieces(path, metadata, wanted).items():
            taken: list[_Stored] = []
            try:
                with CheckedFile(path / name, manifest.files.get(name), manifest.save_id) as file:
                    for taken, data in _read_ahead(pool, file, _runs(pieces)):
                        _take(data, taken, path / name, heads, into)
            except (OSError, DamagedFileError) as error:
                keys = sorted({f", of {stored.key}" for stored in taken})
                damaged(path, [f"{name}: {error}{''.join(keys[:3])}"])


def _pieces(path: Path, metadata: Metadata, wanted: list[Rectangle]) -> dict[str, list[_Stored]]:
    """What is read, by file, in its order there."""
    by_key: dict[str, list[Rectangle]] = {}
    for place in wanted:
        by_key.setdefault(place[0], []).append(place)
    found: dict[str, dict[int, _Stored]] = {}
    for key, places in by_key.items():
        saved, covered = metadata.state_dict_metadata.get(key), 0
        if isinstance(saved, TensorStorageMetadata) and len(saved.size) == len(places[0][1]):
            chunks = [
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, offsets, sizes in places
            ]
            for item in create_read_items_for_chunk_list(key, saved, chunks):
                where, chunk = (
                    metadata.storage_data[item.storage_index],
                    saved.chunks[item.storage_index.index or 0],
                )
                stored = found.setdefault(where.relative_path, {}).setdefault(
                    where.offset,
                    _Stored(key, where.offset, where.length, tuple(chunk.sizes), saved.properties.dtype, []),
                )
                stored.items.append((item, places[item.dest_index.index or 0]))
                covered += math.prod(item.lengths)
        if covered != sum(math.prod(sizes) for _, _, sizes in places):
            damaged(path, [f"{DCP_METADATA}: {key} is not there, or not all of it"])
    return {name: [at[offset] for offset in sorted(at)] for name, at in found.items()}


def _runs(pieces: list[_Stored]) -> Iterator[list[_Stored]]:
    """Small pieces that lie side by side together, large ones alone."""
    run: list[_Stored] = []
    for stored in pieces:
        if run and (
            run[-1].offset + run[-1].length != stored.offset
            or stored.offset + stored.length - run[0].offset > _RUN
        ):
            yield run
            run = []
        run.append(stored)
    if run:
        yield run


def _read_ahead(
    pool: ThreadPoolExecutor, file: CheckedFile, runs: Iterable[list[_Stored]]
) -> Iterator[tuple[list[_Stored], torch.Tensor]]:
    """Each run with its bytes; a few are read in advance, which bounds the memory for what is not wanted of them."""
    pending: deque[tuple[list[_Stored], Future[torch.Tensor]]] = deque()
    try:
        for run in runs:
            pending.append((run, pool.submit(file.read, run[0].offset, [s.length for s in run])))
            if len(pending) > 2 * _THREADS:
                first, data = pending.popleft()
                yield first, data.result()
        while pending:
            first, data = pending.popleft()
            yield first, data.result()
    finally:
        wait(data for _, data in pending if not data.cancel())


def _take(data: torch.Tensor, run: list[_Stored], file: Path, heads: Heads, into: Staged) -> None:
    """Keep what is wanted of some pieces."""
    at = 0
    for stored in run:
        piece = data[at : at + stored.length]
        at += stored.length
        # Neighbours begin anywhere, where elements of several bytes cannot.
        tensor = _tensor(piece if len(run) == 1 else piece.clone(), stored, file, heads)
        wanted = sum(math.prod(item.lengths) for item, _ in stored.items)
        for item, place in stored.items:
            values = tensor[_slices(item.storage_offsets, item.lengths)]
            # A view keeps all of the piece in memory.
            values = values if 2 * wanted >= tensor.numel() else values.clone()
            into.parts[place].append((tuple(item.dest_offsets), values))


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _tensor(piece: torch.Tensor, stored: _Stored, file: Path, heads: Heads) -> torch.Tensor:
    """The tensor in a ``torch.save`` file, a view of it; most have the same head as another of the same length."""
    known = heads.find(stored.length, piece[: Heads.BYTES].numpy().tobytes())
    if known is None:
        found = Window(file, stored.key, stored.offset, stored.length, heads).objects()
        begin = found.record.offset - stored.offset if isinstance(found, torch.Tensor) else 0  # type: ignore[missing-attribute]
    else:
        begin, found = known
    got = (tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__
    if got != (stored.shape, stored.dtype):
        raise DamagedFileError(f"expected a tensor {stored.shape} {stored.dtype}, got {got}")
    strides, first = found.stride(), int(found.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(stored.shape, strides, strict=True))
    elements = piece[begin : begin + (last + 1) * stored.dtype.itemsize].view(stored.dtype)
    return elements.as_strided(stored.shape, strides, elements.storage_offset() + first)
