"""Tensors that lie in files and are read by blocks of rows, so that no more than a block is in memory; safetensors.

Every format that te_fsdp reads becomes such tensors, every format that it writes is written from them.

A safetensors file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, first and last
byte), and the tensors' bytes one after the other. Of the package ``safetensors``, ``save_file`` takes tensors that are
all in memory, and ``safe_open``, which tells no offsets, maps the file: one that is cut short meanwhile, or a disk that
fails, ends the process by SIGBUS. What the package refuses in a header is refused here as well.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint.index import is_tiling
from te_fsdp.checkpoint.manifest import Tick, unreadable
from te_fsdp.checkpoint.shard_files import DamagedFileError, crc32
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import slices
from te_fsdp.quantized.components import covering, dequantize_box, needed_components

#: Bytes of a tensor that are in memory at a time (a row at least).
BLOCK_BYTES = 8 << 20
_COPY = "the file is damaged or truncated, copy it again"
_JOIN = "torch's HuggingFaceStorageWriter joins ranks' parts with enable_consolidation=True"
#: Bytes up to which memory is no page's own: to map pages takes longer than to read so little.
_SMALL = 1 << 16
INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Lazy:
    """A tensor of known shape and dtype whose rows are read, or computed, when asked for; without dims it has one."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[int, int], torch.Tensor]
    ) -> None:
        self.shape, self.dtype, self._read = shape, dtype, read

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` to ``last`` (exclusive), a contiguous CPU tensor that the caller may change.

        CheckpointError, which names key and file, where they cannot be read.
        """
        return self._read(first, last)

    def whole(self) -> torch.Tensor:
        """All rows."""
        return self.rows(0, self.height)

    def on_device(self) -> torch.Tensor:
        """Return all rows on the device that stores them; the caller must not change them."""
        return self.whole()

    def select(self, index: int) -> Lazy:
        """One entry of the first dim as a tensor by itself, in memory while its rows are read in order."""
        entry: InMemory | None = None

        def read(first: int, last: int) -> torch.Tensor:
            nonlocal entry
            whole = entry or InMemory(self.rows(index, index + 1)[0])
            entry = whole if last < whole.height else None
            return whole.rows(first, last)

        return Lazy(self.shape[1:], self.dtype, read)

    @property
    def height(self) -> int:
        """Number of rows."""
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, budget: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """First and last row of each block of at most ``budget`` bytes; none for an empty tensor."""
        if not self.bytes:
            return
        step = max(1, budget // (self.bytes // self.height))
        for first in range(0, self.height, step):
            yield first, min(first + step, self.height)

    def shape_of(self, first: int, last: int) -> tuple[int, ...]:
        """Shape of some rows."""
        return (last - first, *self.shape[1:]) if self.shape else ()


def total_bytes(tensors: Mapping[str, Lazy]) -> int:
    """Bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors.values())


def as_bytes(tensor: Lazy) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block."""
    for first, last in tensor.blocks():
        block = tensor.rows(first, last).contiguous()
        yield block.reshape(-1).view(torch.uint8).numpy().data


class Stack(Lazy):
    """Tensors of one shape and dtype as one, along a new first dim."""

    def __init__(self, parts: Sequence[Lazy]) -> None:
        self.parts, self.dtype = parts, parts[0].dtype
        self.shape: tuple[int, ...] = (len(parts), *parts[0].shape)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return torch.stack([part.whole() for part in self.parts[first:last]])

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return self.parts[index]


class InMemory(Lazy):
    """A tensor that is in memory already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        part = self.tensor[first:last] if self.shape else self.tensor
        return part.detach().cpu().clone(memory_format=torch.contiguous_format)

    def on_device(self) -> torch.Tensor:
        """See :meth:`Lazy.on_device`."""
        return self.tensor.detach()

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return InMemory(self.tensor[index])


@dataclass
class Record:
    """Bytes of a file, and their CRC-32; ``None`` where it is not known, or has been compared already.

    Both methods raise CheckpointError where they cannot be read, or have changed.
    """

    file: Path
    offset: int
    count: int
    crc: int | None
    label: str

    def read(self) -> bytes:
        """All of them."""
        data = bytes(read_bytes(self.file, self.offset, self.count, self.label))
        self.check(data)
        return data

    def check(self, data: bytes | bytearray | mmap.mmap | memoryview | None = None) -> None:
        """Compare them with their checksum, once; ``data`` is all of them, or they are read, block by block."""
        if self.crc is None:
            return
        found, end = 0, self.offset + self.count
        if data is not None:
            found = crc32(data)
        else:
            for at in range(self.offset, end, BLOCK_BYTES):
                found = crc32(read_bytes(self.file, at, min(BLOCK_BYTES, end - at), self.label), found)
        if found != self.crc:
            raise CheckpointError(
                f"{self.label} in {self.file}: its contents have changed (CRC-32)",
                fix="the file is damaged: copy it again, or take another one",
            )
        self.crc = None


@dataclass
class Stored(Lazy):
    """A tensor whose elements lie in a file, in the machine's byte order; ``stride`` and ``start`` are in elements.

    The record is the whole storage; its checksum is compared before anything is given out.
    """

    key: str
    record: Record
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    start: int = 0

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        shape, stride, item = self.shape_of(first, last), self.stride, self.dtype.itemsize
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        record = self.record
        begin = record.offset + (self.start + (first * stride[0] if stride else 0)) * item
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        data = read_bytes(record.file, begin, span * item, self.key)
        record.check(data if (begin, span * item) == (record.offset, record.count) else None)
        return torch.frombuffer(data, dtype=self.dtype).as_strided(shape, stride).contiguous()


def read_bytes(file: Path, offset: int, count: int, key: str) -> mmap.mmap | bytearray:
    """Bytes of a file; CheckpointError: they cannot be read."""
    # Mapped memory goes back to the system when it is let go. The C library keeps freed blocks of large sizes, and with
    # small objects in between takes new memory for each.
    data = mmap.mmap(-1, count) if count > _SMALL else bytearray(count)
    try:
        with io.BufferedReader(file.open("rb", buffering=0)) as stream:  # of a remote one no more than this
            stream.seek(offset)
            got = stream.readinto(data)
    except OSError as error:
        raise CheckpointError(
            f"{key}: cannot be read from {file} ({error.strerror or error})", fix="check the file"
        ) from error
    if got != count:
        raise CheckpointError(
            f"{key}: {file} is too short",
            expected=f"{count} bytes from byte {offset}",
            got=got,
            fix="the file is truncated, copy it again",
        )
    return data


@dataclass
class Chunked(Lazy):
    """A tensor in rectangular pieces, given with their offsets in the whole, which they cover once."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[tuple[tuple[int, ...], Lazy]]
    #: Whether the directory says that rows are in the order of the unsharded module (:mod:`te_fsdp.boxed_dtensor`)
    in_original_order: bool = False

    def __post_init__(self) -> None:
        boxes = [(tuple(at), tuple(piece.shape)) for at, piece in self.chunks if math.prod(piece.shape)]
        have, dims = sum(math.prod(sizes) for _, sizes in boxes), len(self.shape)
        fits = have == math.prod(self.shape) and all(len(at) == dims for box in boxes for at in box)
        if not fits or (boxes and not is_tiling(self.shape, np.array(boxes, dtype=np.int64))):
            raise CheckpointError(
                f"{self.key}: stored pieces",
                expected=f"pieces that cover {self.shape} once",
                got=f"{len(self.chunks)} piece(s) with {have} elements",
                fix="the checkpoint is damaged, take an earlier one",
            )

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        if len(self.chunks) == 1:
            return self.chunks[0][1].rows(first, last)
        result = torch.empty(self.shape_of(first, last), dtype=self.dtype, device="cpu")
        for (at, *below), piece in self.chunks:
            begin, end = max(first, at), min(last, at + piece.shape[0])
            if begin < end and math.prod(piece.shape):
                place = (slice(begin - first, end - first), *slices(below, piece.shape[1:]))
                result[place] = piece.rows(begin - at, end - at)
        return result


def mapped(function: Callable[..., torch.Tensor], dtype: torch.dtype, *bases: Lazy) -> Lazy:
    """What a function makes of the same rows of tensors of one shape, element by element."""
    read = lambda first, last: function(*(base.rows(first, last) for base in bases))  # noqa: E731
    return Lazy(bases[0].shape, dtype, read)


def dequantized(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, format: str, components: Mapping[str, Lazy]
) -> Lazy:
    """The values of a quantized weight whose format is a manifest's text, ``"mxfp8 kFloat8E4M3"``; CheckpointError."""
    needed = needed_components(format, list(components), key)

    def rows(first: int, last: int) -> torch.Tensor:
        offsets, sizes = (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
        parts = {}
        for name, block in needed.items():  # the blocks that cover these rows
            start, size = covering(offsets, sizes, block)
            part = components[name]
            parts[name] = part.whole() if block is None else part.rows(start[0], start[0] + size[0])
        return dequantize_box(format, parts, needed, offsets, sizes).to(dtype)

    return Lazy(shape, dtype, rows)


# --------------------------------------------------------------------------------------------------- safetensors


def is_safetensors(path: Path) -> bool:
    """Whether a path is a safetensors file or a folder of them."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(p.suffix == ".safetensors" for p in path.iterdir())
    return path.suffix == ".safetensors"


def open_safetensors(path: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Tensors and metadata of a file, or of a folder with an index or with one file; CheckpointError: damaged."""
    if not path.is_dir():
        return _open_file(path)
    if (path / INDEX).is_file():
        return _open_sharded(path / INDEX)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        other = [file.name for file in sorted(path.iterdir()) if file.suffix in (".bin", ".pt", ".pth")]
        raise CheckpointError(
            f"{path}: a folder without weights",
            expected=f"*.safetensors files, of several {INDEX} too",
            got=f"no *.safetensors file{f', but {shorten(other, 3)}' if other else ''}",
            fix="download the weights into it (hf download NAME --local-dir FOLDER), or name the folder that holds "
            "them; te-fsdp ckpt convert makes safetensors of torch.save files",
        )
    if len(files) != 1:
        raise CheckpointError(
            f"{path}: a folder of safetensors files",
            expected=f"{INDEX}, or one file",
            got=f"{len(files)} files without an index",
            fix=f"add the index, or name one file; {_JOIN}",
        )
    return _open_file(files[0])


def _open_sharded(index: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    tensors: dict[str, Lazy] = {}
    metadata: dict[str, str] = {}
    problems = []
    with unreadable(index, "index", _COPY):
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not where:
            raise DamagedFileError("it names no tensor and no file")
        for name in sorted(set(where.values())):
            if Path(name).name != name:
                raise DamagedFileError("a file outside of the folder")
            found, more = _open_file(index.parent / name)
            metadata |= more
            problems += [
                f"{key} is in {name} but not listed as such" for key in found if where.get(key) != name
            ]
            tensors |= found
        problems += [f"{key} is not in {where[key]}" for key in where.keys() - tensors.keys()]
        if problems:
            raise DamagedFileError(shorten(sorted(problems), 5, "; "))
    return {key: tensors[key] for key in where}, metadata


def _open_file(path: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    try:
        size = path.stat().st_size
    except OSError as error:
        fix = "a model of the Hugging Face hub is downloaded first: hf download NAME --local-dir FOLDER"
        raise CheckpointError(f"{path}: no such file", fix=f"check the path; {fix}") from error
    with unreadable(path, "header", _COPY):
        (length,) = struct.unpack("<Q", read_bytes(path, 0, 8, "header"))
        if length > min(size - 8, 100_000_000):  # the package's own limit
            raise DamagedFileError(f"one of {length} bytes in a file of {size}")
        header = json.loads(bytes(read_bytes(path, 8, length, "header")))
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that is no text")
        if "DCP_SHARDING_INFO" in metadata and path.name.startswith("shard-"):
            raise CheckpointError(f"{path}: one rank's parts of tensors", expected="whole tensors", fix=_JOIN)
        tensors = {key: _tensor(path, key, 8 + length, described) for key, described in header.items()}
        records, end = [tensor.record for tensor in tensors.values()], 8 + length
        for record in sorted(records, key=lambda record: record.offset):
            if record.offset != end and record.count:
                raise DamagedFileError(f"{record.label} begins at byte {record.offset} instead of {end}")
            end = max(end, record.offset + record.count)
        if end != size:
            raise DamagedFileError(f"of {end} bytes, in a file of {size}")
    return dict(tensors), metadata


def _tensor(path: Path, key: str, begin: int, described: Mapping[str, Any]) -> Stored:
    shape, (first, last) = tuple(described["shape"]), described["data_offsets"]
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"{key} has the shape {shape} and lies at {first} to {last}")
    dtype = _DTYPES.get(described["dtype"])
    if dtype is None:
        raise ValueError(f"{key} has the unknown dtype {described['dtype']!r}")
    if math.prod(shape) * dtype.itemsize != last - first:
        raise ValueError(f"{key} of shape {shape} does not fit its {last - first} bytes")
    record = Record(path, begin + first, last - first, None, key)
    return Stored(key, record, shape, dtype, tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))


def write_file(path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], tick: Tick) -> None:
    """Write or overwrite a safetensors file, neither atomic nor synced, with texts for its header. Local operation."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    names, at = {dtype: name for name, dtype in _DTYPES.items()}, 0
    for key, tensor in tensors.items():
        if tensor.dtype not in names:
            raise CheckpointError(
                f"{key}: safetensors cannot hold it", expected=", ".join(_DTYPES), got=tensor.dtype
            )
        end = at + tensor.bytes
        header[key] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for block in as_bytes(tensor):
                file.write(block)
                tick(len(block))


def write_folder(
    folder: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], tick: Tick, shard_bytes: int
) -> list[str]:
    """:func:`write_file` of ``model.safetensors``, or of shards and their index, into a folder; returns their names."""
    files = deal(tensors, ([key] for key in tensors), shard_bytes)
    for n, (file, names) in enumerate(files.items()):
        write_file(folder / file, {name: tensors[name] for name in names}, {} if n else metadata, tick)
    return [*files, *write_index(folder, tensors, files)]


def deal(
    tensors: Mapping[str, Lazy], together: Iterable[Sequence[str]], shard_bytes: int
) -> dict[str, list[str]]:
    """Names of tensors by file, in order. Those ``together`` go into one, larger than ``shard_bytes`` if these are."""
    shards: list[list[str]] = [[]]
    filled = 0
    for names in together:
        size = sum(tensors[name].bytes for name in names)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, 1)}


def write_index(folder: Path, tensors: Mapping[str, Lazy], files: Mapping[str, Sequence[str]]) -> list[str]:
    """Write the index of a folder with several files, given with their names; returns its name, none for one file."""
    if len(files) == 1:
        return []
    where = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes(tensors)}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [INDEX]
