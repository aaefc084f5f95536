"""Tensors whose rows are read or computed on demand, so that no more than a block of rows is in memory.

Every format that te_fsdp reads becomes :class:`Lazy` tensors. Every format that it writes is written from them.
Safetensors files are read by the ``safetensors`` package, which maps them, and written here block by block: the
package's writer needs all tensors in memory.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint.host_memory import batches, host_memory
from te_fsdp.checkpoint.manifest import Tick, unreadable
from te_fsdp.checkpoint.shard_files import DamagedFileError, damaged_value, elements_of
from te_fsdp.checkpoint.storage import is_remote
from te_fsdp.checkpoint.tensor_entries import Shape, boxes_of, is_tiling
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import slices
from te_fsdp.quantized.components import covering, dequantize_box, needed_components
from te_fsdp.unpickling import get_member_of_class
from te_fsdp.upstream import te as _te

#: Bytes of a tensor that are in memory at a time (at least one row).
BLOCK_BYTES = 8 << 20
_COPY = "the file is damaged or truncated; copy it again"
_JOIN = "torch's HuggingFaceStorageWriter joins ranks' parts with enable_consolidation=True"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Bytes of a record above which it is mapped. Below it a read costs less than a mapping.
_MAPPED = 1 << 16
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Lazy:
    """A tensor of known shape and dtype whose rows are read or computed on demand. A scalar has one row."""

    def __init__(self, shape: Shape, dtype: torch.dtype, read: Callable[[int, int], torch.Tensor]) -> None:
        self.shape, self.dtype, self._read = shape, dtype, read

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return rows ``first`` to ``last`` (exclusive) as a new contiguous CPU tensor.

        Raise CheckpointError, which names key and file, if they cannot be read.
        """
        return self._read(first, last)

    def full(self) -> torch.Tensor:
        """Return all rows."""
        return self.rows(0, self.height)

    def on_device(self) -> torch.Tensor:
        """Return all rows on the device that stores them; the caller must not change them."""
        return self.full()

    def select(self, index: int) -> Lazy:
        """Return the lazy tensor at an index of the first dim, as ``tensor[index]``.

        The first read of its rows loads it, and the read of its last row frees it: read the rows in order.
        """
        loaded: InMemory | None = None

        def read(first: int, last: int) -> torch.Tensor:
            nonlocal loaded
            tensor = loaded or InMemory(self.rows(index, index + 1)[0])
            loaded = tensor if last < tensor.height else None
            return tensor.rows(first, last)

        return Lazy(self.shape[1:], self.dtype, read)

    @property
    def height(self) -> int:
        """Return the number of rows."""
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        """Return the size of the unsharded tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def blocks(self, budget: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """Yield first and last row of each block of at most ``budget`` bytes; none for an empty tensor."""
        if not self.bytes:
            return
        step = max(1, budget // (self.bytes // self.height))
        for first in range(0, self.height, step):
            yield first, min(first + step, self.height)


def total_bytes(tensors: Mapping[str, Lazy]) -> int:
    """Return the size of all tensors in bytes."""
    return sum(tensor.bytes for tensor in tensors.values())


class Stack(Lazy):
    """Tensors of one shape and dtype, stacked along a new first dim."""

    def __init__(self, parts: Sequence[Lazy]) -> None:
        self.parts, self.dtype = parts, parts[0].dtype
        self.shape: Shape = (len(parts), *parts[0].shape)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return torch.stack([part.full() for part in self.parts[first:last]])

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return self.parts[index]


class InMemory(Lazy):
    """A tensor in memory, or in a mapped file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        part = (self.tensor[first:last] if self.shape else self.tensor).detach()
        return host_memory(part.nbytes).view(part.dtype).view(part.shape).copy_(part)

    def on_device(self) -> torch.Tensor:
        """See :meth:`Lazy.on_device`."""
        return self.tensor.detach()

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return InMemory(self.tensor[index])


