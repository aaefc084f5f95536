"""Gradients of replicated parameters with a different dtype than the parameter."""

from __future__ import annotations

import pytest
from no_sharding import specs


@pytest.mark.ranks(2)
def test_reduced_gradient_keeps_its_dtensor_spec(pool):
    """Check that a step creates no new DTensor spec, which costs host time in each step."""
    assert pool.run(specs.changed_specs, 2) == [[], []]
