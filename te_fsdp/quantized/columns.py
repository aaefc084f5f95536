"""Gathering quantized weights that FSDP2 cuts along columns, with its public hooks alone.

For a cut along another dim than the first FSDP2 concatenates every gathered buffer along that dim as if it had the
shape of the parameter (torch 2.11 to 2.15, ``foreach_all_gather_copy_out``). Scales and NVFP4's bytes, two values
each, have not. All buffers of a rank therefore travel in one or more stand-ins: uint8 tensors of exactly the shard's
shape. After the gather each rank's bytes are picked out of the stand-ins again, and each buffer is put together
along its own columns.

The price: a weight of N values sends whole multiples of N bytes (two of them for MXFP8 and float8-block in one
direction, as many as bf16 weights), and holds them for a moment beside the result.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from te_fsdp import _te
from te_fsdp.quantized.components import components_of

__all__ = ["Columns", "join_columns", "pack_columns"]

_ALIGNMENT = 16  # of each buffer in its rank's bytes: enough for every dtype of a scale


class _Piece(NamedTuple):
    """One buffer of a rank: first byte, shape, dtype, and columns of the whole buffer with its padding."""

    start: int
    shape: tuple[int, int]
    dtype: torch.dtype
    columns: int


class Columns(NamedTuple):
    """Metadata of a gather along columns: TE's own, the shard's shape, and what its stand-ins contain."""

    metadata: Any
    shape: tuple[int, int]
    pieces: tuple[_Piece, ...]


def pack_columns(
    local: torch.Tensor, inputs: tuple[torch.Tensor, ...], metadata: Any, ranks: int
) -> tuple[tuple[torch.Tensor, ...], Columns]:
    """Stand-ins of the buffers that TE would gather, without their padding. Local operation.

    Args:
        local: Shard of shape (M, K / ranks).
        inputs: TE's own choice of its buffers, views of them that begin where they begin.
        metadata: TE's own.
        ranks: How many ranks cut the columns.

    Returns:
        uint8 tensors of the shard's shape, and the metadata that :func:`join_columns` needs.
    """
    rows, columns = local.shape
    known = {c.tensor.data_ptr(): c for c in components_of(local, "gathered weight")}
    buffers = [known[i.data_ptr()] for i in inputs]
    pieces, start = [], 0
    for component in buffers:
        piece = component.tensor
        whole = _padded(local, component.name, (rows, columns * ranks), piece.shape[1] * ranks)
        pieces.append(_Piece(start, (piece.shape[0], piece.shape[1]), piece.dtype, whole))
        start += math.ceil(piece.numel() * piece.element_size() / _ALIGNMENT) * _ALIGNMENT
    count = max(1, math.ceil(start / (rows * columns)))
    flat = torch.zeros(count * rows * columns, dtype=torch.uint8, device=inputs[0].device)
    for component, piece in zip(buffers, pieces, strict=True):
        data = component.tensor.contiguous().view(-1).view(torch.uint8)
        flat[piece.start : piece.start + data.numel()].copy_(data)
    return tuple(flat.view(count, rows, columns).unbind(0)), Columns(metadata, (rows, columns), tuple(pieces))


def _padded(local: torch.Tensor, buffer: str, shape: tuple[int, int], columns: int) -> int:
    """Columns of a whole weight's buffer with the padding that TE wants in scales; data has none."""
    if not buffer.endswith("wise_scale_inv"):
        return columns
    return int(_te.quantizer_of(local).get_scale_shape(shape, buffer.startswith("columnwise"))[-1])


def join_columns(outputs: tuple[torch.Tensor, ...], packed: Columns) -> tuple[torch.Tensor, ...]:
    """The buffers of the whole weight, new tensors, in the order and shapes in which TE expects its own.

    Args:
        outputs: What FSDP2 made of the stand-ins: memory of shape (M, K), under whatever shape it shows.
        packed: From :func:`pack_columns`.
    """
    rows, columns = packed.shape
    ranks = outputs[0].numel() // (rows * columns)
    # (stand-in, row, rank, column) -> per rank all its bytes
    parts = torch.stack([out.view(rows, ranks, columns) for out in outputs])
    flats = parts.permute(2, 0, 1, 3).reshape(ranks, -1)
    buffers = []
    for start, shape, dtype, whole in packed.pieces:
        length = math.prod(shape) * dtype.itemsize
        pieces = flats[:, start : start + length].contiguous().view(dtype).view(ranks, *shape)
        buffer = torch.zeros((shape[0], whole), dtype=dtype, device=flats.device)
        buffer[:, : ranks * shape[1]].view(shape[0], ranks, shape[1]).copy_(pieces.transpose(0, 1))
        buffers.append(buffer)
    return tuple(buffers)
