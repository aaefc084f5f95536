"""Writes of user code around a step. They reach the step or raise."""

from __future__ import annotations

import pytest
import torch
from parity import frozen_after_forward
from quantization import user_writes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("optimizer", user_writes.OPTIMIZERS)
@pytest.mark.parametrize("strategy", user_writes.BOUND)
def test_step_uses_written_weights_of_bound_models(pool, strategy, optimizer, recipe):
    options = {"recipe": recipe, "optimizer": optimizer, "strategy": strategy}
    for way in ("copy_", "in and out"):
        for found in pool.run(user_writes.trained, 2, way=way, **options):
            assert found["written"] is (way not in user_writes.RESTORED), way


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=["dp", "tp"])
@pytest.mark.parametrize("name", ["head.weight", "blocks.0.fc1_weight"])
def test_weight_frozen_before_backward_gets_no_gradient(pool, name, axes):
    # Each of the 2 blocks has 6 parameters. The head's weight is trained, its bias is not.
    assert pool.run(frozen_after_forward.count_gradients_after_freezing, 2, name=name, **axes) == [12, 12]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["torch", "optim"])
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_evaluation_uses_values_written_to_local_tensors(pool, recipe, strategy):
    """Check quantized weights that an evaluation left unsharded. Their local tensors have separate versions."""
    for outputs in pool.run(user_writes.outputs_after_evaluation, 2, recipe=recipe, strategy=strategy):
        expected, before = outputs.pop("copy_"), outputs.pop("nothing")
        assert not torch.equal(expected, before)
        assert [way for way, output in outputs.items() if not torch.equal(output, expected)] == []
