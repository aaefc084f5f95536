"""Tensors that lie in files and are read by blocks of rows, so that no more than a block is in memory.

Every format that te_fsdp reads becomes such tensors, every format that it writes is written from them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint.sums import crc32
from te_fsdp.errors import CheckpointError
from te_fsdp.quantized.components import covering, dequantize_box, needed_components

#: Bytes of a tensor that are in memory at a time (a row at least).
BLOCK_BYTES = 8 << 20
#: Bytes up to which memory is no page's own: to map pages takes longer than to read so little.
_SMALL = 1 << 16


class Lazy:
    """A tensor of known shape and dtype whose rows are read, or computed, when asked for.

    Subclasses have the attributes below and :meth:`rows`.

    Attributes:
        shape: Shape of the whole tensor; a tensor without dims counts as one row.
        dtype: Element type of what :meth:`rows` gives.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Rows ``first`` to ``last`` (exclusive), a contiguous CPU tensor that the caller may change.

        Raises:
            CheckpointError: They cannot be read; names key and file.
        """
        raise AssertionError("subclasses read")

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.rows(0, self.height)

    def select(self, index: int) -> Lazy:
        """One entry of the first dim as a tensor by itself; read whole, unless a subclass can do better."""

        def rows(first: int, last: int) -> torch.Tensor:
            whole = self.rows(index, index + 1)[0]
            return whole[first:last] if whole.ndim else whole

        return Computed(self.shape[1:], self.dtype, rows)

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


def slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Index of a rectangle."""
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def is_tiling(shape: tuple[int, ...], boxes: np.ndarray[Any, Any]) -> bool:
    """Whether boxes cover a shape, each element once: on the grid of all their edges, where cells are few.

    Args:
        shape: Of the whole.
        boxes: int64, (boxes, 2, dims): where each begins, and its shape, which is not empty.
    """
    if len(boxes) == 1:
        return boxes[0].tolist() == [[0] * len(shape), [*shape]]
    starts, ends = boxes[:, 0], boxes.sum(axis=1)
    edges = [np.unique(np.concatenate([starts[:, d], ends[:, d]])) for d in range(len(shape))]
    if any(e[0] != 0 or e[-1] != size for e, size in zip(edges, shape, strict=True)):
        return False
    first = [np.searchsorted(e, starts[:, d]) for d, e in enumerate(edges)]
    last = [np.searchsorted(e, ends[:, d]) for d, e in enumerate(edges)]
    covered = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    if all((b - a == 1).all() for a, b in zip(first, last, strict=True)):  # a cell for each, as a rule
        np.add.at(covered, tuple(first), 1)
    else:
        for low, high in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
            covered[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    return bool((covered == 1).all())


def total_bytes(tensors: Mapping[str, Lazy]) -> int:
    """Bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors.values())


@dataclass
class Computed(Lazy):
    """A tensor whose rows a function gives, from the first to the last (exclusive)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.read(first, last)


@dataclass
class InMemory(Lazy):
    """A tensor that is in memory already."""

    tensor: torch.Tensor
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.tensor.shape), self.tensor.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        part = self.tensor[first:last] if self.shape else self.tensor
        return part.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass
class Record:
    """Bytes of a file that may have a checksum.

    Attributes:
        file: The file.
        offset: Byte at which they begin.
        count: How many.
        crc: CRC-32; ``None`` where it is not known, or has been compared already.
        label: Name, for messages.
    """

    file: Path
    offset: int
    count: int
    crc: int | None
    label: str

    def read(self) -> bytes:
        """All of them.

        Raises:
            CheckpointError: They cannot be read, or have changed.
        """
        data = bytes(read_bytes(self.file, self.offset, self.count, self.label)[: self.count])
        self.check(data)
        return data

    def check(self, data: bytes | bytearray | mmap.mmap | memoryview | None = None) -> None:
        """Compare them with their checksum, once.

        Args:
            data: All of them, where they are in memory; ``None``: they are read, block by block.

        Raises:
            CheckpointError: They cannot be read, or have changed.
        """
        if self.crc is None:
            return
        found, end = 0, self.offset + self.count
        for at in range(self.offset, end, BLOCK_BYTES) if data is None else ():
            count = min(BLOCK_BYTES, end - at)
            found = crc32(memoryview(read_bytes(self.file, at, count, self.label))[:count], found)
        if data is not None:
            found = crc32(memoryview(data)[: self.count])
        if found != self.crc:
            raise CheckpointError(
                f"{self.label} in {self.file}: its contents have changed (CRC-32)",
                fix="the file is damaged: copy it again, or take another one",
            )
        self.crc = None


