"""Functions that move the sharded dim of an ordinary DTensor with ``_StridedShard``."""

from __future__ import annotations

import pytest
from plain_dcp import row_slices


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
def test_functions_that_move_the_sharded_dim_keep_values(pool, sharder, axes):
    """Check ``w.t().amax(0)``. torch 2.11 keeps the dim, so that the result has wrong rows without an error."""
    assert pool.run(row_slices.compare_moved_dims, 4, axes=axes, sharder=sharder) == [[]] * 4
