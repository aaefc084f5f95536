"""Directories of PyTorch's distributed checkpoint (DCP): the stored pieces, in one process.

Reading a piece through DCP brings the whole piece into memory, and a piece may be a whole embedding. Here the
header of a piece tells where its bytes lie, and rows are read from there.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from te_fsdp.checkpoint.index import Index, read_metadata, unreadable
from te_fsdp.checkpoint.manifest import DCP_METADATA
from te_fsdp.checkpoint.portable.lazy import Chunked, Lazy, Record, Stored, read_bytes
from te_fsdp.checkpoint.portable.torch_files import BEHIND, Window, stored
from te_fsdp.checkpoint.remote import listing
from te_fsdp.checkpoint.sums import view_of
from te_fsdp.errors import CheckpointError

#: By length, shape and dtype: what comes before the data of some pieces, and where the elements of one of them lie.
Heads = dict[tuple[int, tuple[int, ...], torch.dtype], list[tuple[bytes, Stored]]]


@dataclass
class Piece(Lazy):
    """A rectangle that DCP wrote.

    To list the members of its file takes most of the time of a small tensor, and most files differ in the data alone:
    what comes before these is compared with that of pieces that were looked at before.

    Attributes:
        window: Its ``torch.save`` file.
        shape: According to DCP's metadata.
        dtype: According to DCP's metadata.
        heads: What is known of the pieces beside it.
    """

    window: Window
    shape: tuple[int, ...]
    dtype: torch.dtype
    heads: Heads = field(default_factory=dict, repr=False)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.header.rows(first, last)

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return self.header.select(index)

    @cached_property
    def found(self) -> Any:
        """Where the elements of a tensor lie, read when it is first asked for; or what else there is.

        Raises:
            CheckpointError: See :meth:`Window.objects`.
        """
        window = self.window

        def read(at: int, count: int) -> bytes:
            return bytes(read_bytes(window.file, window.offset + at, count, window.label)[:count])

        known = self._alike(self._known(read), read)
        if known is not None:
            return known
        found = window.objects()
        if not isinstance(found, torch.Tensor):
            return found
        like = stored(found, window.key)
        count = like.record.offset - window.offset
        head = bytes(read_bytes(window.file, window.offset, count, window.key))
        self.heads.setdefault((window.length, like.shape, like.dtype), []).append((head, like))
        return like

    @property
    def header(self) -> Stored:
        """Where its elements lie.

        Raises:
            CheckpointError: Another tensor is there than DCP's metadata says, or none.
        """
        is_tensor = isinstance(self.found, Stored)
        got = (self.found.shape, self.found.dtype) if is_tensor else type(self.found).__name__
        if got != (self.shape, self.dtype):
            raise CheckpointError(
                f"{self.window.key}: its bytes in {self.window.file}",
                expected=(self.shape, self.dtype),
                got=got,
                fix="the checkpoint is damaged, take an earlier one",
            )
        return self.found

    def within(self, data: torch.Tensor, *, check: bool) -> torch.Tensor:
        """The tensor in the bytes of its file, given as a uint8 tensor on the host; a view of them. In any thread.

        Args:
            data: The bytes.
            check: Whether they are compared with the checksum that ``torch.save`` wrote, if it did.

        Raises:
            CheckpointError: They have changed; or see :attr:`header`.
        """

        def read(at: int, count: int) -> bytes:
            return bytes(data[at : at + count].numpy())

        known = self._known(read)
        begin, like = known or (self.header.record.offset - self.window.offset, self.header)
        if check:
            record = (self._alike(known, read) or self.header).record
            record.check(view_of(data[begin : begin + record.count]))
        first, strides = like.start, like.strides
        last = first + sum((size - 1) * stride for size, stride in zip(self.shape, strides, strict=True))
        elements = data[begin : begin + (last + 1) * self.dtype.itemsize].view(self.dtype)
        return elements.as_strided(self.shape, strides, elements.storage_offset() + first)

    def _known(self, read: Callable[[int, int], bytes]) -> tuple[int, Stored] | None:
        """A piece that is alike up to the data, and where these begin.

        Args:
            read: Gives bytes of the file, by where they begin and how many.
        """
        for head, like in self.heads.get((self.window.length, self.shape, self.dtype), ()):
            if read(0, len(head)) == head:
                return len(head), like
        return None

    def _alike(self, known: tuple[int, Stored] | None, read: Callable[[int, int], bytes]) -> Stored | None:
        """Where the elements lie, with their checksum, if another piece is alike; from and as for :meth:`_known`."""
        if known is None:
            return None
        (begin, like), window = known, self.window
        mark, crc = struct.unpack("<4sI", read(begin + like.record.count, 8))
        if mark != BEHIND:  # where torch writes the checksum
            return None
        record = Record(window.file, window.offset + begin, like.record.count, crc or None, window.label)
        return replace(like, key=window.key, record=record)


@dataclass
class Opened:
    """Contents of a plain DCP directory.

    Attributes:
        index: What lies where.
        tensors: By key.
        others: Pickled objects by key.
        paths: For keys that DCP flattened: where the value was in the nested dict.
        windows: Every ``torch.save`` file in the directory's files.
    """

    index: Index
    tensors: dict[str, Lazy] = field(default_factory=dict)
    others: dict[str, Window] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)


def open_dcp(path: Path, metadata: Metadata | None = None) -> Opened:
    """The tensors of a plain DCP directory. Local operation.

    Args:
        path: The directory.
        metadata: Its metadata, where that has been read before.

    Raises:
        CheckpointError: The metadata is unreadable, refers to files that are missing, or does not add up.
    """
    metadata = metadata or read_metadata(path)
    file_of = functools.cache(lambda name: file_in(path, name))
    windows: dict[str, list[Window]] = {}
    spans: dict[str, list[tuple[int, int, str]]] = {}
    with unreadable(path, DCP_METADATA):
        for index, place in metadata.storage_data.items():
            window = Window(file_of(place.relative_path), index.fqn, place.offset, place.length)
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(
                    f"{window.key} in {path}: stored with {place.transform_descriptors}",
                    expected="plain bytes",
                )
            spans.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
            windows.setdefault(window.key, []).append(window)
        found = Index.of(metadata)
        others = {k: windows[k][0] for k in metadata.state_dict_metadata if k not in found.tensors}
        paths = dict(metadata.planner_data or {})
        for key in (key for key, path in paths.items() if key != ".".join(map(str, path))):
            raise ValueError(f"{key} is said to be at {paths[key]}")  # DCP joins the one out of the other
        for name, own in spans.items():
            own.sort()
            for (begin, length, _), (other, _, key) in pairwise(own):
                if other < begin + length:
                    raise ValueError(f"{key} at byte {other} of {name}, where another piece is")
    _check_files(path, {name: sum(own[-1][:2]) for name, own in spans.items()})
    all_windows = [w for own in windows.values() for w in own]
    return Opened(found, tensors_of(path, found), others, paths, all_windows)


def tensors_of(path: Path, index: Index) -> dict[str, Lazy]:
    """All tensors of a directory, by key. Local operation.

    Raises:
        CheckpointError: Pieces that do not make up their tensor, or lie in other directories.
    """
    heads: Heads = {}
    file_of = functools.cache(lambda name: file_in(path, name))
    tensors: dict[str, Lazy] = {}
    with unreadable(path, DCP_METADATA):
        for key, rows in index.rows(index.tensors):
            (shape, dtype), chunks = index.tensors[key], []
            for number, begin, length, *box in rows.tolist():
                offsets, sizes = tuple(box[: len(shape)]), tuple(box[len(shape) :])
                window = Window(file_of(index.files[number]), key, begin, length)
                chunks.append((offsets, Piece(window, sizes, dtype, heads)))
            tensors[key] = Chunked(key, shape, dtype, chunks)
    return tensors


def file_in(path: Path, name: str) -> Path:
    """A file of a directory, by the name that the metadata has for it. Local operation.

    Raises:
        CheckpointError: It lies elsewhere.
    """
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise CheckpointError(
            f"{path}: its {DCP_METADATA} refers to {name}",
            expected="files in the directory",
            fix="do not use it: no program that writes checkpoints does that",
        )
    return path / name


def _check_files(path: Path, ends: Mapping[str, int]) -> None:
    """Every file is there, and as long as what it holds."""
    problems, seen = [], listing(path)
    for name, end in sorted(ends.items()):
        file = seen.get(name) or path / name
        if not (name in seen or file.is_file()):
            problems.append(f"{name} is missing")
        elif file.stat().st_size < end:
            problems.append(f"{name}: expected {end} bytes, got {file.stat().st_size}")
    if problems:
        raise CheckpointError(
            f"{path}: damaged checkpoint: {'; '.join(problems[:5])}", fix="copy the whole directory again"
        )
