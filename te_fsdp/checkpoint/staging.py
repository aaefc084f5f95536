"""Tensors on their way to the files: those of one kind together, and copies on the host in memory that is kept.

A copy of a small tensor costs a call to the device each, and so does each call of torch in Python. So tensors of one
dtype, shape and device are stacked where they are, and copied and written as one.

DCP's ``DefaultStager`` keeps memory too, but copies whole storages one by one. 8,000 tensors of 64 elements take it
0.12 s of CPU time the second time, against 0.015 s here; views of half a tensor take it twice the memory, since the
other half is copied along; and it page-locks each copy by itself.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

__all__ = ["Block", "Staging", "blocks_of", "flat_rows", "host_memory"]

K = TypeVar("K")

#: Allocators of page-locked memory round up to powers of two: pieces of this size waste nothing.
_SLAB = 1 << 28
#: Copies begin at multiples of this, so that any dtype is aligned.
_ALIGNMENT = 64
#: Bytes of a tensor that is stacked with others, and of a stack.
_SMALL, _STACK = 1 << 16, 1 << 23
#: Bytes from which memory comes in large pages: at least one lies in it, wherever it begins.
_LARGE = 1 << 22
#: Bytes of a large tensor on the host that a thread copies at a time, and threads beyond which memory is the limit.
_PART, _MOST_THREADS = 1 << 24, 8


@dataclass
class Block(Generic[K]):
    """A large tensor, or small ones of one dtype and shape on one device.

    Attributes:
        keys: Of each.
        tensors: Any strides.
    """

    keys: list[K]
    tensors: list[torch.Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensors as rows of one."""
        return (len(self.tensors), *self.tensors[0].shape)

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return len(self.tensors) * self.tensors[0].nbytes

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tensors[0].device

    def rows(self) -> torch.Tensor:
        """The tensors as rows of one, where they are; a view if it is one alone."""
        return self.tensors[0].unsqueeze(0) if len(self.tensors) == 1 else torch.stack(self.tensors)

    def parts(self, rows: torch.Tensor) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """What is to be copied into which part of the rows: several threads may share a large tensor."""
        first = self.tensors[0]
        if len(self.tensors) > 1 or first.nbytes <= _PART:
            yield self.tensors, rows
            return
        step = max(1, _PART * len(first) // first.nbytes)
        yield from (([part], into) for part, into in zip(first.split(step), rows.split(step, 1), strict=True))


def blocks_of(tensors: Iterable[tuple[K, torch.Tensor]]) -> list[Block[K]]:
    """Put tensors together that can be copied and written as one. Local operation, moves nothing."""
    blocks: list[Block[K]] = []
    open_: dict[tuple[torch.dtype, torch.Size, torch.device], Block[K]] = {}
    for key, tensor in tensors:
        kind = tensor.dtype, tensor.shape, tensor.device
        block = open_.get(kind)
        if block is None or block.bytes >= _STACK or tensor.nbytes > _SMALL:
            block = open_[kind] = Block([], [])
            blocks.append(block)
        block.keys.append(key)
        block.tensors.append(tensor.detach() if tensor.requires_grad else tensor)
    return blocks


def flat_rows(rows: torch.Tensor) -> torch.Tensor:
    """Each row of a tensor flat, one behind the other in memory; copies where they are not. Local operation."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    # A "contiguous" tensor of one element may have any stride, and then cannot be viewed as bytes.
    return (
        flat
        if flat.is_contiguous() and flat.stride(1) == 1
        else flat.clone(memory_format=torch.contiguous_format)
    )


def host_memory(count: int) -> torch.Tensor:
    """New memory on the host, uint8, with whatever lies in it; in large pages where the system has them.

    The system gives fresh memory away page by page when it is first written, 0.4 s of CPU time per GiB in pages of
    4 KiB and 0.1 s in pages of 2 MiB: as much as it takes to read as many bytes from a file.
    """
    if count < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system that has none gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory alive


class Staging:
    """Host memory in a few large slabs, page-locked where a device copies into it. One save uses it at a time."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._pinned = False

    @property
    def bytes(self) -> int:
        """Memory that is held."""
        return sum(slab.numel() for slab in self._slabs)

    def copy(self, blocks: list[Block[K]]) -> list[torch.Tensor]:
        """Each block as rows on the host, complete when this returns; what an earlier call returned is overwritten.

        Copies from a device are queued on its current stream, after the kernels that make the values, and
        waited for. Local operation.
        """
        devices = {block.device for block in blocks if block.device.type != "cpu"}
        places, sizes = _pack([block.bytes for block in blocks])
        self._provide(sizes, pinned=bool(devices))
        copies = []
        for block, (slab, offset) in zip(blocks, places, strict=True):
            memory = self._slabs[slab][offset : offset + block.bytes]
            copies.append(memory.view(block.tensors[0].dtype).view(block.shape))
            if block.device.type != "cpu":
                copies[-1].copy_(block.rows(), non_blocking=True)
        _copy_on_host(
            part
            for block, rows in zip(blocks, copies, strict=True)
            if block.device.type == "cpu"
            for part in block.parts(rows)
        )
        for device in devices:
            torch.get_device_module(device.type).current_stream(device).synchronize()
        return copies

    def through(self, blocks: list[Block[K]]) -> Iterator[tuple[Block[K], torch.Tensor]]:
        """Blocks, in their order, with their rows on the host until the next is asked for; at most a slab is copied."""
        waiting: list[Block[K]] = []
        for block in blocks:
            on_host = block.device.type == "cpu"
            if waiting and (on_host or sum(b.bytes for b in waiting) + block.bytes > _SLAB):
                yield from zip(waiting, self.copy(waiting), strict=True)
                waiting = []
            if on_host:
                yield block, block.rows()
            else:
                waiting.append(block)
        if waiting:
            yield from zip(waiting, self.copy(waiting), strict=True)

    def _provide(self, sizes: list[int], *, pinned: bool) -> None:
        """Have slabs of at least these sizes, those of the last time if they are large enough."""
        if pinned != self._pinned:
            self._slabs, self._pinned = [], pinned
        for index, size in enumerate(sizes):
            if index < len(self._slabs) and self._slabs[index].numel() >= size:
                continue
            del self._slabs[index : index + 1]  # freed before the larger one is made
            slab = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else host_memory(size)
            self._slabs.insert(index, slab)
        del self._slabs[len(sizes) :]


def _copy_on_host(parts: Iterable[tuple[list[torch.Tensor], torch.Tensor]]) -> None:
    """Copy tensors into rows, both on the host, by as many threads as there are cores for each process here.

    One core copies 3 to 5 GiB a second, less than a tenth of what the memory of a server can give.
    """

    def copy(part: tuple[list[torch.Tensor], torch.Tensor]) -> None:  # releases the interpreter
        tensors, rows = part
        if len(tensors) > 1:
            torch.stack(tensors, out=rows)
        else:
            rows.copy_(tensors[0])

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # torchrun's number of processes of this host; torch may have threads of its own for each copy.
    threads = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // torch.get_num_threads()
    if threads < 2:
        for part in parts:
            copy(part)
        return
    with ThreadPoolExecutor(min(threads, _MOST_THREADS), "te_fsdp copy") as pool:
        for _ in pool.map(copy, parts):
            pass  # raises what went wrong


def _pack(sizes: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """Slab and offset of each piece in turn, and the sizes of the slabs; a large piece has a slab of its own."""
    places, slabs = [], [0]
    for size in sizes:
        room = -(-size // _ALIGNMENT) * _ALIGNMENT
        if slabs[-1] and slabs[-1] + room > _SLAB:
            slabs.append(0)
        places.append((len(slabs) - 1, slabs[-1]))
        slabs[-1] += room
    return places, slabs
