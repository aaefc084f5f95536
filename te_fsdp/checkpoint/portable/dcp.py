"""Directories of PyTorch's distributed checkpoint (DCP) in one process, read by blocks.

Reading a piece through DCP brings the whole piece into memory, and a piece may be a whole embedding. Here the
header of a piece tells where its bytes lie, and rows are read from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from te_fsdp.checkpoint.portable.lazy import Chunked, Lazy
from te_fsdp.checkpoint.portable.torch_files import Heads, Window, stored
from te_fsdp.checkpoint.reading import read_metadata
from te_fsdp.errors import CheckpointError

__all__ = ["Opened", "Piece", "open_dcp"]


@dataclass
class Piece(Lazy):
    """A rectangle that DCP wrote.

    Attributes:
        window: Its ``torch.save`` file.
        shape: According to DCP's metadata.
        dtype: According to DCP's metadata.
    """

    window: Window
    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.header.rows(first, last)

    @cached_property
    def header(self) -> Lazy:
        """Where its elements lie, read when it is first asked for.

        Raises:
            CheckpointError: Another tensor is there than DCP's metadata says, or none.
        """
        tensor, key = self.window.objects(), self.window.key
        got = (
            (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        )
        if got != (self.shape, self.dtype):
            raise CheckpointError(
                f"{key}: its bytes in {self.window.file}",
                expected=(self.shape, self.dtype),
                got=got,
                fix="the checkpoint is damaged, take an earlier one",
            )
        return stored(tensor, key)

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return self.header.select(index)


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
    by_key: dict[str, list[tuple[tuple[int, ...] | None, Window]]] = {}
    ends: dict[str, int] = {}
    transformed, heads = [], Heads()
    try:
        described = metadata.state_dict_metadata
        for index, place in metadata.storage_data.items():
            name, key, end = place.relative_path, index.fqn, place.offset + place.length
            ends[name] = max(ends.get(name, 0), end)
            window = Window(path / name, key, place.offset, place.length, heads)
            by_key.setdefault(key, []).append((index.offset, window))
            if getattr(place, "transform_descriptors", None):
                transformed.append(f"{key} in {path}: stored with {place.transform_descriptors}")
    except Exception as error:
        raise CheckpointError(
            f"{path}: unreadable .metadata ({type(error).__name__}: {error})",
            fix="the checkpoint is damaged, take an earlier one",
        ) from error
    if transformed:
        raise CheckpointError(transformed[0], expected="plain bytes")
    _check_files(path, ends)
    opened = Opened({}, {}, dict(metadata.planner_data or {}))
    opened.windows = [window for windows in by_key.values() for _, window in windows]
    for key, meta in described.items():
        if isinstance(meta, TensorStorageMetadata):
            opened.tensors[key] = _tensor(key, meta, by_key.get(key, []))
        elif isinstance(meta, BytesStorageMetadata):
            opened.others[key] = by_key[key][0][1]
    return opened


def _check_files(path: Path, ends: Mapping[str, int]) -> None:
    """Every file is there, and as long as what it holds."""
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
    key: str, meta: TensorStorageMetadata, windows: list[tuple[tuple[int, ...] | None, Window]]
) -> Lazy:
    shape, dtype = tuple(meta.size), meta.properties.dtype
    sizes = {tuple(c.offsets): tuple(c.sizes) for c in meta.chunks}
    chunks = []
    for offset, window in windows:
        offsets = tuple(offset or (0,) * len(shape))
        chunks.append((offsets, Piece(window, sizes.get(offsets, shape), dtype)))
    return Chunked(key, shape, dtype, chunks)
