"""Test optimizers that step in hooks of backward against steps after it."""

from __future__ import annotations

import torch
from strategies import steps_in_backward


def test_steps_in_backward_run_the_same_collectives(pool):
    """Each parameter's update has the same bits, and no all-gather that backward has started is repeated."""
    hooks, after = (pool.run(steps_in_backward.train, 4, in_backward=each) for each in (True, False))
    for mine, theirs in zip(hooks, after, strict=True):
        for name, weight in theirs["weights"].items():
            assert torch.equal(mine["weights"][name], weight), name
        # The first step has collectives of checks, too.
        assert mine["collectives"][1:] == theirs["collectives"][1:]
        assert theirs["collectives"][-1].count("reduce_scatter") == 2 * steps_in_backward.UNITS
