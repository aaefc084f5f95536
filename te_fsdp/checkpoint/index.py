"""Locations of tensors in a checkpoint's files.

DCP's metadata is one pickle with several objects for each stored piece, which a reader has to load entirely. For 405B
parameters on 16,384 ranks that takes a minute and many GB on every loading rank. A save therefore also writes an index
for te_fsdp's readers::

    te_fsdp.index:  block, block, ..., head, table     the table is that of te_fsdp.checkpoint.shard_files
    head:           JSON: the names of the files, and the tensors of each block: key, shape, dtype, number of pieces
    block:          complete tensors, of at least 65,536 pieces together; zlib. A row of int64 for each piece: file,
                    first byte, bytes, offset in each dim, size in each dim; stored by columns, each number as
                    the difference to the previous one
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import io
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.extra import references
from te_fsdp.checkpoint.manifest import DCP_METADATA, INDEX, Manifest, dtype_name, unreadable
from te_fsdp.checkpoint.shard_files import (
    DamagedFileError,
    SummedFile,
    crc32,
    open_checked,
    synced,
    view_of,
    without_collector,
)
from te_fsdp.checkpoint.tensor_entries import Rows, Shape
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.unpickling import TableUnpickler
from te_fsdp.upstream import torch_dtensor as _torch

#: Numbers in a row of the index before those of the dims: file, first byte, bytes.
FIXED = 3
#: Number of pieces at which a block is full.
_ROWS = 1 << 16
#: Key, shape, dtype and number of pieces of a tensor.
_Head = tuple[str, Shape, torch.dtype, int]


# ------------------------------------------------------------------------------------------------------- writing


@dataclass(frozen=True)
class Stored:
    """A tensor and its pieces."""

    shape: Shape
    dtype: torch.dtype
    boxes: Rows  #: (pieces, 2, dims): offset and shape of each
    writers: Rows  #: (pieces, 2): rank that writes it, and its number on that rank


@dataclass
class Encoded:
    """Index and ``.metadata`` of a save. Later saves of the same tensors replace only the mark in it."""

    metadata: bytes
    mark: str  #: Identity of a manifest in the metadata
    pieces: list[bytes]  #: Pieces of the index; the last one is its head

    def write(self, folder: Path, manifest: Manifest) -> None:
        """Write both files, synced to disk, and list them in the manifest. Local operation."""
        # A pickle has the length of each string, so this needs a mark of the same length.
        metadata = self.metadata.replace(self.mark.encode(), manifest.identity.encode())
        with synced(folder / DCP_METADATA) as raw:
            raw.write(metadata)
        manifest.files[DCP_METADATA] = [len(metadata), crc32(metadata)]
        with synced(folder / INDEX) as raw:
            file = SummedFile(raw)
            for piece in self.pieces:
                file.add([piece])
            manifest.files[INDEX] = file.finish(INDEX, manifest.save_id)


def compress_rows(block: Sequence[Rows]) -> bytes:
    """Return the rows of a block's tensors in the form of the index: columns of differences, compressed."""
    width = max(rows.shape[1] for rows in block)
    columns = np.zeros((width, sum(map(len, block))), dtype="<i8")
    begin = 0
    for rows in block:
        columns[: rows.shape[1], begin : begin + len(rows)] = rows.T
        begin += len(rows)
    return zlib.compress(np.diff(columns, axis=1, prepend=0).tobytes(), 1)


