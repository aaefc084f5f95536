"""Check that errors name ranks that exit before a collective call, while slow ranks are waited for."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.commands import python_path

WORKER = Path(__file__).with_name("dead_rank_worker.py")
#: Seconds in which a dead rank must be named.
LIMIT = 15.0


def ran(tmp_path: Path, python: str, kind: str, victim: int) -> list[dict[str, Any]]:
    command = [python, str(WORKER), str(tmp_path), kind, str(victim)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return sorted(map(json.loads, lines), key=lambda one: one["rank"])


@pytest.mark.parametrize(("kind", "victim"), [("killed", 2), ("killed", 1), ("exited", 2), ("killed", 0)])
def test_exited_rank_is_named(tmp_path: Path, python: str, kind: str, victim: int) -> None:
    """Cover processes that were killed or exited, including the one that hosts the TCPStore."""
    result = ran(tmp_path, python, kind, victim)
    assert [entry["rank"] for entry in result] == [rank for rank in range(3) if rank != victim]
    for item in result:
        assert item["text"].startswith(f"CollectiveError: te_fsdp.checkpoint.save: rank {victim}"), item
        assert "has ended" in item["text"] and item["seconds"] < LIMIT, item
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["first"]


@pytest.mark.parametrize("kind", ["late", "stopped"])
def test_slow_rank_is_waited_for(tmp_path: Path, python: str, kind: str) -> None:
    """Cover a rank that computes longer than the others, or whose process is stopped for a while."""
    result = ran(tmp_path, python, kind, 2)
    assert [(item["rank"], item["text"]) for item in result] == [(0, ""), (1, ""), (2, "")]
    assert result[0]["seconds"] > 6, "the control: it has waited for longer than it takes to ask"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]


def test_rank_stopped_during_a_save_is_named_in_the_log(tmp_path: Path, python: str) -> None:
    """Ranks wait up to the collective timeout, and rank 0 logs the rank it waits for. Bug class: silent waits."""
    result = ran(tmp_path, python, "stopped within", 2)
    assert [(item["rank"], item["text"]) for item in result] == [(0, ""), (1, ""), (2, "")]
    waits = [[text for text in item["log"] if "for a message from" in text] for item in result]
    assert waits[0][0].startswith("rank 0 has waited 2 s for a message from rank 2. "), result[0]
    assert "The limit is 1800 s per message" in waits[0][0], result[0]
    assert waits[1] == [], "others report rank 0 only if they have waited for four times as long"


@pytest.mark.parametrize("victim", [2, 0])
def test_rank_that_exits_during_data_exchange_is_named(tmp_path: Path, python: str, victim: int) -> None:
    """All ranks name it in ``load(read="once")``. Bug class: Gloo's error, which names no rank."""
    result = ran(tmp_path, python, "killed in the exchange", victim)
    assert [entry["rank"] for entry in result] == [rank for rank in range(3) if rank != victim]
    for item in result:
        assert item["text"].startswith("CheckpointError: ") and f"rank(s) {victim}" in item["text"], item
        assert item["seconds"] < LIMIT, item
