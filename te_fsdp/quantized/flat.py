"""Several buffers in one, and no flat copies: what every kind of quantized shard asks of FSDP2."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from te_fsdp import _torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Piece", "keep_no_flat_shard", "pack_flat", "unpack_flat"]

# Kernels and vectorised copies want aligned buffers; 256 bytes is what torch's CUDA allocator aligns to
# within a block.
_ALIGNMENT = 256

#: First byte, shape and dtype of a buffer among others.
Piece: TypeAlias = tuple[int, torch.Size, torch.dtype]


def keep_no_flat_shard(module: nn.Module, local: torch.Tensor) -> None:
    """Keep FSDP2 from holding a flat, dequantized copy of a shard. Local operation; nothing to do without FSDP2.

    Args:
        module: Owner.
        local: Its quantized shard.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None and _torch.local_of(parameter) is local:
            managed = _torch.find_managed(module, name)
            if managed is not None:
                _torch.keep_no_flat_shard(managed)


def pack_flat(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[Piece, ...]]:
    """All buffers in one flat uint8 tensor, each starting at an aligned byte. Local operation.

    Returns:
        The tensor, and what :func:`unpack_flat` needs.
    """
    pieces, start = [], 0
    for tensor in inputs:
        pieces.append((start, tensor.shape, tensor.dtype))
        start += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
    flat = torch.empty(start, dtype=torch.uint8, device=inputs[0].device)
    for tensor, (offset, _, _) in zip(inputs, pieces, strict=True):
        flat[offset : offset + tensor.numel() * tensor.element_size()].copy_(
            tensor.reshape(-1).view(torch.uint8)
        )
    return flat, tuple(pieces)


def unpack_flat(flat: torch.Tensor, pieces: tuple[Piece, ...]) -> tuple[torch.Tensor, ...]:
    """Views of the buffers that :func:`pack_flat` laid out. Local operation."""
    buffers = []
    for offset, shape, dtype in pieces:
        length = math.prod(shape) * dtype.itemsize
        buffers.append(flat.view(-1)[offset : offset + length].view(dtype).view(shape))
    return tuple(buffers)
