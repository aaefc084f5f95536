"""Quantized weights in plain DCP directories and ``torch.save`` files: TE's tensors, complete or in pieces.

DCP writes each rectangle of a sharded quantized weight as one of TE's quantized tensors, or as high-precision values
if it splits a block of scales. The metadata describes all of them like plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from te_fsdp.checkpoint.lazy_tensors import Chunked, InMemory, Lazy, Piece, Stack, dequantized
from te_fsdp.checkpoint.shard_files import frame_of
from te_fsdp.errors import CheckpointError, PlacementError
from te_fsdp.layout import Box
from te_fsdp.quantized.components import components_of, describe_format
from te_fsdp.upstream import te as _te

#: A rectangle of a weight: its offsets and its tensor, of TE or plain.
_Part: TypeAlias = tuple[tuple[int, ...], Any]


@dataclass
class Quantized:
    """One of TE's quantized weights: its format and its components, in the layout of the weight."""

    format: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    components: dict[str, Lazy]

    def values(self, key: str) -> Lazy:
        """Return the FP32 values."""
        return dequantized(key, self.shape, torch.float32, self.format, self.components)


def as_lazy(found: torch.Tensor, key: str) -> Any:
    """Return a loaded tensor as a lazy one, or the components of one of TE's; any other subclass unchanged."""
    if not _te.is_quantized(found):
        is_plain = type(found) in (torch.Tensor, torch.nn.Parameter) and found.layout == torch.strided
        return InMemory(found.detach().resolve_conj().resolve_neg()) if is_plain else found
    try:
        components: dict[str, Lazy] = {c.name: InMemory(c.tensor) for c in components_of(found, key)}
        return Quantized(describe_format(found, key) or "", found.dtype, tuple(found.shape), components)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error


def quantized_or_plain(key: str, tensor: Lazy, *, scrambled: bool) -> Any:
    """Return a tensor of a DCP directory, or the quantized weight that DCP wrote in the place of its pieces.

    Args:
        key: Its key, for errors.
        tensor: The tensor that the metadata describes.
        scrambled: Whether rows of its pieces may be in the order of the ranks of tensor parallelism.

    Raises:
        CheckpointError: The order of the rows is not known, or the format is not supported.
    """
    # DCP describes a quantized weight by its nominal dtype, so integers are never one.
    if not isinstance(tensor, Chunked) or not tensor.dtype.is_floating_point:
        return tensor
    # Replace each record of a quantized tensor by the tensor. Plain records are not read.
    parts: list[_Part] = []
    plain = set[tuple[Any, int]]()  # records of another release of torch: one of each length is read
    for at, piece in tensor.chunks:
        parts.append((at, piece))
        if not isinstance(piece, Piece) or (piece.shape, piece.length) in plain:
            continue
        # Only the length of the record differs.
        if piece.bytes < piece.length == frame_of(piece.dtype, piece.shape).length:
            continue
        loaded = piece.load()
        if _te.is_quantized(loaded):
            parts[-1] = (at, loaded)
        else:
            plain.add((piece.shape, piece.length))
    if all(isinstance(part, Lazy) for _, part in parts):
        return tensor
    # A single piece is the complete weight: its rows are in its own order, and no scales must be compared.
    if len(parts) == 1:
        return as_lazy(parts[0][1], key)
    if scrambled:
        raise CheckpointError(
            f"{key}: a quantized weight in {len(parts)} pieces of tensor parallelism",
            expected="rows in the order of the unsharded module",
            why="The directory does not record the order of its rows",
            fix="load it on the mesh that saved it, and save it with te_fsdp.checkpoint.save",
        )
    try:
        is_stacked = len(tensor.shape) != 2
        return _stack(key, tensor, parts) if is_stacked else _join(key, tensor, tensor.shape, parts)
    except PlacementError as error:
        raise CheckpointError(str(error)) from error


def _stack(key: str, tensor: Chunked, parts: Sequence[_Part]) -> Any:
    """Return the weights of all experts in one tensor, from pieces of one expert each."""
    by_expert: list[list[_Part]] = [[] for _ in range(tensor.shape[0])]
    for (index, *at), part in parts:
        one = part.select(0) if isinstance(part, Lazy) else part.view(part.shape[1:])
        by_expert[index].append((tuple(at), one))
    # Each expert has its own scales, so they are joined one by one.
    experts = [_join(key, tensor, tensor.shape[1:], own) for own in by_expert]
    if not all(isinstance(one, Quantized) for one in experts):
        return Stack([one.values(key) if isinstance(one, Quantized) else one for one in experts])
    stacked: dict[str, Lazy] = {
        n: Stack([one.components[n] for one in experts]) for n in experts[0].components
    }
    return replace(experts[0], shape=tensor.shape, components=stacked)


def _join(key: str, whole: Chunked, shape: tuple[int, ...], parts: Sequence[_Part]) -> Any:
    """Return a weight from its pieces: the stored components, or FP32 values if these do not fit together.

    Pieces that were quantized separately need not have one scale.
    """
    if not any(isinstance(part, Lazy) for _, part in parts):
        kinds = {describe_format(part, key) for _, part in parts}
        components = _join_components(key, shape, parts) if len(kinds) == 1 else None
        if components is not None:
            return Quantized(str(kinds.pop()), parts[0][1].dtype, shape, components)
    plain: list[tuple[tuple[int, ...], Lazy]] = []
    for at, part in parts:
        # FP32 contains the values of every format exactly, whatever the scales of the pieces.
        value = part.whole().float() if isinstance(part, Lazy) else part.dequantize(dtype=torch.float32)
        plain.append((at, InMemory(value.detach())))
    return Chunked(key, shape, torch.float32, plain, in_original_order=whole.in_original_order)


def _join_components(key: str, shape: tuple[int, ...], parts: Sequence[_Part]) -> dict[str, Lazy] | None:
    """Return the components of a weight; ``None`` if pieces split blocks or have different scales per weight."""
    joined: dict[str, torch.Tensor] = {}
    for at, part in parts:
        for component in components_of(part, key):
            is_new = component.name not in joined
            if component.block is None:
                if not torch.equal(joined.setdefault(component.name, component.tensor), component.tensor):
                    return None
                continue
            if is_new:
                joined[component.name] = component.tensor.new_empty(component.shape(shape))
            # A piece may end within a block. Then its scales are not those of the full weight.
            try:
                (box,) = component.boxes([Box(at, (0,) * len(at), tuple(part.shape))], key, shape)
            except PlacementError:
                return None
            joined[component.name][box.original_slices()] = component.tensor
    # A component is usable only if every piece has it.
    names = [{component.name for component in components_of(part, key)} for _, part in parts]
    if any(one != names[0] for one in names):
        return None  # transposes exist in some pieces only
    return {name: InMemory(tensor) for name, tensor in joined.items()}
