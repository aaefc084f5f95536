"""``redistribute`` of sharded parameters."""

from __future__ import annotations

import pytest
from plain_dcp import redistribution


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("recipe", "axes", "uneven"),
    [
        ("none", {"tp": 4}, False),
        ("none", {"dp_shard": 2, "tp": 2}, True),
        ("current", {"dp_shard": 2, "tp": 2}, False),
    ],
)
def test_values_of_redistributed_parameters(pool, recipe, axes, uneven):
    """Check ``full_tensor`` of the result: stacked rows in their order, and uneven rows over a flattened mesh."""
    assert pool.run(redistribution.differing, 4, recipe=recipe, axes=axes, uneven=uneven) == [[]] * 4
