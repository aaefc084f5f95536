"""Many tensors in one piece of memory, so that one collective moves them all; and how a tensor is cut into rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Buffer", "Rows"]


@dataclass(frozen=True)
class Buffer:
    """Where tensors lie in one piece of memory, one after the other.

    Attributes:
        sizes: Elements of each.
        align: Each begins at a multiple of so many elements, so that kernels may read several at once.
        more: Elements behind the last one, for flags.
    """

    sizes: tuple[int, ...]
    align: int = 1
    more: int = 0

    @functools.cached_property
    def rooms(self) -> tuple[int, ...]:
        """Elements that each takes."""
        return tuple([-(-size // self.align) * self.align for size in self.sizes])

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return sum(self.rooms) + self.more

    def pieces(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """Views of each tensor's elements, in the last dim of ``memory``. Local operation."""
        start = 0
        for size, room in zip(self.sizes, self.rooms, strict=True):
            yield memory[..., start : start + size]
            start += room

    def pack(
        self,
        tensors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        device: torch.device,
        more: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The tensors in new memory, by one kernel. Local operation.

        Args:
            tensors: Of at most so many elements as :attr:`sizes` says; what is missing is filled with zeros, ``None``
                wholly.
            dtype: Of the memory; tensors of another one are cast.
            device: Where.
            more: What lies behind them, of :attr:`more` elements.

        Returns:
            1-D, :attr:`numel` elements.
        """
        held = [0 if tensor is None else tensor.numel() for tensor in tensors]
        gaps = [room - numel for room, numel in zip(self.rooms, held, strict=True)]
        # One for all: they are views of it.
        zeros = torch.zeros(max(gaps, default=0), dtype=dtype, device=device)
        found = [zeros[:0]]
        for tensor, gap in zip(tensors, gaps, strict=True):
            if tensor is not None:
                found.append(tensor.reshape(-1).to(dtype))
            if gap:
                found.append(zeros[:gap])
        if more is not None:
            found.append(more)
        return torch.cat(found)


@dataclass(frozen=True)
class Rows:
    """How a tensor is cut over ranks along one dim: as ``torch.chunk`` cuts, the last ranks have fewer rows or none.

    Attributes:
        shape: Of the whole tensor.
        dim: The dim that is cut.
        ranks: Over how many.
    """

    shape: torch.Size
    dim: int
    ranks: int

    @functools.cached_property
    def step(self) -> int:
        """Rows of each rank, but for the last ones."""
        return -(-self.shape[self.dim] // self.ranks)

    @functools.cached_property
    def numel(self) -> int:
        """Elements that each rank sends or receives: its rows, padded to :attr:`step`."""
        rows = self.shape[self.dim]
        return self.step * (math.prod(self.shape) // rows) if rows else 0

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of rows."""
        return self.shape[self.dim] == self.step * self.ranks

    def pairs(self, whole: torch.Tensor, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same rows in a whole tensor and in ``flat``, of shape (ranks, :attr:`numel`). Local operation.

        One pair where all ranks have equally many rows, else one for each rank that has some; what pads the rows of the
        last ranks in ``flat`` is in none.
        """
        if self.is_even:
            rows = whole.unflatten(self.dim, (self.ranks, self.step)).movedim(self.dim, 0)
            yield rows, flat.view(rows.shape)
            return
        for rank, rows in enumerate(whole.split(self.step, self.dim)):
            yield rows, flat[rank, : rows.numel()].view(rows.shape)
