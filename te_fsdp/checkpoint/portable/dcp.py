"""Directories of PyTorch's distributed checkpoint (DCP): their metadata, and the stored pieces, in one process.

Reading a piece through DCP brings the whole piece into memory, and a piece may be a whole embedding. Here the
header of a piece tells where its bytes lie, and rows are read from there.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import FunctionType
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from te_fsdp.checkpoint.entries import references
from te_fsdp.checkpoint.manifest import DCP_METADATA, Manifest, dtype_name
from te_fsdp.checkpoint.portable.lazy import Chunked, Lazy, Record, Stored, read_bytes
from te_fsdp.checkpoint.portable.torch_files import BEHIND, Window, stored
from te_fsdp.checkpoint.remote import listing
from te_fsdp.checkpoint.sums import DamagedFileError, crc32, view_of, without_collector
from te_fsdp.errors import CheckpointError, shorten

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


class _Properties(TensorProperties):
    """As another torch wrote them: 2.15 added strides at the end, on which earlier ones fail. We read none."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        made: Any = self
        made.__class__ = TensorProperties  # dataclasses of two classes are never equal
        made.__setstate__(state[: _fields_of_properties()])


@functools.cache
def _fields_of_properties() -> int:
    return len(TensorProperties().__getstate__())


class _Unpickler(pickle.Unpickler):
    """Knows the names above. A pickle may also set attributes of the classes that it names: that is undone."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._named: dict[type, dict[str, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        known = name in _KNOWN.get(module, ())
        if not known and module == "torch":
            known = isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in the metadata of a checkpoint")
        found = _Properties if name == "TensorProperties" else super().find_class(module, name)
        if isinstance(found, type):
            self._named.setdefault(found, dict(vars(found)))
        elif isinstance(found, FunctionType):
            found = functools.partial(found)  # attributes are set on this one, then
        return found

    def restore(self) -> list[str]:
        """Put back what the pickle has set on classes; which attributes of which."""
        changed = []
        for one, before in self._named.items():
            for name in [n for n, value in vars(one).items() if before.get(n, _NOTHING) is not value]:
                changed.append(f"{one.__name__}.{name}")
                if name in before:
                    setattr(one, name, before[name])
                else:
                    delattr(one, name)
        return changed


_NOTHING = object()


def unpickle_metadata(data: bytes) -> Metadata:
    """DCP's ``.metadata``, a pickle, read with its own classes alone.

    Raises:
        pickle.UnpicklingError: It names something else, sets attributes of classes, or is damaged. Damaged ones may
            raise anything.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        with without_collector():
            metadata = unpickler.load()
    finally:
        changed = unpickler.restore()
    if changed:
        raise pickle.UnpicklingError(f"it sets {', '.join(changed)}, which metadata never does")
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
        data = ((path if manifest is None else manifest.at(path)) / DCP_METADATA).read_bytes()
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
    """Contents of a DCP directory.

    Attributes:
        metadata: DCP's.
        tensors: By key.
        others: Pickled objects by key.
        paths: For keys that DCP flattened: where the value was in the nested dict.
        windows: Every ``torch.save`` file in the directory's files.
    """

    metadata: Metadata
    tensors: dict[str, Lazy] = field(default_factory=dict)
    others: dict[str, Window] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)


def open_dcp(path: Path, metadata: Metadata | None = None) -> Opened:
    """The tensors of a DCP directory. Local operation.

    Args:
        path: The directory.
        metadata: Its metadata, where that has been read before.

    Raises:
        CheckpointError: The metadata is unreadable, refers to files that are missing, or does not add up.
    """
    metadata = metadata or read_metadata(path)
    opened = Opened(metadata, paths=dict(metadata.planner_data or {}))
    pieces: dict[str, list[tuple[tuple[int, ...] | None, Window]]] = {}
    ends: dict[str, int] = {}
    heads: Heads = {}
    file_of = functools.cache(lambda name: file_in(path, name))
    try:
        for index, place in metadata.storage_data.items():
            window = Window(file_of(place.relative_path), index.fqn, place.offset, place.length)
            if getattr(place, "transform_descriptors", None):
                raise CheckpointError(
                    f"{window.key} in {path}: stored with {place.transform_descriptors}",
                    expected="plain bytes",
                )
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
            pieces.setdefault(window.key, []).append((index.offset, window))
            opened.windows.append(window)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: unreadable .metadata ({type(error).__name__}: {error})",
            fix="the checkpoint is damaged, take an earlier one",
        ) from error
    _check_files(path, ends)
    for key, meta in metadata.state_dict_metadata.items():
        if isinstance(meta, TensorStorageMetadata):
            opened.tensors[key] = _tensor(key, meta, pieces.get(key, []), heads)
        elif isinstance(meta, BytesStorageMetadata):
            opened.others[key] = pieces[key][0][1]
    return opened


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


def _tensor(
    key: str, meta: TensorStorageMetadata, windows: list[tuple[tuple[int, ...] | None, Window]], heads: Heads
) -> Lazy:
    shape, dtype = tuple(meta.size), meta.properties.dtype
    sizes = {tuple(c.offsets): tuple(c.sizes) for c in meta.chunks}
    chunks = []
    for offset, window in windows:
        offsets = tuple(offset or (0,) * len(shape))
        chunks.append((offsets, Piece(window, sizes.get(offsets, shape), dtype, heads)))
    return Chunked(key, shape, dtype, chunks)
