"""Attributes of a parameter, which every replacement of the parameter keeps.

Its hooks and flags are tested, too.
"""

from __future__ import annotations

import pytest
from parity import parameter_attributes as bodies

from te_fsdp.layout import STRATEGIES


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
    """Check requires_grad, attributes, hooks, ``grad_dtype``, class and ties of every replaced parameter."""
    pool.run(bodies.check_kept_attributes, 2, route=route, strategy=strategy)