@dataclass
class DcpRecord(Lazy):
    """A record in a DCP file: the ``torch.save`` bytes of a rectangle of a tensor, or of another object.

    Shape and dtype are those of DCP's metadata. ``check`` compares the bytes with the checksum of ``torch.save``, if
    it wrote one, when they are first read.
    """

    file: Path
    key: str
    offset: int
    length: int
    shape: Shape = ()
    dtype: torch.dtype = torch.uint8
    check: bool = False

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        with unreadable(self.label, "record of torch.save", _COPY):
            part = InMemory(self.tensor_in(self._read_bytes(), check=self.check)).rows(first, last)
            # Once: a tensor is read in blocks of rows, and each would sum the whole record again.
            self.check = False
            return part

    @property
    def label(self) -> str:
        """Return the name of the record in messages."""
        return f"{self.key} in {self.file}"

    def tensor_in(self, data: torch.Tensor, *, check: bool) -> torch.Tensor:
        """Return the tensor in the bytes of the record, uint8 on the host; a view if possible. Thread-safe.

        Raise CheckpointError if shape or dtype differs from the metadata, and for damage that ``check`` finds.
        """
        value: Any = elements_of(data, self.dtype, self.shape, check=check)
        if value is None:  # written by a different release of torch, or a view of a larger tensor
            value = self._unpickled(data, check=check)
        is_tensor = isinstance(value, torch.Tensor)
        actual = (tuple(value.shape), value.dtype) if is_tensor else type(value).__name__
        if actual != (self.shape, self.dtype):
            label = f"{self.key}: its bytes in {self.file}"
            raise damaged_value(label, (self.shape, self.dtype), actual)
        return value

    def load(self) -> Any:
        """Return the stored object, as :func:`load_weights_only`; raise CheckpointError for damage."""
        with unreadable(self.label, "record of torch.save", _COPY):
            return self._unpickled(self._read_bytes(), check=True)

    def _unpickled(self, data: torch.Tensor, *, check: bool) -> Any:
        file = io.BytesIO(data.numpy())  # type: ignore[arg-type]
        if check:
            check_zip(file)
            file.seek(0)
        return load_weights_only(file, self.label)

    def has_changed(self) -> bool:
        """Return whether the contents contradict the checksums that ``torch.save`` wrote. Reads all of it."""
        try:
            check_zip(io.BytesIO(self._read_bytes().numpy()))  # type: ignore[arg-type]
        except (OSError, ValueError, zipfile.BadZipFile, DamagedFileError):
            return True
        return False

    def _read_bytes(self) -> torch.Tensor:
        """Return the bytes as uint8 on the host, mapped if the file is local and the record is large."""
        data: Any
        if is_remote(self.file):
            data = bytearray(self.file.call("cat_file", start=self.offset, end=self.offset + self.length))
        elif self.length > _MAPPED:
            # Copy-on-write: torch warns about memory that is read-only.
            data = np.memmap(self.file, np.uint8, "c", self.offset, (self.length,))
        else:
            data = np.fromfile(self.file, np.uint8, self.length, offset=self.offset)
        if len(data) != self.length:
            raise DamagedFileError(f"expected {self.length} bytes, got {len(data)}")
        return torch.frombuffer(data, dtype=torch.uint8)


class RefusedClassError(CheckpointError):
    """A ``torch.save`` file with objects of classes that torch does not load weights-only."""


def load_weights_only(file: Path | io.BytesIO, label: str) -> Any:
    """Return the objects of a ``torch.save`` file, read weights-only on the CPU; a local file is mapped.

    TE registers the classes of its tensors with torch when it is imported, which happens here if the file needs them.
    Raise RefusedClassError for other classes.
    """
    try:
        # [Note: enums in pickles] of unpickling.py: TE's tensors contain members of enums.
        with torch.serialization.safe_globals([(get_member_of_class, "builtins.getattr")]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    except pickle.UnpicklingError as error:
        rewind = file.seek if isinstance(file, io.BytesIO) else lambda _: 0
        rewind(0)
        # From the opcodes, so nothing in the file runs.
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        cause: Exception = error
        # Its import takes seconds, so it happens only if the file contains TE's classes.
        if any(name.startswith("transformer_engine") for name in names) and not _te.is_loaded():
            try:
                _te.te()
                rewind(0)
                return load_weights_only(file, label)
            except ImportError as missing:
                cause = missing
        if not names:
            raise
        raise RefusedClassError(
            f"{label}: cannot be read weights-only ({type(cause).__name__})",
            expected="tensors, TransformerEngine's quantized tensors and plain containers",
            got=f"an object of {shorten(names)}",
            why="Other objects in a pickle may run code. TransformerEngine's tensors need TransformerEngine",
            fix="load it with torch, and save a plain state_dict() with torch.save, or te_fsdp.checkpoint.save",
        ) from cause


def check_zip(file: Any) -> None:
    """Compare the members of a ``torch.save`` file with their checksums; raise zipfile.BadZipFile for a difference.

    A checksum of zero is not compared: torch writes it if its checksums are disabled.
    """
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            # zipfile compares no checksum that is ``None``.
            member.CRC = member.CRC or None  # type: ignore[bad-assignment]
        if name := archive.testzip():
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {name!r}")


@dataclass
class Chunked(Lazy):
    """A tensor in rectangular pieces, given with their offsets in it. They cover it once."""

    key: str
    shape: Shape
    dtype: torch.dtype
    chunks: Sequence[tuple[Shape, Lazy]]
    #: Whether the directory says that rows are in the order of the unsharded module (:mod:`te_fsdp.boxed_dtensor`)
    in_original_order: bool = False

    def __post_init__(self) -> None:
        boxes = [(tuple(offsets), tuple(t.shape)) for offsets, t in self.chunks if math.prod(t.shape)]
        is_placed = all(len(offsets) == len(self.shape) for box in boxes for offsets in box)
        if not is_placed or not is_tiling(self.shape, boxes_of(boxes, self.shape)):
            actual = f"{len(self.chunks)} with {sum(math.prod(sizes) for _, sizes in boxes)} elements"
            raise damaged_value(f"{self.key}: stored pieces", f"pieces that cover {self.shape} once", actual)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        if not self.shape:
            return self.chunks[0][1].full()
        parts = []
        for (start, *other_offsets), piece in self.chunks:
            begin, end = max(first, start), min(last, start + piece.shape[0])
            if begin < end and math.prod(piece.shape):
                slices_in_rows = (slice(begin - first, end - first), *slices(other_offsets, piece.shape[1:]))
                parts.append((slices_in_rows, piece, begin - start, end - start))
        # The usual case of a load onto the same mesh. Pieces tile the tensor, so that this one has all columns.
        if len(parts) == 1:
            return parts[0][1].rows(*parts[0][2:])
        result = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype, device="cpu")
        for slices_in_rows, piece, begin, end in parts:
            result[slices_in_rows] = piece.rows(begin, end)
        return result


