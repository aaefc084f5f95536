"""Meshes with slices whose ranks are not ascending. All ranks reject them."""

from __future__ import annotations

import bodies_unsorted_mesh_ranks
import pytest


@pytest.mark.ranks(4)
@pytest.mark.parametrize("call", ["stages", "slice", "set_device_mesh", "torch"])
def test_unsorted_ranks_raise_on_all_ranks(pool, call):
    """Check that no rank waits. torch's ``fully_shard`` exchanged shards without an error."""
    for error in pool.run(bodies_unsorted_mesh_ranks.error_of_unsorted_slice, 4, call=call, timeout=60):
        assert "expected ranks that ascend along every axis, got [[0, 1], [3, 2]]" in error
