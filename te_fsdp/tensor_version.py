"""Recognize a tensor later: weak references to tensors, and how often each had been written to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from te_fsdp.upstream import torch_dtensor as _torch

if TYPE_CHECKING:
    import torch


class TensorVersion(NamedTuple):
    """A gradient at some time, if it lives, and how often it had been written to: to tell later whether it is that."""

    gradient: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def now(cls, gradients: Sequence[torch.Tensor | None]) -> list[TensorVersion | None]:
        """Several as they are now. Local operation."""
        together = zip(gradients, _torch.versions_of(gradients), strict=True)
        return [
            None if gradient is None else cls(weakref.ref(gradient), version)
            for gradient, version in together
        ]

    @staticmethod
    def are_same(
        seen: Sequence[TensorVersion | None], gradients: Sequence[torch.Tensor | None]
    ) -> list[bool]:
        """Whether gradients are those that were seen, unchanged; where none was seen, whether there is none. Local."""
        together = zip(seen, gradients, _torch.versions_of(gradients), strict=True)
        return [
            gradient is None if one is None else one.gradient() is gradient and one.version == version
            for one, gradient, version in together
        ]