def mapped(function: Callable[..., torch.Tensor], dtype: torch.dtype, *bases: Lazy) -> Lazy:
    """Return a tensor whose rows are ``function`` of the same rows of tensors of one shape, element by element."""
    read = lambda first, last: function(*(base.rows(first, last) for base in bases))  # noqa: E731
    return Lazy(bases[0].shape, dtype, read)


def dequantized(
    key: str, shape: Shape, dtype: torch.dtype, format: str, components: Mapping[str, Lazy]
) -> Lazy:
    """Return the values of a quantized weight of a manifest's format, such as ``"mxfp8 kFloat8E4M3"``.

    Raise CheckpointError if the components do not determine the values.
    """
    needed = needed_components(format, list(components), key)

    def rows(first: int, last: int) -> torch.Tensor:
        offsets, sizes = (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
        values = {}
        for name, block in needed.items():  # the blocks that cover these rows
            start, size = covering(offsets, sizes, block)
            component = components[name]
            values[name] = component.full() if block is None else component.rows(start[0], start[0] + size[0])
        return dequantize_box(format, values, needed, offsets, sizes).to(dtype)

    return Lazy(shape, dtype, rows)


# --------------------------------------------------------------------------------------------------- safetensors


def is_safetensors(path: Path) -> bool:
    """Return whether a path is a safetensors file or a folder of them."""
    if path.is_dir():
        return (path / INDEX).is_file() or any(p.suffix == ".safetensors" for p in path.iterdir())
    return path.suffix == ".safetensors"


def open_safetensors(path: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    """Return tensors and metadata of a file, or of a folder with an index or one file; CheckpointError for damage.

    Of several files without an index, ``model.safetensors`` is read, as ``transformers`` does.
    """
    if not path.is_dir():
        return _open_file(path)
    if (path / INDEX).is_file():
        tensors, metadata, problems = dict[str, Lazy](), dict[str, str](), list[str]()
        with unreadable(path / INDEX, "index", _COPY):
            file_of = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
            if not file_of:
                raise DamagedFileError("its weight_map is empty")
            if (path / _SINGLE).exists() and _SINGLE not in file_of.values():
                raise CheckpointError(
                    f"{path}: weights of two models",
                    expected=f"{_SINGLE}, or {INDEX} with its files",
                    got=f"both, and the index does not name {_SINGLE}",
                    why="transformers reads the single file, other programs read the index",
                    fix=f"remove the older one: {_SINGLE}, or the index and its files",
                )
            for name in sorted(set(file_of.values())):
                # An index comes with the weights, and must not make a reader open other files.
                if Path(name).name != name:
                    raise DamagedFileError(f"it names {name}, a file outside of the folder")
                in_file, file_metadata = _open_file(path / name)
                unlisted = [key for key in in_file if file_of.get(key) != name]
                problems += [f"{key} is in {name} but not listed there" for key in unlisted]
                tensors, metadata = tensors | in_file, metadata | file_metadata
            problems += [f"{key} is not in {file_of[key]}" for key in file_of.keys() - tensors.keys()]
            if problems:
                raise DamagedFileError(shorten(sorted(problems), 5, "; "))
        return {key: tensors[key] for key in file_of}, metadata
    files = sorted(path.glob("*.safetensors"))
    if not files:
        weight_files = [f.name for f in sorted(path.iterdir()) if f.suffix in (".bin", ".pt", ".pth")]
        raise CheckpointError(
            f"{path}: a folder without weights",
            expected=f"*.safetensors files, with {INDEX} if there are several",
            got=f"no *.safetensors file{f', but {shorten(weight_files, 3)}' if weight_files else ''}",
            fix="download the weights into it (hf download NAME --local-dir FOLDER), or name the folder that contains "
            "them; convert torch.save files with te-fsdp ckpt convert",
        )
    if len(files) == 1:
        return _open_file(files[0])
    # Other files are the same weights in a different form. An adapter changes the model.
    if path / _SINGLE in files and not any(file.name.startswith("adapter_") for file in files):
        return _open_file(path / _SINGLE)
    raise CheckpointError(
        f"{path}: a folder of safetensors files",
        expected=f"{INDEX}, or one file",
        got=f"{shorten([file.name for file in files], 3)} without an index",
        fix=f"add the index, or name one file; {_JOIN}",
    )


def _open_file(path: Path) -> tuple[dict[str, Lazy], dict[str, str]]:
    from safetensors import safe_open

    if not path.is_file():
        fix = "check the path; for a model on the Hugging Face hub, run hf download NAME --local-dir FOLDER"
        raise CheckpointError(f"{path}: no such file", fix=fix)
    # Open the file first: safetensors calls a file that this user may not read missing.
    with (
        unreadable(path, "safetensors file", _COPY),
        path.open("rb"),
        safe_open(path, framework="pt") as file,
    ):
        metadata = file.metadata() or {}
        # torch's HuggingFaceStorageWriter writes one such file for each rank.
        if "DCP_SHARDING_INFO" in metadata and path.name.startswith("shard-"):
            raise CheckpointError(f"{path}: one rank's parts of tensors", expected="full tensors", fix=_JOIN)
        # In the order of the file, so that reading all of them is sequential.
        return {key: InMemory(file.get_tensor(key)) for key in file.offset_keys()}, metadata


def write_file(path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], tick: Tick) -> None:
    """Write or overwrite a safetensors file with metadata in its header; not atomic, not synced. Local operation."""
    write_header(path, tensors, metadata)
    with path.open("ab") as file:
        for tensor in tensors.values():
            for first, last in tensor.blocks():
                block = tensor.rows(first, last).reshape(-1).view(torch.uint8)
                file.write(block.numpy().data)
                tick(len(block))


def write_header(path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str]) -> None:
    """Write or overwrite a safetensors file without its tensors, whose bytes are appended in order. Local operation."""
    header, begin = dict[str, Any](__metadata__={"format": "pt", **metadata}), 0
    for key, tensor in tensors.items():
        dtype, end = _DTYPES.get(tensor.dtype), begin + tensor.bytes
        if dtype is None:
            raise CheckpointError(
                f"{key}: safetensors does not support its dtype",
                expected=", ".join(_DTYPES.values()),
                got=tensor.dtype,
                fix="convert it (te-fsdp ckpt convert has --dtype), or write a different format",
            )
        header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # readers map the file, and expect aligned data
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded)


