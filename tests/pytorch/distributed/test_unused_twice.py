"""Parameters that some ranks use in one of two reductions of one backward."""

from __future__ import annotations

import pytest
from no_sharding import decayed


@pytest.mark.ranks(2)
def test_gradients_of_an_earlier_reduction_stay(pool):
    pool.run(decayed.two_forwards, 2, axes={"dp_shard": 2})
