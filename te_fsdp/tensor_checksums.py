"""Checksums of a tensor's values, which are compared between ranks or files."""

from __future__ import annotations

import torch

from te_fsdp.upstream import te as _te

# Odd multiplier of a linear congruential generator (Knuth): mixes positions for checksums.
_MULTIPLIER = 6364136223846793005
# Words per block: each needs 24 bytes while its checksum is computed, and embeddings have up to 1e9 words.
_PIECE = 1 << 23


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a position-dependent checksum of a tensor's bytes.

    It is an int64 scalar on the tensor's device, halved so that it can be negated.
    """
    return row_checksums(_flat(tensor).unsqueeze(0)).squeeze(0)


def is_constant(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether all values of a tensor are equal, as a bool tensor on its device."""
    integers = _bits_of(_flat(tensor))
    return (integers == integers[:1]).all()


def row_checksums(rows: torch.Tensor) -> torch.Tensor:
    """Return a position-dependent int64 checksum per row of a plain, contiguous (rows, elements) tensor. Local."""
    integers = _bits_of(rows)
    if integers.element_size() == 8:
        # An even weight would shift the sign of an 8-byte word out of the sum.
        integers = integers.view(torch.int32)
    total = torch.zeros(len(integers), dtype=torch.int64, device=rows.device)
    size = max(1, _PIECE // max(1, len(integers)))
    for start in range(0, integers.shape[1], size):
        piece = integers[:, start : start + size]
        weights = torch.arange(start + 1, start + 1 + piece.shape[1], dtype=torch.int64, device=rows.device)
        # A linear function of the position is not enough: biases after Adam's first step have only two
        # distinct values, and many such patterns have equal sums of positions.
        weights.mul_(_MULTIPLIER)
        weights.bitwise_xor_(weights >> 32).mul_(_MULTIPLIER)
        total += (weights * piece).sum(dim=1)
    # Halved, so that its negative can be represented.
    return total // 2


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View the bits of a plain, contiguous tensor as integers of the same size. Local operation."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(sizes.get(tensor.element_size(), torch.int64))


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # Use the values of quantized tensors, because padding of their scale buffers is uninitialized.
    tensor = tensor.dequantize() if _te.is_quantized(tensor) else tensor
    return tensor.detach().contiguous().view(-1)
