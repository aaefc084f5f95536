"""Tensors that lie in files and are read by blocks of rows, so that no more than a block is in memory.

Every format that te_fsdp reads becomes such tensors, every format that it writes is written from them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from te_fsdp.checkpoint.index import is_tiling
from te_fsdp.checkpoint.sums import crc32
from te_fsdp.errors import CheckpointError
from te_fsdp.layout import slices
from te_fsdp.quantized.components import covering, dequantize_box, needed_components

#: Bytes of a tensor that are in memory at a time (a row at least).
BLOCK_BYTES = 8 << 20
#: Bytes up to which memory is no page's own: to map pages takes longer than to read so little.
_SMALL = 1 << 16


class Lazy:
    """A tensor of known shape and dtype whose rows are read, or computed, when asked for; without dims it has one."""

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


def total_bytes(tensors: Mapping[str, Lazy]) -> int:
    """Bytes of all of them."""
    return sum(tensor.bytes for tensor in tensors.values())


def as_bytes(tensor: Lazy) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block."""
    for first, last in tensor.blocks():
        block = tensor.rows(first, last).contiguous()
        yield block.reshape(-1).view(torch.uint8).numpy().data


@dataclass
class Computed(Lazy):
    """A tensor whose rows a function gives; another one an entry of the first dim, where that spares reading."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], torch.Tensor]
    pick: Callable[[int], Lazy] | None = None

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        return self.read(first, last)

    def select(self, index: int) -> Lazy:
        """See :meth:`Lazy.select`."""
        return super().select(index) if self.pick is None else self.pick(index)


class Stack(Computed):
    """Tensors of one shape and dtype as one, along a new first dim."""

    def __init__(self, parts: Sequence[Lazy]) -> None:
        shape, dtype = (len(parts), *parts[0].shape), parts[0].dtype
        read = lambda first, last: torch.stack([part.whole() for part in parts[first:last]])  # noqa: E731
        super().__init__(shape, dtype, read, parts.__getitem__)


class InMemory(Lazy):
    """A tensor that is in memory already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tuple(tensor.shape), tensor.dtype

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        part = self.tensor[first:last] if self.shape else self.tensor
        return part.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass
class Record:
    """Bytes of a file, and their CRC-32; ``None`` where it is not known, or has been compared already."""

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
        """Compare them with their checksum, once; ``data`` is all of them, or they are read, block by block.

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
        stride: In elements.
        start: Element of the storage at which the tensor begins.
    """

    key: str
    record: Record
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    start: int = 0

    def rows(self, first: int, last: int) -> torch.Tensor:
        """See :meth:`Lazy.rows`."""
        shape = self.shape_of(first, last)
        stride, item = self.stride, self.dtype.itemsize
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
        step, *stride = self.stride
        start = self.start + index * step
        return Stored(self.key, self.record, self.shape[1:], self.dtype, tuple(stride), start)


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
    """A tensor in rectangular pieces, given with their offsets in the whole, which they cover once."""

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


def _mapped(function: Callable[..., torch.Tensor], dtype: torch.dtype, *bases: Lazy) -> Lazy:
    """What a function makes of the same rows of tensors of one shape, element by element."""
    return Computed(
        bases[0].shape,
        dtype,
        lambda first, last: function(*(base.rows(first, last) for base in bases)),
        lambda index: _mapped(function, dtype, *(base.select(index) for base in bases)),
    )


def cast(base: Lazy, dtype: torch.dtype) -> Lazy:
    """A tensor in another dtype."""
    return _mapped(lambda rows: rows.to(dtype), dtype, base)


def with_remainders(upper: Lazy, lower: Lazy) -> Lazy:
    """fp32 main weights that FusedAdam keeps as bf16 weights (``upper``) and the 16 bits that these lack, as int16.

    TE rounds the weight to nearest: where the remainder, read as a signed number, is negative, the weight is one
    unit in the last place above the upper half (TE 2.20.2 ``multi_tensor_adam.cu``).
    """

    def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
        lower = lower.to(torch.int32)
        upper = upper.view(torch.int16).to(torch.int32) - (lower < 0).to(torch.int32)
        return ((upper << 16) | (lower & 0xFFFF)).view(torch.float32)

    return _mapped(joined, torch.float32, upper, lower)


def dequantized(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, format: str, components: Mapping[str, Lazy]
) -> Lazy:
    """The values of a quantized weight whose format is a manifest's text, such as ``"mxfp8 kFloat8E4M3"``.

    Raises:
        CheckpointError: A format that cannot be dequantized, or components that are missing.
    """
    needed = needed_components(format, list(components), key)

    def rows(first: int, last: int) -> torch.Tensor:
        offsets, sizes = (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
        parts = {}
        for name, block in needed.items():  # the blocks that cover these rows
            start, size = covering(offsets, sizes, block)
            part = components[name]
            parts[name] = part.whole() if block is None else part.rows(start[0], start[0] + size[0])
        return dequantize_box(format, parts, needed, offsets, sizes).to(dtype)

    return Computed(shape, dtype, rows)
