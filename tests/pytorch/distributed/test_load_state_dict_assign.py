"""load_state_dict(assign=True) of sharded models."""

from __future__ import annotations

import pytest
from parity import load_state_dict_assign


@pytest.mark.ranks(2)
def test_assign_keeps_parameters_and_values(pool):
    stages = list(load_state_dict_assign.STAGES)
    assert pool.run(load_state_dict_assign.load_with_assign, 2, stages=stages, recipe="") == [stages] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current"])
def test_assign_to_quantized_weights(pool, recipe):
    stages = list(load_state_dict_assign.STAGES)
    assert pool.run(load_state_dict_assign.load_with_assign, 2, stages=stages, recipe=recipe) == [stages] * 2
