"""Test assignment of writes to ranks: complete tensors, replicas written once, small messages."""

from __future__ import annotations

import pickle

import pytest
import torch

from te_fsdp.checkpoint.planner import assign_writers
from te_fsdp.checkpoint.tensor_entries import Chunk, RankTensors
from te_fsdp.errors import CheckpointError


def rows(first: int, last: int, *rest: int) -> Chunk:
    return (first, *(0 for _ in rest)), (last - first, *rest)


def one(shape: tuple[int, ...], *boxes: Chunk) -> RankTensors:
    return [("a", shape, torch.float32, list(boxes))]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param((), [((), ())], id="scalar"),
        pytest.param((5,), [rows(0, 3), rows(3, 5)], id="rows"),
        pytest.param((4, 6), [((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4))], id="no grid"),  # no grid
        pytest.param(
            (2, 3, 4),
            [((e, r, 0), (1, n, 4)) for e in range(2) for r, n in ((0, 1), (1, 2))],
            id="three dims",
        ),
    ],
)
def test_shards_that_cover_a_tensor_are_accepted(shape, boxes):
    parts = assign_writers([one(shape, box) for box in boxes])
    assert [part.writes for part in parts] == [[0]] * len(boxes) and parts[0].names == []
    stored = (parts[0].tensors or {})["a"]
    assert (stored.shape, stored.dtype) == (shape, torch.float32)
    assert [(tuple(begin), tuple(sizes)) for begin, sizes in stored.boxes.tolist()] == boxes
    assert stored.writers.tolist() == [[rank, 0] for rank in range(len(boxes))]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        pytest.param((5,), [rows(0, 3), rows(4, 5)], id="gap"),  # a gap
        pytest.param((5,), [rows(0, 3)], id="missing end"),
        pytest.param((5,), [rows(0, 3), rows(3, 6)], id="too long"),  # too long
        pytest.param((4,), [rows(0, 3), rows(2, 3)], id="rows twice"),  # as many elements, and some twice
        pytest.param((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1))], id="corner twice"),
        pytest.param(
            (4, 4),
            [((0, 0), (3, 3)), ((1, 3), (3, 1)), ((3, 0), (1, 3)), ((2, 3), (1, 1))],
            id="overlap and gap",
        ),
    ],
)
def test_shards_that_do_not_cover_a_tensor_are_rejected(shape, boxes):
    with pytest.raises(
        CheckpointError, match=r"save: the pieces of a \(.*\): expected pieces that together cover"
    ):
        assign_writers([one(shape, box) for box in boxes])


def test_replica_writes_are_distributed_over_ranks():
    copies, ranks = 50, 4
    held: RankTensors = [(f"t{n}", (8,), torch.float32, [rows(0, 8)]) for n in range(copies)]
    shards = [[*held, ("big", (4, 100), torch.float32, [rows(r, r + 1, 100)])] for r in range(ranks)]
    parts = assign_writers(shards)
    written = [number for part in parts for number in part.writes]
    assert sorted(written) == sorted([*range(copies), *[copies] * ranks])
    assert {len(part.writes) - 1 for part in parts} <= {12, 13}
    assert parts[0].names == [f"t{n}" for n in range(copies)]
    assert all(part.groups == {0: {n: n for n in range(copies)}} for part in parts), (
        "one number for all that is on all ranks"
    )
    assert len(pickle.dumps(parts[1])) < 20 * copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_replica_writes_are_balanced_by_bytes(dtype):
    """Bug class: balancing by the number of tensors assigns two large ones to the same writer."""
    sizes = [
        1000,
        1,
        1,
        1000,
        1,
        1,
        500,
        500,
    ]  # in this order, a balance by count puts both large ones on rank 0
    held: RankTensors = [(f"t{n}", (size,), dtype, [rows(0, size)]) for n, size in enumerate(sizes)]
    parts = assign_writers([held, held])
    written = [sum(sizes[number] for number in part.writes) for part in parts]
    assert sum(written) == sum(sizes) and max(written) - min(written) <= 4, written
    # Elements of different sizes: eight bytes each on one rank, one byte each on the other.
    mixed: RankTensors = [("wide", (100,), torch.float64, [rows(0, 100)])]
    mixed += [(f"n{n}", (100,), torch.uint8, [rows(0, 100)]) for n in range(8)]
    assert sorted(len(part.writes) for part in assign_writers([mixed, mixed])) == [1, 8]
