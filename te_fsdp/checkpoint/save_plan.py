"""Who writes which pieces of a save, decided by rank 0 from what all ranks hold.

DCP's planner does the same with several objects for each piece, of which a large job has millions: here a piece is two
tuples, and a rank hears only the numbers of those that it writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint.entries import Entry
from te_fsdp.errors import CheckpointError, shorten

#: Where a piece begins in the original, and its shape.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: What a rank holds: key, shape and dtype of each tensor, and its pieces, which count from 0 over all tensors.
Held = list[tuple[str, tuple[int, ...], torch.dtype, list[Box]]]


@dataclass
class Part:
    """What one rank hears.

    Attributes:
        writes: Numbers of the pieces that it writes, ascending.
        shared: Its pieces that others hold as well, by the number that they have on all ranks.
        groups: Of these numbers, those that the same ranks hold, by the number of that set of ranks.
    """

    writes: list[int] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)
    groups: dict[int, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """A tensor and its pieces.

    Attributes:
        shape: Of the tensor.
        dtype: Element type.
        boxes: int64, (pieces, 2, dims): where each begins, and its shape.
        writers: int64, (pieces, 2): the rank that writes it, and the number that it has there.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: np.ndarray[Any, np.dtype[np.int64]]
    writers: np.ndarray[Any, np.dtype[np.int64]]


def held(entries: Mapping[str, Entry]) -> Held:
    """What rank 0 needs to know of a rank's entries. Local operation."""
    return [
        (key, entry.shape, entry.dtype, [(p.offsets, tuple(p.tensor.shape)) for p in entry.pieces])
        for key, entry in entries.items()
    ]


def divide(all_held: list[Held]) -> tuple[list[Part], list[str], dict[str, Stored]]:
    """Give each piece to one of the ranks that hold it: a replica to the one that has the least to write.

    Local operation.

    Args:
        all_held: By rank.

    Returns:
        What each rank hears; names of what several ranks hold, by number; and the tensors.

    Raises:
        CheckpointError: The pieces do not make up the tensors.
    """
    described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    pieces: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, one in enumerate(all_held):
        number = 0
        for key, shape, dtype, boxes in one:
            described.setdefault(key, (shape, dtype))
            have = pieces.setdefault(key, {})
            for box in boxes:
                have.setdefault(box, []).append((rank, number))
                number += 1
    parts, names = [Part() for _ in all_held], list[str]()
    load, groups = [0] * len(all_held), dict[tuple[int, ...], int]()
    tensors: dict[str, Stored] = {}
    for key, have in pieces.items():
        (shape, dtype), writers = described[key], list[tuple[int, int]]()
        for (_, sizes), holders in have.items():
            writer, number = holders[0]
            if len(holders) > 1:
                group = groups.setdefault(tuple(rank for rank, _ in holders), len(groups))
                for rank, at in holders:
                    parts[rank].shared[len(names)] = at
                    parts[rank].groups.setdefault(group, []).append(len(names))
                names.append(key)
                writer, number = min(holders, key=lambda holder: load[holder[0]])
            load[writer] += math.prod(sizes) * dtype.itemsize
            parts[writer].writes.append(number)
            writers.append((writer, number))
        boxes = np.array(list(have), dtype=np.int64).reshape(len(have), 2, len(shape))
        tensors[key] = Stored(shape, dtype, boxes, np.array(writers, dtype=np.int64))
    for part in parts:
        part.writes.sort()
    wrong = [key for key, stored in tensors.items() if not _is_tiling(stored.shape, stored.boxes)]
    if wrong:
        raise CheckpointError(
            f"save: the pieces of {shorten(wrong)}",
            expected="together the whole tensor, each element once",
            got="others",
            fix="shard the model with te_fsdp.fully_shard; all ranks must make the call with the same model",
        )
    return parts, names, tensors


def _is_tiling(shape: tuple[int, ...], boxes: np.ndarray[Any, Any]) -> bool:
    """Whether boxes cover a shape, each element once: on the grid of all their edges, where cells are few."""
    if len(boxes) == 1:
        return boxes[0].tolist() == [[0] * len(shape), [*shape]]
    starts, ends = boxes[:, 0], boxes.sum(axis=1)
    edges = [np.unique(np.concatenate([starts[:, d], ends[:, d]])) for d in range(len(shape))]
    if any(e[0] != 0 or e[-1] != size for e, size in zip(edges, shape, strict=True)):
        return False
    first = [np.searchsorted(e, starts[:, d]) for d, e in enumerate(edges)]
    last = [np.searchsorted(e, ends[:, d]) for d, e in enumerate(edges)]
    covered = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    if all((b - a == 1).all() for a, b in zip(first, last, strict=True)):  # a cell for each, as a rule
        np.add.at(covered, tuple(first), 1)
    else:
        for low, high in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
            covered[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    return bool((covered == 1).all())
