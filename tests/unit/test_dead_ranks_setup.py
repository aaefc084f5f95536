"""Check that the other ranks name a rank that exits during setup within seconds."""

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
    """Bug class: neighbors get Gloo's error, and other ranks wait for 30 minutes.

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
    """Also covers a process that a debugger has stopped."""
    result = ran(tmp_path, python, f"set-up {moment}", 2)
    assert [(item["rank"], item["text"]) for item in result] == [(0, ""), (1, ""), (2, "")]
    assert result[0]["seconds"] > 6, "the control: it has checked several times whether rank 2 is alive"


def test_error_of_this_rank_is_shown_with_exited_ranks() -> None:
    """If all ranks raise, some exit first, and the others detect their exit."""
    error = rendezvous.ended_error("fully_shard", [1], 2, RuntimeError("no NCCL\nsecond line"))
    assert "rank 1 has ended" in str(error) and "and here RuntimeError: no NCCL. " in str(error), error
