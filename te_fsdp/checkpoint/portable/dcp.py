"""Directories of PyTorch's distributed checkpoint (DCP) in one process, read by blocks.

Reading a piece through DCP brings the whole piece into memory, and a piece may be a whole embedding. Here the
header of a piece tells where its bytes lie, and rows are read from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from te_fsdp.checkpoint.portable.lazy import Chunked, Lazy, read_bytes
from te_fsdp.checkpoint.portable.pickled import Quantized
from te_fsdp.checkpoint.portable.torch_files import moved, read_objects, records_of, stored
from te_fsdp.checkpoint.reading import read_metadata
from te_fsdp.errors import CheckpointError

__all__ = ["Opened", "Piece", "Window", "open_dcp"]

#: What ``torch.save`` files of a directory hold, by their length and their first member, the pickle: all that comes
#: before the data, and the objects. To list the members of a zip file takes most of the time of a small tensor, and
#: most files differ in the data alone.
Known = dict[tuple[int, bytes], tuple[bytes, Any]]

#: Begins each member of a zip file.
_MEMBER = b"PK\x03\x04"
#: The pickle of one tensor lies in so many bytes.
_HEAD = 1024


@dataclass
class Piece(Lazy):
    """A rectangle that DCP wrote: a ``torch.save`` file inside a file.

    Attributes:
        key: Name of the tensor, for messages.
        file: The file.
        offset: Byte at which it begins.
        length: Its bytes.
        shape: According to DCP's metadata.
        dtype: According to DCP's metadata.
        known: Of the directory, see :data:`Known`.
    """

    key: str
    file: Path
    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    known: Known = field(default_factory=dict, repr=False)
    found: Lazy | None = field(default=None, repr=False)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.header().rows(first, last)

    def header(self) -> Lazy:
        """Where its elements lie, read once.

        Raises:
            CheckpointError: Another tensor is there than DCP's metadata says, or none.
        """
        if self.found is None:
            tensor = self.objects()
            got = (
                (tuple(tensor.shape), tensor.dtype)
                if isinstance(tensor, torch.Tensor)
                else type(tensor).__name__
            )
            if got != (self.shape, self.dtype):
                raise CheckpointError(
                    f"{self.key}: its bytes in {self.file}",
                    expected=(self.shape, self.dtype),
                    got=got,
                    fix="the checkpoint is damaged, take an earlier one",
                )
            self.found = stored(tensor, self.key)
        return self.found

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return self.header().select(index)

    def window(self) -> Window:
        """The ``torch.save`` file."""
        return Window(self.file, self.offset, self.length, self.key, self.known)

    def objects(self) -> Any:
        """What was stored, tensors without data.

        Raises:
            CheckpointError: It cannot be read.
        """
        return self.window().objects()

    def is_quantized(self) -> bool:
        """Whether one of TE's quantized tensors was stored."""
        return isinstance(self.objects(), Quantized)


@dataclass(frozen=True)
class Window:
    """A part of a file: one of the ``torch.save`` files that DCP strings together.

    Attributes:
        file: The file.
        offset: Byte at which it begins.
        length: Its bytes.
        key: Name of what is in it, for messages.
        known: Of the directory, see :data:`Known`.
    """

    file: Path
    offset: int
    length: int
    key: str
    known: Known = field(default_factory=dict, repr=False, compare=False)

    def objects(self) -> Any:
        """What was stored, tensors without data.

        Raises:
            CheckpointError: It cannot be read, or not weights-only.
        """
        label = f"{self.key} in {self.file}"
        head = bytes(read_bytes(self.file, self.offset, min(self.length, _HEAD), self.key))
        end = head.find(_MEMBER, len(_MEMBER))
        begin, objects = self.known.get((self.length, head[:end]), (b"", None))
        if begin and head.startswith(begin):
            found = (
                moved(objects, self.file, self.offset + len(begin), label) if objects is not None else None
            )
            if objects is None or found is not None:
                return found
        objects = read_objects(self.file, label, self.offset, self.length)
        if end > 0 and isinstance(objects, torch.Tensor | None):
            # The data of a tensor come behind all that tells about it, but for its checksum.
            until = objects.record.offset - self.offset if isinstance(objects, torch.Tensor) else end  # type: ignore[missing-attribute]
            self.known[self.length, head[:end]] = head[:until], objects
        return objects

    def changed(self) -> bool:
        """Whether its contents contradict the checksums that ``torch.save`` put beside them. Reads all of it."""
        try:
            for record in records_of(self.file, self.key, self.offset, self.length).values():
                record.check()
        except CheckpointError:
            return True
        return False


@dataclass
class Opened:
    """Contents of a DCP directory.

    Attributes:
        tensors: By key.
        others: Pickled objects by key.
        paths: For keys that DCP flattened: where the value was in the nested dict.
        windows: Every ``torch.save`` file in the directory's files.
    """

    tensors: dict[str, Lazy]
    others: dict[str, Window]
    paths: dict[str, tuple[Any, ...]]
    windows: list[Window] = field(default_factory=list)


def open_dcp(path: Path) -> Opened:
    """The tensors of a DCP directory. Local operation.

    Raises:
        CheckpointError: The metadata is unreadable, refers to files that are missing, or does not add up.
    """
    metadata = read_metadata(path)
    try:
        described, places = metadata.state_dict_metadata, metadata.storage_data
        by_key: dict[str, list[tuple[MetadataIndex, Any]]] = {}
        for index, place in places.items():
            by_key.setdefault(index.fqn, []).append((index, place))
    except Exception as error:
        raise CheckpointError(
            f"{path}: unreadable .metadata ({type(error).__name__}: {error})",
            fix="the checkpoint is damaged, take an earlier one",
        ) from error
    _check_files(path, places.values())
    opened, known = Opened({}, {}, dict(metadata.planner_data or {})), {}
    for index, place in places.items():
        file = path / place.relative_path
        opened.windows.append(Window(file, place.offset, place.length, index.fqn, known))
    for key, meta in described.items():
        if isinstance(meta, TensorStorageMetadata):
            opened.tensors[key] = _tensor(path, key, meta, by_key.get(key, []), known)
        elif isinstance(meta, BytesStorageMetadata):
            (_, place), *_ = by_key[key]
            opened.others[key] = Window(path / place.relative_path, place.offset, place.length, key, known)
    return opened


def _check_files(path: Path, places: Iterable[Any]) -> None:
    """Every file is there, and as long as what it holds."""
    ends: dict[str, int] = {}
    for place in places:
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    problems = []
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size < end:
            problems.append(f"{name}: expected {end} bytes, got {file.stat().st_size}")
    if problems:
        raise CheckpointError(
            f"{path}: damaged checkpoint: {'; '.join(problems[:5])}", fix="copy the whole directory again"
        )


def _tensor(
    path: Path, key: str, meta: TensorStorageMetadata, places: list[tuple[MetadataIndex, Any]], known: Known
) -> Lazy:
    dtype, sizes = meta.properties.dtype, {tuple(c.offsets): tuple(c.sizes) for c in meta.chunks}
    chunks = []
    for index, place in places:
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{key} in {path}: stored with {place.transform_descriptors}", expected="plain bytes"
            )
        offsets = tuple(index.offset or (0,) * len(meta.size))
        shape = sizes.get(offsets, tuple(meta.size))
        piece = Piece(key, path / place.relative_path, place.offset, place.length, shape, dtype, known)
        chunks.append((offsets, piece))
    return Chunked(key, tuple(meta.size), dtype, chunks)
