"""Row slices of a stacked weight under tp, as scripts take them of the unsharded module's weight."""

from __future__ import annotations

import pytest
from plain_dcp import row_slices


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "tp": 4}])
@pytest.mark.parametrize("kind", ["gated MLP", "fused attention"])
def test_row_slices_equal_the_unsharded_weight(pool, kind, axes, sharder):
    """Check ``gate, up = p.chunk(2)``, whose rows were in the order of the ranks without an error."""
    for found in pool.run(row_slices.compare_slices, 4, kind=kind, axes=axes, sharder=sharder, recipe="none"):
        assert found["wrong"] == []
        assert found["joined"] == [False, False]
