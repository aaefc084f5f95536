"""Test optimizers that step in hooks of backward against steps after it."""

from __future__ import annotations

import pytest
import torch
from strategies import steps_in_backward


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_steps_in_backward_run_the_same_collectives(pool, strategy):
    """Each parameter's update has the same bits, and no all-gather that backward has started is repeated."""
    options = {"strategy": strategy}
    hooks, after = (pool.run(steps_in_backward.train, 4, in_backward=x, **options) for x in (True, False))
    for mine, theirs in zip(hooks, after, strict=True):
        for name, weight in theirs["weights"].items():
            assert torch.equal(mine["weights"][name], weight), name
        # The first step has collectives of checks, too.
        assert mine["collectives"][1:] == theirs["collectives"][1:]
        microbatches = 2 if strategy == "optim_grads_params" else 1
        assert theirs["collectives"][-1].count("reduce_scatter") == microbatches * steps_in_backward.UNITS
