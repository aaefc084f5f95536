"""Bound models sharded by torch's fully_shard: optimizers built while a unit is unsharded."""

from __future__ import annotations

import pytest
from parity import torch_fully_shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", ["root", "block"])
def test_optimizer_built_while_unsharded_raises(pool, part):
    """Check parameters that get no gradients, so that the unit is not trained."""
    for kind, text in pool.run(
        torch_fully_shard.build_optimizer_while_unsharded, 2, part=part, when="unsharded"
    ):
        assert kind == "OrderError" and text.startswith("SGD.step: an unsharded parameter of shape")
        assert "a parameter that the model has while a unit is unsharded" in text
    assert (
        pool.run(torch_fully_shard.build_optimizer_while_unsharded, 2, part=part, when="after reshard")
        == [("", "")] * 2
    )
