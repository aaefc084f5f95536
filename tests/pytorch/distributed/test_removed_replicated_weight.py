"""Replicated weights that are removed between two steps. An error names the weight."""

from __future__ import annotations

import pytest
from no_sharding import removed_weight


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["parametrized", "deleted", "none"])
def test_removed_replicated_weight_raises(pool, kind):
    """Check that no ``KeyError: 'weight'`` without the module's name is raised."""
    for text in pool.run(removed_weight.error_of_removed_weight, 2, kind=kind):
        assert text.startswith("OrderError: 1.weight: removed after fully_shard"), text
