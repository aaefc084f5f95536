"""State dicts of optimizers in which some parameters have a main weight alone."""

from __future__ import annotations

import pytest
from plain import partial_states


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_sgd_without_momentum_resumes(pool, outer):
    """Kind: refused as the state of an optimizer that has not stepped."""
    results = pool.run(partial_states.without_momentum, 2, outer=outer)
    assert all(result == {"equal": 2, "moved": 2} for result in results), results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_a_frozen_parameter_does_not_prevent_a_load(pool, outer):
    results = pool.run(partial_states.frozen, 2, outer=outer)
    assert all(result == {"equal": 2, "moved": 2} for result in results), results


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["state_dict", "te_fsdp"])
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_a_layer_that_is_frozen_when_its_state_is_loaded(pool, outer, by):
    results = pool.run(partial_states.frozen_when_loaded, 2, outer=outer, by=by)
    assert all(result == {"equal": 2, "moved": 2} for result in results), results


@pytest.mark.ranks(2)
def test_main_weights_of_a_fresh_optimizer_alone_are_refused(pool):
    for text in pool.run(partial_states.refused, 2, outer="optim"):
        assert "CheckpointError: AdamW.load_state_dict: 2 parameters with main weights only" in text