def encode(tensors: Mapping[str, Stored], files: list[str], places: list[Rows], mark: str) -> Encoded:
    """Return index and ``.metadata`` of a save. Local operation; rank 0 spends some us for each piece.

    ``files`` and ``places`` are of each rank: a row for each piece that it has written, with its number, first byte and
    bytes. ``mark`` is the identity of the manifest.
    """
    counts = [int(own[:, 0].max(initial=-1)) + 1 for own in places]
    first = np.cumsum([0, *counts])
    locations = np.zeros((first[-1], 2), dtype=np.int64)
    for begin, own in zip(first, places, strict=False):
        locations[begin + own[:, 0]] = own[:, 1:]
    # Equal cuts are one object in the metadata, which halves its size.
    chunks: dict[Any, list[dcp.ChunkStorageMetadata]] = {}
    metadata = Metadata({}, storage_data={}, storage_meta=dcp.StorageMeta(save_id=mark))
    metadata.version = CURRENT_DCP_VERSION
    storage_info, blocks, count = _torch.StorageInfo, list[list[tuple[Any, Rows]]](), _ROWS
    with without_collector():
        for key, stored in tensors.items():
            writers, boxes = stored.writers, stored.boxes
            location_rows = locations[first[writers[:, 0]] + writers[:, 1]]
            layout = boxes.shape, hashlib.blake2b(boxes.tobytes(), digest_size=16).digest()
            if layout not in chunks:
                chunks[layout] = [dcp.ChunkStorageMetadata(*map(torch.Size, box)) for box in boxes.tolist()]
            properties, size = _properties(stored.dtype), torch.Size(stored.shape)
            metadata.state_dict_metadata[key] = dcp.TensorStorageMetadata(properties, size, chunks[layout])
            rows = np.concatenate([writers[:, :1], location_rows, boxes[:, 0], boxes[:, 1]], axis=1)
            for number, (chunk, location) in enumerate(
                zip(chunks[layout], rows[:, :FIXED].tolist(), strict=True)
            ):
                index = MetadataIndex(key, None, number)
                # The constructor would copy it.
                object.__setattr__(index, "offset", chunk.offsets)
                metadata.storage_data[index] = storage_info(files[location[0]], *location[1:])
            if count >= _ROWS:
                blocks.append([])
                count = 0
            blocks[-1].append(((key, stored.shape, dtype_name(stored.dtype), len(rows)), rows))
            count += len(rows)
        heads = [[head for head, _ in block] for block in blocks]
        head = json.dumps({"files": files, "blocks": heads}).encode()
        packed = [compress_rows([rows for _, rows in block]) for block in blocks]
        # Enums are stored by value, because pickles of names differ between releases of Python.
        file = io.BytesIO()
        pickler = pickle.Pickler(file)
        by_value = {enum: lambda member: (type(member), (member.value,)) for enum in _ENUMS}
        pickler.dispatch_table = {**copyreg.dispatch_table, **by_value}
        pickler.dump(metadata)
        return Encoded(file.getvalue(), mark, [*packed, head])


@functools.cache
def _properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties.create_from_tensor(torch.empty(0, dtype=dtype, device="cpu"))


def _unpack(data: memoryview, heads: list[_Head]) -> Iterator[tuple[str, Rows]]:
    """Yield key and rows of each tensor in a block."""
    width, count = FIXED + 2 * max(len(shape) for _, shape, _, _ in heads), sum(head[3] for head in heads)
    # At most one byte more than expected: more is damage, and must not take memory.
    flat = zlib.decompressobj().decompress(data, 8 * width * count + 1)
    columns = np.frombuffer(flat, dtype="<i8").reshape(width, count).cumsum(axis=1)
    begin = 0
    for key, shape, _, rows in heads:
        yield key, columns[: FIXED + 2 * len(shape), begin : begin + rows].T
        begin += rows


# ------------------------------------------------------------------------------------------------------- reading


