"""Tied quantized weights in every replacement of parameters.

A parameter or module that is used under two names stays one object.
"""

from __future__ import annotations

import pytest
from quantization import tied

from te_fsdp.layout import STRATEGIES


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "recipe", [pytest.param(r, marks=pytest.mark.recipe(r)) for r in ("current", "block", "mxfp8")]
)
def test_tied_quantized_weight_trains_as_one(pool, recipe, strategy):
    """Check gradients and weights of three steps against one process. The weight stays one object in `fully_shard`."""
    for found in pool.run(tied.train_tied, 2, recipe=recipe, strategy=strategy):
        # All data are the same on both ranks: sums of two equal bf16 gradients, halved, are exact.
        assert found["worst"] == 0.0


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
def test_negative_control_untied_weights(pool):
    for found in pool.run(tied.train_tied, 2, recipe="current", strategy="optim_grads_params", untie=True):
        assert found["worst"] > 0.1
