"""`broadcast_params` of quantized weights with all experts of a layer."""

from __future__ import annotations

import pytest
from grouping import broadcast

SINGLE = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}


def check(outcomes):
    for outcome in outcomes:
        assert len(outcome["names"]) == 2
        # The negative control: without the broadcast they are different.
        assert outcome["before"] == outcome["names"]
        assert outcome["after"] == outcome["stale"] == []


@pytest.mark.single_grouped
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_broadcast_makes_bytes_and_scales_equal(pool, recipe):
    """Check bytes and scales of each expert. float8 replicas stayed different, and MXFP8 raised."""
    check(pool.run(broadcast.broadcast_experts, 2, env=SINGLE, recipe=recipe))


@pytest.mark.single_grouped
@pytest.mark.ranks(2)
@pytest.mark.arch("9.0")
def test_broadcast_updates_transposes_on_hopper(pool):
    check(pool.run(broadcast.broadcast_experts, 2, env=SINGLE, recipe="current"))