@dataclass
class Index:
    """Locations of all pieces of a directory."""

    tensors: dict[str, tuple[Shape, torch.dtype]]  #: Shape and dtype by key
    files: list[str]  #: Names, indexed by the numbers in rows
    #: Yield the rows of the given keys that exist: an int64 array (pieces, 3 + 2 * dims), as above. The bytes are
    #: compared with their checksums; raise CheckpointError
    rows: Callable[[Iterable[str]], Iterator[tuple[str, Rows]]]

    def __post_init__(self) -> None:
        if missing := [k for k, (_, dtype) in self.tensors.items() if not isinstance(dtype, torch.dtype)]:
            raise TypeError(f"no dtype of {missing[0]}")

    @classmethod
    def of(cls, metadata: Metadata) -> Index:
        """Return the index for DCP's metadata in memory."""
        saved = {
            k: m for k, m in metadata.state_dict_metadata.items() if isinstance(m, dcp.TensorStorageMetadata)
        }
        names = dict.fromkeys(location.relative_path for location in metadata.storage_data.values())
        files = {name: number for number, name in enumerate(names)}

        def rows(keys: Iterable[str]) -> Iterator[tuple[str, Rows]]:
            for key in (key for key in keys if key in saved):
                table = []
                for number, chunk in enumerate(saved[key].chunks):
                    location = metadata.storage_data[MetadataIndex(key, chunk.offsets, number)]
                    fixed = files[location.relative_path], location.offset, location.length
                    table.append((*fixed, *chunk.offsets, *chunk.sizes))
                yield key, np.array(table, dtype=np.int64).reshape(len(table), -1)

        return cls({k: (tuple(m.size), m.properties.dtype) for k, m in saved.items()}, [*files], rows)


def read_index(path: Path, manifest: Manifest) -> Index:
    """Read the index of a checkpoint, from DCP's metadata if it has no index. Local operation.

    Raise CheckpointError if it is unreadable, has changed, is of another save, or lacks a tensor of the manifest.
    """

    def rows(keys: Iterable[str]) -> Iterator[tuple[str, Rows]]:
        required = set(keys)
        with unreadable(path, INDEX):
            for block, own in blocks:
                for key, table in _unpack(block, own) if any(head[0] in required for head in own) else ():
                    if key not in required:
                        continue
                    # A negative number would select a file from the end of the list, without an error.
                    if len(table) and not 0 <= table[:, 0].min() <= table[:, 0].max() < len(files):
                        raise DamagedFileError(f"it places {key} in a file that it does not list")
                    yield key, table

    if INDEX not in manifest.files:
        with unreadable(path, DCP_METADATA):
            index = Index.of(read_metadata(path, manifest))
    else:
        file, listed = manifest.data_folder(path) / INDEX, manifest.files[INDEX]
        with unreadable(path, INDEX), open_checked(file, listed, manifest.save_id) as stream:
            lengths = [length for length, _ in (stream.pieces or {}).values()]
            data = stream.read(0, lengths, torch.empty(sum(lengths), dtype=torch.uint8, device="cpu"))
            *packed, head = map(view_of, data.split(lengths))
            body = json.loads(bytes(head))
            heads = [
                [(k, tuple(s), getattr(torch, d), n) for k, s, d, n in block] for block in body["blocks"]
            ]
            blocks = list(zip(packed, heads, strict=True))
            files = list(body["files"])
            index = Index({k: (s, d) for block in heads for k, s, d, _ in block}, files, rows)
    problems = problems_of_tensors(manifest, index.tensors)
    damaged(path, problems and [shorten(problems)], "Its manifest and its tensors are from different saves")
    return index


def files_in(path: Path) -> Callable[[str], Path]:
    """Return a function that maps file names to paths; it raises CheckpointError for files outside ``path``."""

    @functools.cache
    def file_of(name: str) -> Path:
        # The metadata comes with the files, and must not make a reader open others.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"{path}: its {DCP_METADATA} refers to {name}",
                expected="files in the directory",
                fix="do not use it: no program that writes checkpoints does this",
            )
        return path / name

    return file_of


