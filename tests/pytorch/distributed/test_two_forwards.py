"""One backward through two forwards of a model, as for preference pairs."""

from __future__ import annotations

import pytest
from strategies import step_costs


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=["dp", "tp"])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.ranks(4)
def test_each_unit_is_reduced_once(pool, axes, sharder):
    for counts in pool.run(step_costs.two_forwards, 2 * axes.get("tp", 1), axes=axes, sharder=sharder):
        assert counts.pop("nodes") <= 1
        assert counts == {"one": 3, "two": 3, "one dropped": 3}


@pytest.mark.ranks(2)
def test_interleaved_forwards_and_backwards(pool):
    pool.run(step_costs.interleaved, 2)
