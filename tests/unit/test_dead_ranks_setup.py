"""A rank that ends within a call that sets a model up is named by the others in seconds."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from te_fsdp.collectives import rendezvous
from tests.unit.test_dead_ranks import ran


@pytest.mark.parametrize(
    ("moment", "victim"),
    [*itertools.product(("compare", "gather", "build"), (2, 0)), ("leave", 2)],
)
def test_rank_that_exits_during_setup_is_named(tmp_path: Path, python: str, moment: str, victim: int) -> None:
    """Kind: raw errors of gloo on its neighbors, and others that wait for half an hour, while all live on.

    Also: others name the ranks that have raised and ended because of it.
    """
    result = ran(tmp_path, python, f"set-up {moment}", victim)
    assert [entry["rank"] for entry in result] == [rank for rank in range(3) if rank != victim]
    call = "Meshes.build" if moment == "build" else "fully_shard"
    for item in result:
        assert item["text"].startswith(f"CollectiveError: te_fsdp.{call}: rank {victim}"), item
        assert "has ended" in item["text"] and item["seconds"] < 4, item


@pytest.mark.parametrize("moment", ["late", "stopped"])
def test_slow_rank_is_waited_for_during_setup(tmp_path: Path, python: str, moment: str) -> None:
    """Skew is legitimate, also of a process that a debugger has stopped."""
    result = ran(tmp_path, python, f"set-up {moment}", 2)
    assert [(item["rank"], item["text"]) for item in result] == [(0, ""), (1, ""), (2, "")]
    assert result[0]["seconds"] > 6, "the control: it has checked several times whether rank 2 is alive"


def test_error_of_this_rank_is_shown_with_exited_ranks() -> None:
    """An error of all ranks ends some of them first, so that the others find these ended."""
    error = rendezvous.ended_error("fully_shard", [1], 2, RuntimeError("no NCCL\nsecond line"))
    assert "rank 1 has ended" in str(error) and "and here RuntimeError: no NCCL. " in str(error), error
