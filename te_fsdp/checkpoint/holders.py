"""Choice of the rank that writes or sends a piece of an unsharded tensor, for saves and for streams of weights.

Each rank describes its pieces (:data:`Held`). :func:`holders_of` joins the descriptions of all ranks and checks that
they tile the tensors. Of the ranks with copies of one piece, :func:`lightest` chooses one.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from te_fsdp.errors import CheckpointError, shorten

#: A rectangle of a tensor: where it begins, and its shape.
Place = tuple[tuple[int, ...], tuple[int, ...]]
#: A rank's tensors: key, shape, dtype and places of its pieces. Pieces are numbered from 0 over all tensors.
Held = list[tuple[str, tuple[int, ...], torch.dtype, list[Place]]]
#: An array of int64 with a row for each piece.
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Holders(NamedTuple):
    """An unsharded tensor and the ranks that have its pieces."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[Place, list[tuple[int, int]]]  #: Ranks with each, in order, and the piece's number there
    boxes: Rows  #: The places in the same order: (pieces, 2, dims)


def holders_of(call: str, ranks: Iterable[Held]) -> dict[str, Holders]:
    """Return every tensor of the ranks with its holders. Local operation.

    Raise CheckpointError, which names ``call``, if the pieces do not cover a tensor, each element once.
    """
    described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    pieces: dict[str, dict[Place, list[tuple[int, int]]]] = {}
    for rank, held in enumerate(ranks):
        number = 0
        for key, shape, dtype, places in held:
            described.setdefault(key, (shape, dtype))
            have = pieces.setdefault(key, {})
            for place in places:
                # Ranks with the same place have replicas of one piece.
                have.setdefault(place, []).append((rank, number))
                number += 1
    found, wrong = dict[str, Holders](), list[str]()
    for key, have in pieces.items():
        shape, dtype = described[key]
        boxes = boxes_of(have, shape)
        found[key] = Holders(shape, dtype, have, boxes)
        if not is_tiling(shape, boxes):
            wrong.append(
                f"{key} ({boxes[:, 1].prod(axis=1).sum()} of {np.prod(shape, dtype=np.int64)} elements)"
            )
    if wrong:
        raise CheckpointError(
            f"{call}: the pieces of {shorten(wrong)}",
            expected="together the whole tensor, each element once",
            got="others",
            fix="shard the model with te_fsdp.fully_shard; all ranks must make the call with the same model",
        )
    return found


def lightest(
    holders: Sequence[tuple[int, int]], load: MutableMapping[int, int], count: int
) -> tuple[int, int]:
    """Return the rank with the fewest bytes so far, with its number of the piece; add the piece's bytes to its load.

    Replicas are spread over their ranks in this way, so that no rank writes or sends all of them.
    """
    chosen = min(holders, key=lambda holder: load[holder[0]])
    load[chosen[0]] += count
    return chosen


def boxes_of(places: Iterable[Place], shape: Sequence[int]) -> Rows:
    """Return the offsets and sizes of pieces as an int64 array of shape (pieces, 2, dims)."""
    rows = list(places)
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2, len(shape))


def is_tiling(shape: Sequence[int], boxes: Rows) -> bool:
    """Return whether boxes cover a shape, each element once, by counting cells of the grid of all edges.

    ``boxes`` are those of :func:`boxes_of`; empty ones do not count.
    """
    if len(boxes) == 1 and boxes[0].tolist() == [[0] * len(shape), [*shape]]:
        return True  # most tensors
    boxes = boxes[boxes[:, 1].all(axis=1)]
    if 0 in shape or not len(shape) or not len(boxes):
        return 0 in shape and not len(boxes)
    starts, ends = boxes[:, 0], boxes.sum(axis=1)
    # A grid of all edges, because the pieces of a tensor are few and its elements are many.
    edges = [np.unique(np.concatenate([starts[:, d], ends[:, d]])) for d in range(len(shape))]
    # The grid must begin and end with the tensor, or parts of it have no cell.
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
