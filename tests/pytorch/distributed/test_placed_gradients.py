"""Steps with gradients whose placements are not their parameters'."""

from __future__ import annotations

import pytest
from parity import placed


@pytest.mark.ranks(4)
@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("checks", ["setup", "first_steps"])
def test_a_gradient_sharded_over_tp(pool, checks, main):
    """Of a replicated parameter, the first tp rank's columns replaced all others, without an error."""
    for outcome in pool.run(placed.projected, 4, checks=checks, main=main):
        assert outcome["worst"] < 1e-6, "fp32, sums in another order"
