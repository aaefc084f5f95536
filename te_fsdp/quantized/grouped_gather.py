"""Gathering a quantized weight of all experts that FSDP2 cuts within them: along their rows or their columns.

For a cut along another dim than the first FSDP2 puts together only buffers of the parameter's own shape (see
:mod:`te_fsdp.quantized.columns`), and for uneven shards it asks for such ones too. So the bytes of all buffers travel
in one or more stand-ins: uint8 tensors of the shard's shape, each expert's bytes in its own part. After the gather each
rank's bytes are picked out again, and each component of each expert is put together: one copy for a component of all
experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from te_fsdp._te_formats import GROUPED_BUFFERS
from te_fsdp.quantized.components import Component, components_of

__all__ = [
    "Gathered",
    "Places",
    "derive_transposes",
    "join_within",
    "pack_stand_ins",
    "sent_within",
    "unpack_stand_ins",
]

_ALIGNMENT = 16  # of each buffer in its expert's bytes: enough for every dtype of a scale

#: Per buffer: first byte, bytes and dtype among those of an expert.
Places: TypeAlias = tuple[tuple[int, int, torch.dtype], ...]


class Gathered(NamedTuple):
    """Metadata of a gather: names of the buffers that travel, experts of the whole weight, and how they are packed.

    ``pieces``: all in one, for a shard axis of size 1. ``stand_ins``: where the buffers lie in stand-ins of the shard's
    own shape, which FSDP2 asks of uneven shards, and of shards cut along ``dim`` other than the first.
    """

    names: tuple[str, ...]
    experts: int
    pieces: tuple[Any, ...] | None = None
    stand_ins: Places | None = None
    dim: int = 0
    shape: tuple[int, ...] = ()


def pack_stand_ins(
    inputs: Sequence[torch.Tensor], shape: tuple[int, ...]
) -> tuple[tuple[torch.Tensor, ...], Places]:
    """uint8 tensors of ``shape`` that hold the bytes of all (experts, ...) buffers. Local operation."""
    places, start = [], 0
    for buffer in inputs:
        length = buffer.shape[1] * buffer.element_size()
        places.append((start, length, buffer.dtype))
        start += math.ceil(length / _ALIGNMENT) * _ALIGNMENT
    each = math.prod(shape[1:])
    count = math.ceil(start / each)
    flat = torch.zeros((shape[0], count * each), dtype=torch.uint8, device=inputs[0].device)
    for buffer, (first, length, _) in zip(inputs, places, strict=True):
        flat[:, first : first + length].copy_(buffer.contiguous().view(torch.uint8).view(shape[0], length))
    parts = flat.view(shape[0], count, each).unbind(1)
    return tuple(part.contiguous().view(shape) for part in parts), tuple(places)


def unpack_stand_ins(outputs: Sequence[torch.Tensor], places: Places) -> tuple[torch.Tensor, ...]:
    """The buffers, (experts, ...) each, out of stand-ins that were gathered expert after expert."""
    flat = torch.cat([output.reshape(output.shape[0], -1) for output in outputs], dim=1)
    return tuple(flat[:, first : first + length].contiguous().view(dtype) for first, length, dtype in places)


def sent_within(grouped: Any, expert: Any) -> dict[str, Component]:
    """The buffers of a shard of experts that travel, each with the component that it is. Local operation.

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
        outputs: What FSDP2 made of the stand-ins: memory of the whole's shape, under whatever shape it shows.
        places: From :func:`pack_stand_ins`, of the buffers that :func:`sent_within` names.
        dim: 1 or 2.
    """
    experts, ranks = shard.shape[0], whole.shape[dim] // shard.shape[dim]
    cut = (*shard.shape[:dim], ranks, *shard.shape[dim:])
    # (experts, ranks, bytes of one), stand-in after stand-in
    flat = torch.cat([out.view(cut).movedim(dim, 1).reshape(experts, ranks, -1) for out in outputs], dim=-1)
    parts = sent_within(shard.grouped, shard.experts[0])
    wholes = sent_within(whole.grouped, whole.experts[0])
    for (name, part), (first, length, dtype) in zip(parts.items(), places, strict=True):
        bytes_of = flat[..., first : first + length].contiguous().view(dtype)
        each = bytes_of.shape[-1]
        one, target = part.tensor, getattr(whole.grouped, name)
        source = bytes_of.as_strided((experts, ranks, *one.shape), (ranks * each, each, *one.stride()))
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
        buffers = expert.get_metadata()
        data, transpose = buffers.get("data"), buffers.get("data_transpose")
        if data is not None and transpose is not None:  # lies in one buffer with that of the other experts
            transpose.copy_(data.movedim(-1, 0))
