"""A replicated weight that is removed between two steps raises an error with its name."""

from __future__ import annotations

import pytest
from no_sharding import removed_weight


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["parametrized", "deleted", "none"])
def test_removed_replicated_weight_raises(pool, kind):
    """Kind: ``KeyError: 'weight'`` without the module's name, from the hooks before a forward."""
    for text in pool.run(removed_weight.error_of_removed_weight, 2, kind=kind):
        assert text.startswith("OrderError: 1.weight: removed after fully_shard"), text