@dataclass
class Stored(Lazy):
    """A tensor whose elements lie in a file, in the machine's byte order.

    Attributes:
        key: Name, for messages.
        record: The whole storage; its checksum is compared before anything is given out.
        shape: Of the tensor.
        dtype: Of the tensor.
        stride: In elements; ``None`` for a contiguous tensor.
        start: Element of the storage at which the tensor begins.
    """

    key: str
    record: Record
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    start: int = 0

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        shape = self.shape_of(first, last)
        stride, item = self.strides, self.dtype.itemsize
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        file, offset = self.record.file, self.record.offset
        begin = offset + (self.start + (first * stride[0] if stride else 0)) * item
        if len(shape) == 2 and stride[0] == 1 and stride[1] >= self.height > 1:
            # Stored transposed: a piece of each stored row, instead of all that lies between.
            self.record.check()
            places = [(begin + column * stride[1] * item, shape[0] * item) for column in range(shape[1])]
            flat = torch.frombuffer(_read_places(file, places, self.key), dtype=self.dtype)
            return flat.view(shape[1], shape[0]).t().contiguous()
        span = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        data = read_bytes(file, begin, span * item, self.key)
        self.record.check(data if (begin, span * item) == (offset, self.record.count) else None)
        flat = torch.frombuffer(data, dtype=self.dtype)
        return flat.as_strided(shape, stride).contiguous()

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        step, *stride = self.strides
        start = self.start + index * step
        return Stored(self.key, self.record, self.shape[1:], self.dtype, tuple(stride), start)

    @property
    def strides(self) -> tuple[int, ...]:
        """Of the tensor, in elements."""
        if self.stride is not None:
            return self.stride
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


def read_bytes(file: Path, offset: int, count: int, key: str) -> mmap.mmap | bytearray:
    """Bytes of a file.

    Raises:
        CheckpointError: The file is missing, unreadable or too short.
    """
    return _read_places(file, [(offset, count)], key)


def _read_places(file: Path, places: Sequence[tuple[int, int]], key: str) -> mmap.mmap | bytearray:
    """Bytes of several places of a file, given by offset and count, one after the other."""
    total = sum(count for _, count in places)
    # Mapped memory goes back to the system when it is let go. The C library keeps freed blocks of large sizes, and with
    # small objects in between takes new memory for each.
    data = mmap.mmap(-1, total) if total > _SMALL else bytearray(max(1, total))
    view, filled = memoryview(data), 0
    try:
        with file.open("rb", buffering=0) as stream:
            for offset, count in places:
                stream.seek(offset)
                end = filled + count
                while filled < end:
                    got = stream.readinto(view[filled:end])
                    if not got:
                        raise CheckpointError(
                            f"{key}: {file} is too short",
                            expected=f"{offset + count} bytes at least",
                            got=file.stat().st_size,
                            fix="the file is truncated, copy it again",
                        )
                    filled += got
    except OSError as error:
        raise CheckpointError(
            f"{key}: cannot be read from {file} ({error.strerror or error})", fix="check the file"
        ) from error
    return data


