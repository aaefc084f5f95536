"""Weak references to tensors with their versions, to recognize unchanged tensors later."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from te_fsdp.upstream import torch_dtensor as _torch


class TensorVersion(NamedTuple):
    """A weak reference to a gradient, and the number of writes to it, to detect later whether it is unchanged."""

    gradient: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def now(cls, gradients: Sequence[torch.Tensor | None]) -> list[TensorVersion | None]:
        """Return the present versions of several gradients. Local operation."""
        pairs = zip(gradients, _torch.versions_of(gradients), strict=True)
        return [None if g is None else cls(weakref.ref(g), version) for g, version in pairs]

    @staticmethod
    def are_same(
        versions: Sequence[TensorVersion | None], gradients: Sequence[torch.Tensor | None]
    ) -> list[bool]:
        """Return for each gradient whether it is the recorded tensor, unwritten, or still ``None``. Local operation."""
        together = zip(versions, gradients, _torch.versions_of(gradients), strict=True)
        return [
            gradient is None if seen is None else seen.gradient() is gradient and seen.version == version
            for seen, gradient, version in together
        ]


class WeightVersions(NamedTuple):
    """Versions of the low-precision parameters of an optimizer."""

    parameters: list[torch.Tensor]
    versions: list[int]
    count: int  #: Number of all parameters of the optimizer
