"""Attributes of a parameter in every replacement of the parameter.

Its hooks and flags are tested, too.
"""

from __future__ import annotations

import pytest
from parity import parameter_attributes as bodies

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("route", "strategy"),
    [
        ("stock", ""),
        ("bound", ""),
        ("torch", ""),
        *(("sharded", strategy) for strategy in STRATEGIES),
    ],
)
def test_materialize_keeps_attributes_hooks_and_ties(pool, route, strategy):
    """Kind: requires_grad, attributes, hooks, ``grad_dtype``, class and ties of every parameter that is replaced."""
    pool.run(bodies.check_kept_attributes, 2, route=route, strategy=strategy)
