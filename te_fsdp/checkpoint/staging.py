"""Copies on the host of what is being saved in the background, in memory that is kept for the next save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

__all__ = ["Staging"]

K = TypeVar("K")

#: Allocators of page-locked memory round up to powers of two: pieces of this size waste nothing.
_SLAB = 1 << 28
#: Copies begin at multiples of this, so that any dtype is aligned.
_ALIGNMENT = 64


class Staging:
    """Host memory in a few large slabs, page-locked where a device copies into it. One save uses it at a time."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._pinned = False

    @property
    def bytes(self) -> int:
        """Memory that is held."""
        return sum(slab.numel() for slab in self._slabs)

    def copy(self, tensors: Mapping[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        """Copies of tensors, complete when this returns; what an earlier call returned is overwritten.

        Copies from a device are queued on its current stream, after the kernels that make the values, and
        waited for. Local operation.
        """
        devices = {t.device for t in tensors.values() if t.device.type != "cpu"}
        places, sizes = _pack([t.numel() * t.element_size() for t in tensors.values()])
        self._provide(sizes, pinned=bool(devices))
        copies = {}
        for (key, tensor), (slab, offset) in zip(tensors.items(), places, strict=True):
            size = tensor.numel() * tensor.element_size()
            # A storage of exactly this size: what is stored is the storage, not the view of it.
            storage = self._slabs[slab].untyped_storage()[offset : offset + size]
            copy = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage).view(tensor.shape)  # type: ignore[arg-type]
            copy.copy_(tensor.detach(), non_blocking=True)
            copies[key] = copy
        for device in devices:
            torch.get_device_module(device.type).current_stream(device).synchronize()
        return copies

    def _provide(self, sizes: list[int], *, pinned: bool) -> None:
        """Have slabs of at least these sizes, those of the last time if they are large enough."""
        if pinned != self._pinned:
            self._slabs, self._pinned = [], pinned
        for index, size in enumerate(sizes):
            if index < len(self._slabs) and self._slabs[index].numel() >= size:
                continue
            if index < len(self._slabs):
                self._slabs[index] = torch.empty(
                    0, dtype=torch.uint8, device="cpu"
                )  # freed before the larger one is made
            slab = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._slabs[index : index + 1] = [slab]
        del self._slabs[len(sizes) :]


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
