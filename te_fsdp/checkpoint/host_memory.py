"""Host memory for tensors that are saved or loaded.

Tensors are first copied to host memory that is kept between saves. A copy of a small tensor costs a device call and a
call of torch in Python. Tensors of one dtype, shape and device are therefore stacked on their device, and copied and
written as one. DCP's ``DefaultStager`` also keeps memory, but copies whole storages one by one: 8,000 tensors of 64
elements take it 0.12 s of CPU time the second time, against 0.015 s here. Views of half a tensor take it twice the
memory, and it page-locks each copy separately.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, TypeVar

import torch

K = TypeVar("K")
#: Allocators of page-locked memory round up to powers of two: pieces of this size waste nothing.
_SLAB = 1 << 28
#: Copies begin at multiples of this, so that any dtype is aligned.
_ALIGNMENT = 64
#: Most bytes of a tensor that is stacked with others, or read into separate memory; bytes of a full stack.
_SMALL, _STACK = 1 << 16, 1 << 23
#: Least bytes of memory in large pages; bytes of a stretch of memory that is handed out in parts.
_LARGE, _STRETCH = 1 << 21, 1 << 25


@dataclass
class Block(Generic[K]):
    """A large tensor, or small tensors of one dtype, shape and device, each with its key. Any strides."""

    keys: list[K]
    tensors: list[torch.Tensor]

    @property
    def bytes(self) -> int:
        """Return the size of the tensors in bytes."""
        return len(self.tensors) * self.tensors[0].nbytes

    @property
    def is_on_host(self) -> bool:
        """Return whether the tensors are in host memory."""
        return self.tensors[0].is_cpu

    def rows(self) -> torch.Tensor:
        """Return the tensors as rows of one tensor on their device; a view for a single tensor."""
        return self.tensors[0].unsqueeze(0) if len(self.tensors) == 1 else torch.stack(self.tensors)


def blocks_of(tensors: Iterable[tuple[K, torch.Tensor]]) -> list[Block[K]]:
    """Group tensors that can be copied and written as one. Local operation; moves no data."""
    blocks: list[Block[K]] = []
    unfilled: dict[tuple[torch.dtype, torch.Size, torch.device], Block[K]] = {}
    for key, tensor in tensors:
        layout = tensor.dtype, tensor.shape, tensor.device
        block = unfilled.get(layout)
        # Stacks are limited: the stacked copy takes memory of the device.
        if block is None or block.bytes >= _STACK or tensor.nbytes > _SMALL:
            block = unfilled[layout] = Block([], [])
            blocks.append(block)
        block.keys.append(key)
        block.tensors.append(tensor.detach() if tensor.requires_grad else tensor)
    return blocks


def flat_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return each row of a tensor flat and contiguous in memory; copy only if necessary. Local operation."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # A "contiguous" tensor of one element may have any stride, and then cannot be viewed as bytes.
    if flat.is_contiguous() and flat.stride(1) == 1:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)


def aligned(count: int) -> int:
    """Return a number of bytes rounded up to the alignment of any dtype."""
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def host_memory(count: int, *, pinned: bool = False) -> torch.Tensor:
    """Return new uninitialized uint8 memory on the host, in large pages if the system supports them.

    The system maps fresh memory page by page at the first write: 0.4 s of CPU time per GiB in pages of 4 KiB, and 0.1 s
    in pages of 2 MiB. Reading as many bytes from a file takes as long.
    """
    if pinned or count < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # the system has small pages only
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive


class HostMemory:
    """Allocator of host memory for tensors of one load: parts of the spare slabs first, then of new stretches."""

    def __init__(self, spare: Iterable[torch.Tensor] = ()) -> None:
        self._spare, self._rest = [*spare], host_memory(0)

    def take(self, count: int) -> torch.Tensor:
        """Return ``count`` bytes as uint8. A stretch is freed with the last of its parts. Local operation."""
        # A small part would keep all memory of its stretch alive.
        if count <= _SMALL:
            return host_memory(count)
        while aligned(count) > len(self._rest):
            self._rest = self._spare.pop() if self._spare else host_memory(max(aligned(count), _STRETCH))
        taken, self._rest = self._rest[:count], self._rest[aligned(count) :]
        return taken


class Staging:
    """Host memory in a few large slabs, page-locked if a device copies into it. One save uses it at a time."""

    def __init__(self) -> None:
        self.slabs: list[torch.Tensor] = []
        self._pinned = False

    def copy(self, blocks: list[Block[K]]) -> list[torch.Tensor]:
        """Return each block as rows on the host, complete; the results of an earlier call are overwritten.

        Copies from a device are queued on its current stream, after the kernels that compute the values. Local
        operation.
        """
        devices = {block.tensors[0].device for block in blocks if not block.is_on_host}
        # Page-locked memory is slow to allocate, and useless for tensors that are on the host.
        if self._pinned != bool(devices):
            self.slabs, self._pinned = [], bool(devices)
        copies, count = [], 0
        for count, slab_blocks in enumerate(_by_slab(blocks), 1):
            size = sum(aligned(block.bytes) for block in slab_blocks)
            if len(self.slabs) < count or len(self.slabs[count - 1]) < size:
                del self.slabs[count - 1 : count]  # freed before the larger one is made
                self.slabs.insert(count - 1, host_memory(size, pinned=self._pinned))
            memory = self.slabs[count - 1]
            for block in slab_blocks:
                rows = block.rows()
                copies.append(memory[: block.bytes].view(rows.dtype).view(rows.shape))
                copies[-1].copy_(rows, non_blocking=True)
                memory = memory[aligned(block.bytes) :]
        # A smaller model than before: its save returns the memory that it does not use.
        del self.slabs[count:]
        for device in devices:
            # The copies must be complete: after this the training may overwrite the tensors.
            torch.get_device_module(device.type).current_stream(device).synchronize()
        return copies

    def through(self, blocks: list[Block[K]]) -> Iterator[tuple[Block[K], torch.Tensor]]:
        """Yield blocks in order with their rows on the host, valid until the next block. Copy one slab at a time."""
        for is_on_host, neighbors in groupby(blocks, lambda block: block.is_on_host):
            for group in _by_slab(neighbors):
                rows = map(Block.rows, group) if is_on_host else self.copy(group)
                yield from zip(group, rows, strict=True)


def _by_slab(blocks: Iterable[Block[K]]) -> Iterator[list[Block[K]]]:
    return batches(blocks, lambda block: aligned(block.bytes), _SLAB)


def batches(items: Iterable[K], bytes_of: Callable[[K], int], limit: int) -> Iterator[list[K]]:
    """Yield lists of consecutive items of at most ``limit`` bytes together; a larger item alone."""
    batch, size = list[K](), 0
    for item in items:
        count = bytes_of(item)
        if batch and size + count > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += count
    if batch:
        yield batch
