"""Functions of a stacked weight under tp with a DTensor of ``distribute_tensor``.

The DTensor has the row order of the unsharded module.
"""

from __future__ import annotations

import pytest
from plain_dcp import arithmetic


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 1, "tp": 4}])
@pytest.mark.parametrize("kind", ["gated MLP", "fused attention"])
def test_arithmetic_with_distributed_tensors(pool, kind, axes, sharder):
    """Check that ``torch.empty_like(p).copy_(x)`` has the row order of ``p``. Functions combined different rows."""
    for found in pool.run(arithmetic.differing_functions, 4, kind=kind, axes=axes, sharder=sharder):
        assert found["copied"] == []
        # The negative control: docs/troubleshooting.md requires the copy.
        assert len(found["as it is"]) == 4 * len(arithmetic.FUNCTIONS)
