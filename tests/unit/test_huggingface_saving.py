"""Who sends which rectangle to whom when a sharded model becomes a folder: everything once, a group at a time."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from te_fsdp.checkpoint.portable.huggingface_saving import Told, describe_shares, plan_exchange
from te_fsdp.errors import CheckpointError


def told(shape, *places, dtype=torch.float32):
    """A rank's description of a tensor of which it has rectangles."""
    return Told(shape, torch.bfloat16, dtype, places)


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
def test_everything_comes_once_within_the_bound(mesh, queues):
    seen = [MESHES[mesh](rank) for rank in range(4)]
    plans = plan_exchange(seen, queues)
    about = describe_shares(seen)

    def size(name, place):
        return math.prod(place[1]) * about[name][2].itemsize

    largest = max(
        sum(math.prod(about[n][0]) * about[n][2].itemsize for n in group)
        for queue in queues
        for group in queue
    )
    assert len({len(plan.sends) for plan in plans}) == len({len(plan.receives) for plan in plans}) == 1
    came = [[] for _ in seen]
    for number in range(len(plans[0].sends)):
        for rank, plan in enumerate(plans):
            sent = [(to, name, seen[rank][name][3][n]) for to, name, n in plan.sends[number]]
            assert sum(size(name, place) for _, name, place in sent) <= largest
            for to in range(4):  # in the order in which the other one takes the bytes apart
                arrive = [(n, p) for source, n, p in plans[to].receives[number] if source == rank]
                assert [(n, p) for t, n, p in sent if t == to] == arrive
            if plan.receives[number]:
                came[rank].append({name for _, name, _ in plan.receives[number]})
    assert came == [[set(group) for group in queue] for queue in queues]
    elements = Counter()
    for plan in plans:
        for _, name, place in (one for receives in plan.receives for one in receives):
            elements[name] += math.prod(place[1])
    assert elements == {name: math.prod(about[name][0]) for name in "abc"}


def test_what_several_hold_comes_from_the_one_with_the_least_to_do():
    seen = [{n: told((4, 4), ((0, 0), (4, 4))) for n in "abcd"} for _ in range(4)]
    plans = plan_exchange(seen, [[["a"], ["b"], ["c"], ["d"]], [], [], []])
    assert [sum(map(len, plan.sends)) for plan in plans] == [4, 0, 0, 0], "the writer has it all"
    others = [{}, *seen[1:]]
    plans = plan_exchange(others, [[["a"], ["b"], ["c"], ["d"]], [], [], []])
    assert sorted(sum(map(len, plan.sends)) for plan in plans) == [0, 1, 1, 2]


def test_tensors_that_the_ranks_do_not_hold_once():
    seen = [rows("a", 8, 4, 4, rank) for rank in range(4)]
    with pytest.raises(CheckpointError, match=r"every element once: a \(24 of 32\)"):
        plan_exchange(seen[:3], [[["a"]], [], []])
    with pytest.raises(CheckpointError, match=r"every element once: a \(40 of 32\)"):
        plan_exchange([*seen, {"a": told((8, 4), ((1, 0), (2, 4)))}], [[["a"]], [], [], [], []])
    other = {"a": told((8, 4), ((6, 0), (2, 4)), dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"a: of another kind on rank 3"):
        plan_exchange([*seen[:3], other], [[["a"]], [], [], []])
    nothing = {"a": told((8, 4), dtype=torch.bfloat16)}  # no element, and so no main weight
    assert describe_shares([nothing, *seen])["a"][2] == torch.float32
