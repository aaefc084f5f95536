"""Resources that a dropped model leaves in the process: process groups, threads, file descriptors, tensors."""

from __future__ import annotations

import pytest
from strategies import leaks

MODELS = 50
NOTHING = {"groups": 0, "threads": 0, "descriptors": 0, "tensors": 0}
STRATEGIES = {
    "no_shard": "no_shard",
    "optim": "optim",
    "optim_grads": "optim_grads",
    "optim_grads_params": "optim_grads_params",
    # The reductions of the first unit use their own process groups.
    "mixed": {"0": "no_shard", "1": "optim_grads"},
}


@pytest.mark.ranks(2)
@pytest.mark.covering(strength=0, always=[{"strategy": "mixed"}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropped_models_release_resources(pool, strategy):
    found = pool.run(leaks.growth_of_counts, 2, strategy=STRATEGIES[strategy], models=MODELS)
    assert found == [NOTHING] * 2


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=0)
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_dropped_models_release_resources_on_two_axes(pool, outer):
    options = {"strategy": STRATEGIES["mixed"], "dp_replicate": 2, "outer": outer}
    assert pool.run(leaks.growth_of_counts, 4, models=14, **options) == [NOTHING] * 4


@pytest.mark.ranks(2)
def test_negative_control_kept_models(pool):
    """Negative control: the caller keeps the models."""
    for found in pool.run(leaks.growth_of_counts, 2, strategy="optim", models=7, leak=True):
        assert found["tensors"] > 7
