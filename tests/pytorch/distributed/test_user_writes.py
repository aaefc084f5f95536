"""The kind: what user code writes or changes around a step reaches the step, or raises."""

from __future__ import annotations

import pytest
from quantization import user_writes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("optimizer", user_writes.OPTIMIZERS)
@pytest.mark.parametrize("strategy", user_writes.BOUND)
def test_a_step_starts_from_written_weights_of_bound_models(pool, strategy, optimizer, recipe):
    options = {"recipe": recipe, "optimizer": optimizer, "strategy": strategy}
    for way in ("copy_", "in and out"):
        for found in pool.run(user_writes.trained, 2, way=way, **options):
            assert found["written"] is (way not in user_writes.RESTORED), way
