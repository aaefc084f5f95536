"""Bound models that torch's own fully_shard shards: a forward after a step reads the new weights."""

from __future__ import annotations

import pytest
from parity import torch_units


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["evaluated", "kept"])
def test_a_step_reaches_units_that_are_unsharded(pool, how):
    for outcome in pool.run(torch_units.stepped, 2, how=how):
        assert outcome["worst"] < 1e-5  # sums of fp32 in another order; stale weights: 0.1 and more


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["te", "torch"])
def test_gradients_of_a_unit_that_reentrant_checkpoints_use_twice(pool, library):
    """FSDP2 alone reduces those of one use, without an error."""
    for outcome in pool.run(torch_units.reused, 2, library=library):
        assert outcome["worst"] < 1e-5