@dataclass
class Chunked(Lazy):
    """A tensor in rectangular pieces.

    Attributes:
        key: Name, for messages.
        shape: Of the whole.
        dtype: Of the whole.
        chunks: Offsets in the whole, and piece; together they cover it once.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[tuple[tuple[int, ...], Lazy]]

    def __post_init__(self) -> None:
        have = sum(math.prod(piece.shape) for _, piece in self.chunks)
        if have != math.prod(self.shape) or not self._is_covered():
            raise CheckpointError(
                f"{self.key}: stored pieces",
                expected=f"pieces that cover {self.shape} once",
                got=f"{len(self.chunks)} piece(s) with {have} elements",
                fix="the checkpoint is damaged, take an earlier one",
            )

    def _is_covered(self) -> bool:
        """Whether the pieces cover the tensor once, which have as many elements as it: pieces of rows, or others."""
        boxes = [(tuple(at), tuple(piece.shape)) for at, piece in self.chunks if math.prod(piece.shape)]
        if any(len(at) != len(self.shape) for box in boxes for at in box):
            return False
        row, below = 0, (0,) * (len(self.shape) - 1)
        for at, sizes in sorted(boxes) if self.shape else ():
            if at != (row, *below) or sizes[1:] != self.shape[1:]:
                return is_tiling(self.shape, np.array(boxes, dtype=np.int64))
            row += sizes[0]
        return True

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        if not self.shape:
            return self.chunks[0][1].whole()
        if len(self.chunks) == 1:
            return self.chunks[0][1].rows(first, last)
        result = torch.empty(self.shape_of(first, last), dtype=self.dtype, device="cpu")
        for offsets, piece in self.chunks:
            begin, end = max(first, offsets[0]), min(last, offsets[0] + piece.shape[0])
            if begin < end and math.prod(piece.shape):
                columns = slices(offsets[1:], piece.shape[1:])
                result[(slice(begin - first, end - first), *columns)] = piece.rows(
                    begin - offsets[0], end - offsets[0]
                )
        return result

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        parts = [
            (offsets[1:], piece.select(index - offsets[0]))
            for offsets, piece in self.chunks
            if offsets[0] <= index < offsets[0] + piece.shape[0]
        ]
        return Chunked(self.key, self.shape[1:], self.dtype, parts)


@dataclass
class Stack(Lazy):
    """Tensors of one shape and dtype as one, along a new first dim."""

    parts: Sequence[Lazy]
    shape: tuple[int, ...] = field(init=False)
    dtype: torch.dtype = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype = (len(self.parts), *self.parts[0].shape), self.parts[0].dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return torch.stack([part.whole() for part in self.parts[first:last]])

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return self.parts[index]


@dataclass
class Mapped(Lazy):
    """What a function makes of tensors of one shape, element by element.

    Attributes:
        function: Takes the same rows of each.
        dtype: Of what it gives.
        bases: The tensors.
    """

    function: Callable[..., torch.Tensor]
    dtype: torch.dtype
    bases: tuple[Lazy, ...]
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.bases[0].shape

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.function(*(base.rows(first, last) for base in self.bases))

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return Mapped(self.function, self.dtype, tuple(base.select(index) for base in self.bases))


def cast(base: Lazy, dtype: torch.dtype) -> Lazy:
    """A tensor in another dtype."""
    return Mapped(lambda rows: rows.to(dtype), dtype, (base,))


def with_remainders(upper: Lazy, lower: Lazy) -> Lazy:
    """fp32 main weights that FusedAdam keeps as bf16 weights and the 16 bits that these lack.

    TE rounds the weight to nearest: where the remainder, read as a signed number, is negative, the weight is one
    unit in the last place above the upper half (TE 2.20.2 ``multi_tensor_adam.cu``).

    Args:
        upper: The bf16 weights.
        lower: The int16 remainders.
    """

    def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        lower = lower.to(torch.int32)
        upper = upper.view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
        return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)

    return Mapped(joined, torch.float32, (upper, lower))


@dataclass
class Dequantized(Lazy):
    """The values of a quantized weight.

    Attributes:
        key: Name, for messages.
        shape: Of the weight.
        dtype: That the weight stands for.
        format: The manifest's text, such as ``"mxfp8 kFloat8E4M3"``.
        components: The stored components by name.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    format: str
    components: Mapping[str, Lazy]

    def __post_init__(self) -> None:
        self.needed = needed_components(self.format, list(self.components), self.key)

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`. Reads the blocks that cover these rows."""
        offsets = (first,) + (0,) * (len(self.shape) - 1)
        sizes = (last - first, *self.shape[1:])
        parts = {}
        for name, block in self.needed.items():
            start, size = covering(offsets, sizes, block)
            stored_part = self.components[name]
            parts[name] = (
                stored_part.whole() if block is None else stored_part.rows(start[0], start[0] + size[0])
            )
        return dequantize_box(self.format, parts, self.needed, offsets, sizes).to(self.dtype)
