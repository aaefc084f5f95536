"""Buffers of quantized shards, packed as FSDP2 can gather them, with its public hooks alone.

FSDP2 gathers any number of buffers and concatenates them along the dim that it cuts, with three exceptions (torch 2.11
to 2.15, ``foreach_all_gather_copy_out``):

- Over a shard axis of size 1 it copies only the first of several buffers. Those of experts then are sent as one flat
  tensor; others are not sent at all (:mod:`te_fsdp.quantized.all_gather`).
- Along another dim than the first it takes every buffer to have the parameter's own shape. Scales, and NVFP4's bytes,
  two values each, have not.
- For uneven shards, too.

In the last two cases the bytes of all buffers are sent in one or more *packed tensors*: uint8 tensors of exactly the
shard's shape. After the gather each rank's bytes are picked out of them again, and each buffer is put together.

The price: a weight of N values sends whole multiples of N bytes (two of them for MXFP8 and float8-block in one
direction, as many as bf16 weights), and holds them for a moment beside the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from te_fsdp import _te
from te_fsdp._te_formats import GROUPED_BUFFERS
from te_fsdp.move.start import Buffer
from te_fsdp.quantized.components import Component, components_of

# Kernels and vectorised copies want aligned buffers; 256 bytes is what torch's CUDA allocator aligns to within a block.
_ALIGNMENT = 256
_BYTES_ALIGNMENT = 16  # of each buffer in its expert's bytes: enough for every dtype of a scale

#: Shape and dtype of a buffer among others.
Piece: TypeAlias = tuple[torch.Size, torch.dtype]


class Places(NamedTuple):
    """Where buffers lie among the bytes of an expert, and the dtype of each."""

    buffer: Buffer
    dtypes: tuple[torch.dtype, ...]

    def typed(self, memory: torch.Tensor) -> Iterator[torch.Tensor]:
        """The buffers in the last dim of ``memory``, contiguous. Local operation."""
        for piece, dtype in zip(self.buffer.pieces(memory), self.dtypes, strict=True):
            yield piece.contiguous().view(dtype)


def pack_flat(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[Piece, ...]]:
    """All buffers in one flat uint8 tensor, each starting at an aligned byte. Local operation.

    Returns:
        The tensor, and what :func:`unpack_flat` needs.
    """
    pieces = tuple((tensor.shape, tensor.dtype) for tensor in inputs)
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in inputs]
    return _flat_buffer(pieces).pack(parts, torch.uint8, inputs[0].device), pieces


def unpack_flat(flat: torch.Tensor, pieces: tuple[Piece, ...]) -> tuple[torch.Tensor, ...]:
    """Views of the buffers that :func:`pack_flat` laid out. Local operation."""
    found = zip(_flat_buffer(pieces).pieces(flat.view(-1)), pieces, strict=True)
    return tuple(part.view(dtype).view(shape) for part, (shape, dtype) in found)


def _flat_buffer(pieces: tuple[Piece, ...]) -> Buffer:
    return Buffer(tuple(math.prod(shape) * dtype.itemsize for shape, dtype in pieces), _ALIGNMENT)


# --- packed tensors


def pack_bytes(
    inputs: Sequence[torch.Tensor], shape: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], Places]:
    """uint8 tensors of ``shape`` that hold the bytes of all (experts, ...) buffers. Local operation."""
    lengths = tuple(buffer.shape[1] * buffer.element_size() for buffer in inputs)
    buffer = Buffer(lengths, _BYTES_ALIGNMENT)
    each = math.prod(shape[1:])
    count = max(1, math.ceil(buffer.numel / each))
    flat = torch.zeros((shape[0], count * each), dtype=torch.uint8, device=inputs[0].device)
    for source, piece in zip(inputs, buffer.pieces(flat), strict=True):
        piece.copy_(source.contiguous().view(torch.uint8).view(piece.shape))
    parts = flat.view(shape[0], count, each).unbind(1)
    places = Places(buffer, tuple(source.dtype for source in inputs))
    return tuple(part.contiguous().view(shape) for part in parts), places


def unpack_bytes(outputs: Sequence[torch.Tensor], places: Places) -> tuple[torch.Tensor, ...]:
    """The buffers, (experts, ...) each, out of packed tensors that were gathered expert after expert."""
    flat = torch.cat([output.reshape(output.shape[0], -1) for output in outputs], dim=1)
    return tuple(places.typed(flat))


def _bytes_of_ranks(
    outputs: Sequence[torch.Tensor], shape: Sequence[int], dim: int, ranks: int
) -> torch.Tensor:
    """(experts, ranks, bytes) of packed tensors that ranks hold along ``dim`` of an (experts, rows, columns) shard.

    Args:
        outputs: What FSDP2 made of the packed tensors: memory of the whole's shape, under whatever shape it shows.
        shape: Of a shard.
        dim: 1 or 2.
        ranks: How many there are.
    """
    cut = (*shape[:dim], ranks, *shape[dim:])
    parts = [output.view(cut).movedim(dim, 1).reshape(shape[0], ranks, -1) for output in outputs]
    return torch.cat(parts, dim=-1)


# --- one weight, cut along its columns


class Columns(NamedTuple):
    """Metadata of a gather along columns: TE's own, the shard's shape, and what its packed tensors hold.

    ``buffers``: shape of a rank's buffer, and columns of the whole one with its padding.
    """

    metadata: Any
    shape: tuple[int, int]
    places: Places
    buffers: tuple[tuple[torch.Size, int], ...]


def pack_columns(
    local: torch.Tensor, inputs: tuple[torch.Tensor, ...], metadata: Any, ranks: int
) -> tuple[tuple[torch.Tensor, ...], Columns]:
    """Packed tensors of the buffers that TE would gather, without their padding. Local operation.

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
    found = [known[i.data_ptr()] for i in inputs]
    buffers = tuple(
        (c.tensor.shape, _padded(local, c.name, (rows, columns * ranks), c.tensor.shape[1] * ranks))
        for c in found
    )
    flats, places = pack_bytes([c.tensor.contiguous().view(1, -1) for c in found], (1, rows, columns))
    return tuple(flat[0] for flat in flats), Columns(metadata, (rows, columns), places, buffers)


