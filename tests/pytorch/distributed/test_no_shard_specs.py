"""Gradients of replicated parameters in a dtype of their own."""

from __future__ import annotations

import pytest
from no_sharding import specs


@pytest.mark.ranks(2)
def test_reduced_gradient_keeps_its_dtensor_spec(pool):
    """Kind: work on the host in each step."""
    assert pool.run(specs.changed_specs, 2) == [[], []]
