"""Registered methods called by the unit's own forward or by another registered method."""

from __future__ import annotations

import pytest
from strategies import forward_methods


@pytest.mark.ranks(2)
@pytest.mark.parametrize("registered", [[""], ["block"], ["", "block"]], ids=["root", "unit", "both"])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "no_shard"])
def test_registered_method_called_in_forward(pool, strategy, registered):
    for outcome in pool.run(
        forward_methods.train_with_nested_methods, 2, strategy=strategy, registered=registered
    ):
        assert outcome["worst"] < 1e-6  # fp32 sums in a different order; without the unit's weights it raises


@pytest.mark.ranks(2)
def test_registered_method_of_a_root_without_weights(pool):
    for outcome in pool.run(
        forward_methods.train_with_nested_methods,
        2,
        strategy="optim_grads_params",
        registered=[""],
        own_weights=False,
    ):
        assert outcome["worst"] < 1e-6
