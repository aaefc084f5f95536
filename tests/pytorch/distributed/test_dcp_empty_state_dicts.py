"""DCP's ``set_state_dict`` with ``{}`` on some ranks, where torch raises or returns while the other ranks wait."""

from __future__ import annotations

import pytest
from plain_dcp import empty_state_dicts


@pytest.mark.parametrize("which", ["both", "model", "optimizer"])
def test_empty_state_dict_on_some_ranks_raises_on_all_ranks(pool, which):
    for (error,) in pool.run(empty_state_dicts.loaded, 2, broadcast=False, which=which, timeout=60):
        assert "expected the full state dicts on all ranks, got an empty one on rank 1" in error


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_broadcast_of_empty_state_dicts(pool, strategy):
    """torch took ``{}`` for a call without a model, so that rank 0 waited in the broadcast of the model."""
    options = {"broadcast": True, "which": "both", "strategy": strategy}
    assert pool.run(empty_state_dicts.loaded, 2, **options, timeout=60) == [[], []]
