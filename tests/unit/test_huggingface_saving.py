"""Routes of rectangles between ranks when a sharded model is exported: each once, one group at a time."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from te_fsdp.checkpoint.portable.huggingface_model import Description, describe_shares, plan_exchange
from te_fsdp.errors import CheckpointError


def told(shape, *places, dtype=torch.float32):
    """A rank's description of a tensor of which it has rectangles."""
    return Description(shape, torch.bfloat16, dtype, places)


def rows(name, height, width, ranks, rank):
    """A tensor cut by rows, in pieces that need not be equal."""
    step = -(-height // ranks)
    low, high = min(rank * step, height), min((rank + 1) * step, height)
    return {name: told((height, width), ((low, 0), (high - low, width)))}


MESHES = {
    "dp4": lambda rank: rows("a", 10, 4, 4, rank) | rows("b", 3, 8, 4, rank) | rows("c", 16, 2, 4, rank),
    "hsdp": lambda rank: (
        rows("a", 10, 4, 2, rank % 2) | rows("b", 3, 8, 2, rank % 2) | rows("c", 16, 2, 2, rank % 2)
    ),
    "replicated": lambda rank: {n: told((4, 4), ((0, 0), (4, 4))) for n in "abc"},
    "on one rank": lambda rank: {n: told((4, 4), *([((0, 0), (4, 4))] * (rank == 2))) for n in "abc"},
    "columns": lambda rank: {n: told((4, 8), ((0, 2 * rank), (4, 2))) for n in "abc"},
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "queues",
    [[[["a"], ["b"], ["c"]], [], [], []], [[["a"]], [["b"]], [["c"]], []], [[["a", "b"]], [], [], [["c"]]]],
    ids=["one writer", "three writers", "a group of two"],
)
def test_everything_comes_once_group_by_group(mesh, queues):
    seen = [MESHES[mesh](rank) for rank in range(4)]
    plans = plan_exchange(seen, queues)
    about = describe_shares(seen)
    for rank, plan in enumerate(plans):
        assert all(rank in (one.holder, one.writer) for one in plan)
        assert all(seen[one.holder][one.name][3][one.index] == one.place for one in plan)
        for other in range(rank):  # in the order in which the other one takes part
            assert [one for one in plan if other in one[::2]] == [
                one for one in plans[other] if rank in one[::2]
            ]
        came = list(dict.fromkeys(one.name for one in plan if one.writer == rank))
        assert came == [name for group in queues[rank] for name in group]
    elements = Counter()
    for rank, plan in enumerate(plans):
        for one in plan:
            elements[one.name] += math.prod(one.place[1]) * (one.writer == rank)
    assert elements == {name: math.prod(about[name][0]) for name in "abc"}


@pytest.mark.parametrize("mesh", MESHES)
def test_no_two_ranks_wait_for_each_other(mesh):
    """Each takes part in its transfers one after another: all are done in the end."""
    plans = plan_exchange([MESHES[mesh](rank) for rank in range(4)], [[["a"], ["b"]], [], [["c"]], []])
    left = [list(plan) for plan in plans]
    while any(left):
        ready = next(
            (p[0] for p in left if p and all(left[r][:1] == [p[0]] for r in (p[0].holder, p[0].writer))), None
        )
        assert ready is not None, left
        for rank in {ready.holder, ready.writer}:
            left[rank].pop(0)


def test_what_several_hold_comes_from_the_one_with_the_least_to_do():
    seen = [{n: told((4, 4), ((0, 0), (4, 4))) for n in "abcd"} for _ in range(4)]
    plans = plan_exchange(seen, [[["a"], ["b"], ["c"], ["d"]], [], [], []])
    assert [len(plan) for plan in plans] == [4, 0, 0, 0], "the writer has it all"
    others = [{}, *seen[1:]]
    plans = plan_exchange(others, [[["a"], ["b"], ["c"], ["d"]], [], [], []])
    assert sorted(len(plan) for plan in plans[1:]) == [1, 1, 2]


def test_tensors_that_the_ranks_do_not_hold_once():
    seen = [rows("a", 8, 4, 4, rank) for rank in range(4)]
    with pytest.raises(CheckpointError, match=r"every element once: a \(24 of 32\)"):
        plan_exchange(seen[:3], [[["a"]], [], []])
    with pytest.raises(CheckpointError, match=r"every element once: a \(40 of 32\)"):
        plan_exchange([*seen, {"a": told((8, 4), ((1, 0), (2, 4)))}], [[["a"]], [], [], [], []])
    with pytest.raises(CheckpointError, match=r"every element once: a \(some twice\)"):
        plan_exchange([*seen[:3], {"a": told((8, 4), ((5, 0), (2, 4)))}], [[["a"]], [], [], []])
    other = {"a": told((8, 4), ((6, 0), (2, 4)), dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"a: of another kind on rank 3"):
        plan_exchange([*seen[:3], other], [[["a"]], [], [], []])
    nothing = {"a": told((8, 4), dtype=torch.bfloat16)}  # no element, and so no main weight
    assert describe_shares([nothing, *seen])["a"][2] == torch.float32
