"""State dicts of optimizers in which some parameters have only a main weight."""

from __future__ import annotations

import pytest
from plain_dcp import partial_optimizer_state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_sgd_without_momentum_resumes(pool, outer):
    """Check that main weights alone are not rejected as the state of an optimizer that has not stepped."""
    results = pool.run(partial_optimizer_state.without_momentum, 2, outer=outer)
    assert all(result == {"equal": 2, "moved": 2} for result in results), results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_load_with_a_parameter_that_never_stepped(pool, outer):
    results = pool.run(partial_optimizer_state.load_with_unstepped_parameter, 2, outer=outer)
    assert all(result == {"equal": 2, "moved": 2} for result in results), results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["state_dict", "te_fsdp"])
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_load_while_a_layer_is_frozen(pool, outer, by):
    results = pool.run(partial_optimizer_state.frozen_when_loaded, 2, outer=outer, by=by)
    assert all(result == {"equal": 2, "moved": 2} for result in results), results


@pytest.mark.ranks(2)
def test_fresh_optimizer_with_main_weights_only_raises(pool):
    for text in pool.run(partial_optimizer_state.refused, 2, outer="optim"):
        assert "CheckpointError: AdamW.load_state_dict: 2 parameters with main weights only" in text