def _padded(local: torch.Tensor, buffer: str, shape: tuple[int, int], columns: int) -> int:
    """Columns of a whole weight's buffer with the padding that TE wants in scales; data has none."""
    if not buffer.endswith("wise_scale_inv"):
        return columns
    return int(_te.quantizer_of(local).get_scale_shape(shape, buffer.startswith("columnwise"))[-1])


def join_columns(outputs: tuple[torch.Tensor, ...], packed: Columns) -> tuple[torch.Tensor, ...]:
    """The buffers of the whole weight, new tensors, in the order and shapes in which TE expects its own.

    Args:
        outputs: What FSDP2 made of the packed tensors: memory of shape (M, K), under whatever shape it shows.
        packed: From :func:`pack_columns`.
    """
    rows, columns = packed.shape
    ranks = outputs[0].numel() // (rows * columns)
    flats = _bytes_of_ranks(outputs, (1, rows, columns), 2, ranks)[0]
    buffers = []
    for found, (shape, whole) in zip(packed.places.typed(flats), packed.buffers, strict=True):
        pieces = found.view(ranks, *shape)
        buffer = torch.zeros((shape[0], whole), dtype=found.dtype, device=flats.device)
        buffer[:, : ranks * shape[1]].view(shape[0], ranks, shape[1]).copy_(pieces.transpose(0, 1))
        buffers.append(buffer)
    return tuple(buffers)


# --- all experts of a layer, each cut along its rows or columns


class GroupedGather(NamedTuple):
    """Metadata of a gather: names of the buffers that are sent, experts of the whole weight, and how they are packed.

    ``pieces``: all in one, for a shard axis of size 1. ``places``: where the buffers lie in packed tensors of the
    shard's own shape, which FSDP2 asks of uneven shards, and of shards cut along ``dim`` other than the first.
    """

    names: tuple[str, ...]
    experts: int
    pieces: tuple[Any, ...] | None = None
    places: Places | None = None
    dim: int = 0
    shape: tuple[int, ...] = ()


def sent_within(grouped: Any, expert: Any) -> dict[str, Component]:
    """The buffers of a shard of experts that are sent, each with the component that it is. Local operation.

    Args:
        grouped: ``GroupedTensor`` of the shard.
        expert: Its first expert's quantized tensor, made of views of ``grouped``.

    Returns:
        By name of the buffer in ``grouped``: what is no component can be made anew from those that are.
    """
    first: dict[int, str] = {}
    for name in GROUPED_BUFFERS:
        if (buffer := getattr(grouped, name)) is not None:
            first.setdefault(buffer.data_ptr(), name)
    components = components_of(expert, "gathered weight")
    return {first[component.tensor.data_ptr()]: component for component in components}


def join_within(whole: Any, shard: Any, outputs: Sequence[torch.Tensor], places: Places, dim: int) -> None:
    """Fill the buffers of a gathered weight. Local operation.

    Args:
        whole: ``GroupedWeight`` (experts, out, in) with zeroed padding.
        shard: One rank's part of it, of the same shape but along ``dim``.
        outputs: What FSDP2 made of the packed tensors: memory of the whole's shape, under whatever shape it shows.
        places: From :func:`pack_bytes`, of the buffers that :func:`sent_within` names.
        dim: 1 or 2.
    """
    experts, ranks = shard.shape[0], whole.shape[dim] // shard.shape[dim]
    flat = _bytes_of_ranks(outputs, shard.shape, dim, ranks)
    parts = sent_within(shard.grouped, shard.experts[0])
    wholes = sent_within(whole.grouped, whole.experts[0])
    for (name, part), values in zip(parts.items(), places.typed(flat), strict=True):
        each = values.shape[-1]
        one, target = part.tensor, getattr(whole.grouped, name)
        source = values.as_strided((experts, ranks, *one.shape), (ranks * each, each, *one.stride()))
        into = wholes[name].tensor
        strides = (target.numel() // experts, *into.stride())
        stack = target.as_strided((experts, *into.shape), strides, target.storage_offset())
        if part.block is None:
            stack.copy_(source[:, 0])  # one value of the whole weight, the same on all ranks
        else:
            stack.unflatten(dim, (ranks, one.shape[dim - 1])).copy_(source.movedim(1, dim))
    derive_transposes(whole)


def derive_transposes(weight: Any) -> None:
    """Make the transposes of float8 weights anew from their bytes, where they are kept. Local operation."""
    for expert in weight.experts:
        _te.derive_transpose(expert)  # it lies in one buffer with those of the other experts
