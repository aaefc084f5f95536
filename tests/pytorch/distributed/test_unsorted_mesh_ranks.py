"""Meshes whose ranks do not ascend in some slices, which all ranks refuse."""

from __future__ import annotations

import bodies_unsorted_mesh_ranks
import pytest


@pytest.mark.ranks(4)
@pytest.mark.parametrize("call", ["stages", "slice", "set_device_mesh", "torch"])
def test_unsorted_ranks_raise_on_all_ranks(pool, call):
    """Two ranks raised, while the others waited; torch's ``fully_shard`` swapped shards without an error."""
    for error in pool.run(bodies_unsorted_mesh_ranks.error_of_unsorted_slice, 4, call=call, timeout=60):
        assert "expected ranks that ascend along every axis, got [[0, 1], [3, 2]]" in error
