"""Averaged models (EMA, SWA). Evaluations use the last update of the average.

Under ``optim`` and ``optim_grads`` they used the weights that an earlier evaluation had all-gathered.
"""

from __future__ import annotations

import bodies_weight_averaging
import pytest

STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
#: Sums of 16 terms of order one in fp32, over two layers and four steps.
CLOSE = 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("average", ["ema", "swa", "own"])
def test_evaluation_uses_the_last_average(pool, average, strategy):
    for errors in pool.run(
        bodies_weight_averaging.evaluations_of_averaged_model, 2, strategy=strategy, average=average
    ):
        assert max(errors) < CLOSE, errors


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_foreach_copy_is_used_by_the_next_evaluation(pool, strategy):
    for error in pool.run(bodies_weight_averaging.foreach_copy_between_evaluations, 2, strategy=strategy):
        assert error < CLOSE
