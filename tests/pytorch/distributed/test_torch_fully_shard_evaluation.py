"""Bound models sharded by torch's fully_shard: changes to the root after an evaluation."""

from __future__ import annotations

import pytest
from parity import torch_fully_shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["frozen", "unfrozen", "written", "optimizer"])
def test_changes_after_an_evaluation_are_kept(pool, change):
    """Check a change to unsharded weights, which FSDP2 drops without an error."""
    for outcome in pool.run(torch_fully_shard.compare_changes_after_evaluation, 2, change=change):
        assert outcome["worst"] < 1e-5 and outcome["flags"] == [], outcome
        assert outcome["moved"] == (change != "frozen")
