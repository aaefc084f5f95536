"""load_state_dict(assign=True) of sharded models."""

from __future__ import annotations

import pytest
from parity import assigned


@pytest.mark.ranks(2)
def test_assign(pool):
    stages = list(assigned.STAGES)
    assert pool.run(assigned.assigned, 2, stages=stages, recipe="") == [stages] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current"])
def test_assign_to_quantized_weights(pool, recipe):
    stages = list(assigned.STAGES)
    assert pool.run(assigned.assigned, 2, stages=stages, recipe=recipe) == [stages] * 2
