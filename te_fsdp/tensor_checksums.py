"""Summaries of a tensor's values, by which checks compare ranks."""

from __future__ import annotations

import torch

from te_fsdp.collectives.agreement import bits_of, row_checksums
from te_fsdp.upstream import te as _te


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a position-dependent checksum of a tensor's bytes.

    It is an int64 scalar on the tensor's device, halved so that it can be negated.
    """
    return row_checksums(_flat(tensor).unsqueeze(0)).squeeze(0)


def is_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether all values of a tensor are equal, as a bool tensor on its device."""
    integers = bits_of(_flat(tensor))
    return (integers == integers[:1]).all()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # Use the values of quantized tensors, because padding of their scale buffers is uninitialized.
    tensor = tensor.dequantize() if _te.is_quantized(tensor) else tensor
    return tensor.detach().contiguous().view(-1)
