"""Which rectangle of the original tensor each piece of a local shard is.

One arithmetic serves initialisation and checkpoints: a rank's local shard is cut first over ``tp`` (following
the parameter's layout), then over the FSDP shard axis (even ceil-chunks of the tp-local tensor, as torch's
FSDP2 does it).

Example, gated fc1 ``[gate; up]`` with 8 rows, tp = 2, 2 FSDP ranks: tp rank 0 holds original rows 0-1 (gate)
and 4-5 (up); FSDP rank 0 of it keeps local rows 0-1 = original rows 0-1, FSDP rank 1 local rows 2-3 =
original rows 4-5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from te_fsdp.errors import PlacementError
from te_fsdp.layout.rules import ParameterRule

__all__ = ["Box", "Coordinates", "chunk_range", "cut_boxes", "shard_boxes"]


@dataclass(frozen=True)
class Box:
    """One rectangle that a local shard and the original tensor have in common.

    Attributes:
        original: Offsets in the original tensor.
        local: Offsets in the local shard.
        sizes: Extents, the same in both.
    """

    original: tuple[int, ...]
    local: tuple[int, ...]
    sizes: tuple[int, ...]

    def original_slices(self) -> tuple[slice, ...]:
        """Index of this box in the original tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.original, self.sizes, strict=True))

    def local_slices(self) -> tuple[slice, ...]:
        """Index of this box in the local shard."""
        return tuple(slice(o, o + s) for o, s in zip(self.local, self.sizes, strict=True))


@dataclass(frozen=True)
class Coordinates:
    """A rank's place on the axes that cut a parameter; size 1 where an axis does not.

    Attributes:
        tp_size: Ranks on the tensor-parallel axis.
        tp_rank: This rank's place there.
        fsdp_size: Ranks that FSDP2 shards over.
        fsdp_rank: This rank's place there.
        fsdp_dim: Tensor dim that FSDP2 cuts.
        ep_size: Ranks on the expert-parallel axis, which cuts dim 0 of what ``tp`` leaves, before FSDP2 does.
        ep_rank: This rank's place there.
    """

    tp_size: int = 1
    tp_rank: int = 0
    fsdp_size: int = 1
    fsdp_rank: int = 0
    fsdp_dim: int = 0
    ep_size: int = 1
    ep_rank: int = 0


def chunk_range(length: int, chunks: int, index: int) -> tuple[int, int]:
    """Half-open range of chunk ``index`` when ``length`` is cut as ``torch.chunk`` cuts it; empty past the end."""
    step = -(-length // chunks) if length else 0
    return min(index * step, length), min((index + 1) * step, length)


def shard_boxes(
    original_shape: Sequence[int], rule: ParameterRule, at: Coordinates, *, name: str = "parameter"
) -> tuple[tuple[int, ...], list[Box]]:
    """Local shape of a shard and the boxes that tile it.

    Args:
        original_shape: Shape of the original tensor (tp size 1).
        rule: The parameter's rule.
        at: The rank's place.
        name: Name for error messages.

    Returns:
        The shard's shape and its boxes, in local order. No box for an empty shard.

    Raises:
        PlacementError: The cut dim, or a stacked block, does not divide by the tensor-parallel size.
    """
    tp_shape, boxes = _tp_boxes(tuple(original_shape), rule, at, name)
    local_shape, found = tp_shape, tuple(boxes)
    for dim, size, rank in ((0, at.ep_size, at.ep_rank), (at.fsdp_dim, at.fsdp_size, at.fsdp_rank)):
        if size > 1 and local_shape:
            low, high = chunk_range(local_shape[dim], size, rank)
            local_shape, found = _put(local_shape, dim, high - low), cut_boxes(found, dim, low, high)
    return local_shape, [box for box in found if 0 not in box.sizes]


def cut_boxes(boxes: Iterable[Box], dim: int, low: int, high: int) -> tuple[Box, ...]:
    """The parts of boxes within the local range [low, high) of ``dim``, in coordinates of that range."""
    return tuple(cut for box in boxes if (cut := _cut(box, dim, low, high)) is not None)


def _tp_boxes(
    shape: tuple[int, ...], rule: ParameterRule, at: Coordinates, name: str
) -> tuple[tuple[int, ...], list[Box]]:
    """Shape of the tp-local tensor and its boxes: one when plain, one per block when stacked."""
    zeros = (0,) * len(shape)
    if rule.shard_dim is None or at.tp_size == 1:
        return shape, [Box(zeros, zeros, shape)]
    dim, rows = rule.shard_dim, shape[rule.shard_dim]
    heights = [rows * part // sum(rule.layout.blocks) for part in rule.layout.blocks]
    if sum(heights) != rows or any(h % at.tp_size for h in heights):
        raise PlacementError(
            f"{name}: dim {dim} of shape {shape}, layout {rule.layout}",
            expected=f"every block divisible by tp size {at.tp_size}",
            got=f"block sizes {heights}",
            fix="choose a dimension or a tp size that divides",
        )
    boxes, block_start, local_start = [], 0, 0
    for height in heights:
        part = height // at.tp_size
        original = _put(zeros, dim, block_start + at.tp_rank * part)
        boxes.append(Box(original, _put(zeros, dim, local_start), _put(shape, dim, part)))
        block_start, local_start = block_start + height, local_start + part
    return _put(shape, dim, local_start), boxes


def _cut(box: Box, dim: int, low: int, high: int) -> Box | None:
    """The part of ``box`` within local range [low, high) of ``dim``, in coordinates of that range."""
    start = max(box.local[dim], low)
    stop = min(box.local[dim] + box.sizes[dim], high)
    if start >= stop or 0 in _put(box.sizes, dim, 1):
        return None
    shift = start - box.local[dim]
    return Box(
        _put(box.original, dim, box.original[dim] + shift),
        _put(box.local, dim, start - low),
        _put(box.sizes, dim, stop - start),
    )


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    """``values`` with one entry replaced."""
    return (*values[:index], value, *values[index + 1 :])
