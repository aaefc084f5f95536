"""Test messages of all ranks through rank 0."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch.distributed as dist

from te_fsdp.collectives.agreement import _FRAME, RankMessenger, _pack
from te_fsdp.errors import CheckpointError
from te_fsdp.upstream import torch_gloo

RANKS = 4


class Counted:
    """A group that counts the messages that it sends and receives."""

    def __init__(self, group: Any, counts: Counter[str]) -> None:
        self.group, self.counts = group, counts

    def send(self, *args: Any) -> Any:
        self.counts["send"] += 1
        return self.group.send(*args)

    def recv(self, *args: Any) -> Any:
        self.counts["recv"] += 1
        return self.group.recv(*args)


def rounds(call: Any, on_rank_0: Any, counts: Counter[str] | None = None) -> list[Any]:
    """Return the results of a round of ranks that are threads."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = torch_gloo._create(store, rank, RANKS, datetime.timedelta(seconds=30))
        ranks = RankMessenger(rank, RANKS, Counted(group, Counter() if counts is None else counts))
        try:
            return ranks.round(lambda: call(rank), on_rank_0)
        finally:
            ranks.round(lambda: None, lambda seen: seen)  # all have read before a group ends

    with ThreadPoolExecutor(RANKS) as threads:
        futures = [threads.submit(run, rank) for rank in range(RANKS)]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("size", [0, 700, *range(_FRAME - 40, _FRAME + 3), 100_000])
def test_messages_of_any_size_are_received(size: int) -> None:
    """Bug class: the end or start of a message is lost if its first part is full."""
    results = rounds(lambda rank: bytes([rank]) * size, lambda seen: [b"".join(seen) + bytes([0])] * RANKS)
    assert results == [b"".join(bytes([rank]) * size for rank in range(RANKS)) + bytes([0])] * RANKS


def test_each_rank_gets_its_own_reply() -> None:
    """Control for replies that rank 0 packs once: only some ranks get equal objects."""
    pair = ["a", "b"]
    assert rounds(lambda rank: rank, lambda seen: [pair, pair, [seen[2]], pair]) == [pair, pair, [2], pair]


def test_small_messages_are_sent_as_one_message() -> None:
    """A round costs rank 0 one message from and to each rank. Bug class: sizes are sent separately."""
    counts: Counter[str] = Counter()
    rounds(lambda rank: None, lambda seen: seen, counts)
    both = 2 * 2 * (RANKS - 1)  # this round and the one that ends
    assert counts == {"send": both, "recv": both}
    assert [len(_pack(b"x" * size)) for size in (0, _FRAME)] == [1, 2]


def test_error_is_raised_on_all_ranks() -> None:
    def fail(rank: int) -> None:
        if rank == 2:
            raise CheckpointError("too late " + "x" * 2 * _FRAME)

    for error in rounds(fail, lambda seen: seen):
        assert str(error).startswith("on rank(s) 2: too late x") and len(str(error)) > 2 * _FRAME


def test_ranks_connect_to_rank_0_only() -> None:
    """Bug class: connections between all pairs, which grow with the square of the number of ranks."""

    alive: list[Any] = []

    def sockets() -> set[str]:
        found = set()
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
        return {target for target in found if target.startswith("socket:")}

    def opened(lazy: bool) -> int:
        store, before = dist.HashStore(), sockets()

        def run(rank: int) -> Any:
            if not lazy:
                return dist.ProcessGroupGloo(store, rank, RANKS, datetime.timedelta(seconds=30))
            group = torch_gloo._create(store, rank, RANKS, datetime.timedelta(seconds=30))
            RankMessenger(rank, RANKS, group).round(lambda: None, lambda seen: seen)
            return group

        with ThreadPoolExecutor(RANKS) as threads:
            alive.extend(threads.map(run, range(RANKS)))
        return len(sockets() - before)

    pairs = RANKS * (RANKS - 1) // 2
    assert opened(lazy=False) - opened(lazy=True) == 2 * (pairs - (RANKS - 1))
