"""Steps with gradients whose placements are not their parameters'."""

from __future__ import annotations

import pytest
from parity import gradient_placements


@pytest.mark.ranks(4)
@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("checks", ["setup", "first_steps"])
def test_assigned_gradient_sharded_over_tp(pool, checks, main):
    """Check a tp-replicated weight with a tp-sharded gradient. The first rank's columns replaced the others."""
    for outcome in pool.run(gradient_placements.train_with_projected_gradient, 4, checks=checks, main=main):
        assert outcome["worst"] < 1e-6, "fp32, sums in a different order"
