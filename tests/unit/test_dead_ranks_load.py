"""Check that the other ranks name a rank that exits during a load within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_fsdp import checkpoint
from tests.unit.test_dead_ranks import ran


@pytest.mark.parametrize(
    ("moment", "victim"),
    [("group 0", 2), ("group 0", 0), ("before 1", 2), ("before 2", 2), ("after 3", 2), ("before 5", 0)],
)
def test_rank_that_exits_during_a_load_is_named(
    tmp_path: Path, python: str, moment: str, victim: int
) -> None:
    """Bug class: only neighbors get Gloo's error while the other ranks wait for 30 minutes."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    checkpoint.save(tmp_path / "first", model)
    result = ran(tmp_path, python, f"load {moment}", victim)
    assert [entry["rank"] for entry in result] == [rank for rank in range(3) if rank != victim]
    for item in result:
        assert f"rank(s) {victim}: the rank" in item["text"] or f": rank {victim}" in item["text"], item
        assert "has ended" in item["text"] and item["seconds"] < 3 and item["unchanged"], item


def test_load_completes_if_a_rank_exits_after_its_last_message(tmp_path: Path, python: str) -> None:
    """All ranks have read all data at this point, so the others complete the load."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    checkpoint.save(tmp_path / "first", model)
    result = ran(tmp_path, python, "load after 9", 2)
    assert [(item["text"], item["unchanged"]) for item in result] == [("", False)] * 2, result
