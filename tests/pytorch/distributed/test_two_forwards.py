"""One backward through two forwards of a model, as for preference pairs."""

from __future__ import annotations

import pytest
from strategies import counting


@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}], ids=["dp", "tp"])
@pytest.mark.ranks(4)
def test_each_unit_is_reduced_once(pool, axes):
    for counts in pool.run(counting.two_forwards, 2 * axes.get("tp", 1), axes=axes):
        assert counts == {"one": 3, "two": 3}
