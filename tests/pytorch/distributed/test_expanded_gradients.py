"""Gradients that autograd expands. A gradient in a DTensor owns its memory, so that it can be written to.

Autograd expands the gradient of a sum, and returns one tensor as the gradient of two parameters that are added.
"""

from __future__ import annotations

import pytest
from strategies import expanded_gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("marked", [True, False], ids=["marked", "whole"])
@pytest.mark.parametrize("strategy", [None, "no_shard", "optim", "optim_grads_params"])
def test_expanded_gradients_equal_one_process(pool, strategy, marked):
    for form in expanded_gradients.FORMS:
        for found in pool.run(expanded_gradients.trained, 2, strategy=strategy, form=form, marked=marked):
            # Two fp32 steps, with sums in a different order: a few times 2^-24 of values near 1.
            assert max(found) < 1e-6, (form, found)