def write_folder(
    folder: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], tick: Tick, shard_bytes: int
) -> list[str]:
    """Write ``model.safetensors``, or shards and their index, into a folder; return the names of the files."""
    files = assign_files(tensors, ([key] for key in tensors), shard_bytes)
    for file, names in files.items():
        write_file(folder / file, {name: tensors[name] for name in names}, metadata, tick)
        metadata = {}  # in the first file only
    return [*files, *write_index(folder, tensors, files)]


def assign_files(
    tensors: Mapping[str, Lazy], inseparable: Iterable[Sequence[str]], shard_bytes: int
) -> dict[str, list[str]]:
    """Return the tensors of each file, in order. Names of one list of ``inseparable`` are in the same file."""
    groups = batches(inseparable, lambda names: sum(tensors[name].bytes for name in names), shard_bytes)
    shards = [[*chain(*group)] for group in groups]
    if len(shards) < 2:
        return {_SINGLE: [*chain(*shards)]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": names for n, names in enumerate(shards, 1)}


def write_index(folder: Path, tensors: Mapping[str, Lazy], files: Mapping[str, Sequence[str]]) -> list[str]:
    """Write the index of a folder with several files; return its name, or nothing for one file."""
    if len(files) == 1:
        return []
    file_of = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes(tensors)}, "weight_map": file_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [INDEX]