def problems_of_tensors(manifest: Manifest, tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> list[str]:
    """Return the manifest's tensors that ``tensors`` lacks, or has with a different shape or dtype. Local."""
    problems = []
    for key, shape, dtype in described_tensors(manifest):
        if shape is not None and not math.prod(shape):
            continue  # DCP stores no chunk for a tensor without elements
        actual_shape, actual_dtype = tensors.get(key, (None, None))
        if actual_shape is None or actual_dtype is None:
            problems.append(f"{key} is missing")
        elif shape is not None and (actual_shape, dtype_name(actual_dtype)) != (tuple(shape), dtype):
            actual = f"{actual_shape} {dtype_name(actual_dtype)}"
            problems.append(f"{key} is {actual} instead of {tuple(shape)} {dtype}")
    return problems


def described_tensors(manifest: Manifest) -> Iterator[tuple[str, list[int] | None, str | None]]:
    """Yield key, shape and dtype of the tensors that a manifest lists, also of empty ones; no shape for components."""
    for name, described in {**manifest.parameters, **manifest.buffers}.items():
        if described.get("format") is None:
            yield f"model.{name}", described["shape"], described["dtype"]
        else:
            yield from ((f"model.{name}:{part}", None, None) for part in described["components"])
    for name in manifest.delayed:
        for key in ("scaling_fwd", "scaling_bwd"):
            yield from ((f"delayed.{name}:{key}.{part}", None, None) for part in ("scale", "amax_history"))
    for name, states in (manifest.optimizer or {"state": {}})["state"].items():
        for key, described in states.items():
            if "dtype" in described:
                yield f"optimizer.state.{name}.{key}", described["shape"], described["dtype"]
    for described in references(manifest.extra):
        yield described["key"], described["shape"], described["dtype"].removeprefix("torch.")


# ------------------------------------------------------------------------------------------------ DCP's metadata


# Older checkpoints without an index, and plain DCP directories, which have no checksum, are read by their
# ``.metadata``. Its contents are validated, and names that metadata does not have are refused.
def read_metadata(path: Path, manifest: Manifest | None = None) -> Metadata:
    """Read DCP's metadata of a directory, after comparing it with the manifest if there is one. Local operation.

    Raise CheckpointError if it is unreadable, has changed, or is of another save.
    """
    with unreadable(path, DCP_METADATA):
        data = (path / DCP_METADATA).read_bytes() if manifest is None else manifest.metadata_in(path)
        metadata = unpickle_metadata(data)
        if manifest is not None:
            manifest.check_identity(getattr(metadata.storage_meta, "save_id", None))
    return metadata


_ENUMS = {v for v in vars(dcp).values() if isinstance(v, type) and issubclass(v, Enum) and v is not Enum}


class _Properties(TensorProperties):
    """Properties written by a different torch: 2.15 added strides at the end, on which earlier versions fail."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        properties: Any = self
        properties.__class__ = TensorProperties  # dataclasses of two classes are never equal
        properties.__setstate__(state[: len(_properties(torch.float32).__getstate__())])


#: Everything in DCP's metadata, in addition to dtypes.
_KNOWN: dict[str, Any] = {
    **{
        f"{dcp.__name__}.{n}": v for n, v in vars(dcp).items() if getattr(v, "__module__", "") == dcp.__name__
    },
    f"{dcp.__name__}.TensorProperties": _Properties,
    "torch.distributed.checkpoint.filesystem._StorageInfo": None,
    "torch.serialization._get_layout": None,
    "torch.Size": None,
    "collections.OrderedDict": None,
    **{
        f"{module}.{cls.__name__}": cls
        for module in ("pathlib", "pathlib._local")  # the second in pickles of Python 3.13
        for cls in (Path, PosixPath, PurePosixPath)
    },
}


def unpickle_metadata(data: bytes) -> Metadata:
    """Unpickle DCP's ``.metadata`` with its own classes only. Damaged data may raise any exception.

    Raises UnpicklingError if the pickle names anything else, or sets attributes of classes.
    """
    with without_collector():
        metadata = TableUnpickler(data, _KNOWN, "the metadata of a checkpoint").load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of DCP's Metadata")
    if absent := {"state_dict_metadata", "planner_data", "storage_data"} - vars(metadata).keys():
        raise pickle.UnpicklingError(f"DCP's Metadata has no {', '.join(sorted(absent))}")
    return metadata
