"""Parameters that some ranks use in only one of two reductions of a backward."""

from __future__ import annotations

import pytest
from no_sharding import weight_decay


@pytest.mark.ranks(2)
def test_second_reduction_keeps_gradients_of_the_first(pool):
    pool.run(weight_decay.two_forwards, 2, axes={"dp_shard": 2})
