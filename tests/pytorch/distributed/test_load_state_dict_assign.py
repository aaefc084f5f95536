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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("device", ["meta", "device"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_assigned_pickles_of_replicated_weights_train(pool, tmp_path, recipe, device):
    """Pickles of float8 tensors have no quantizer, without which the step ended in an error of TE.

    Before its first forward TE does not save delayed scaling's history, so the scale of the step may differ.
    """
    where = {"directory": str(tmp_path), "device": device}
    allowed = ["stepped weight"] if recipe == "delayed" else []
    assert pool.run(load_state_dict_assign.assign_pickled, 2, recipe=recipe, **where) == [allowed] * 2
