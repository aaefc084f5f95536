"""Shortest forms of random training programs that te_fsdp did not run as one process does."""

from __future__ import annotations

import pytest
from hfsdp import fusion


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "ep": 2}, {"dp_shard": 1, "ep": 2, "tp": 2}], ids=["dp", "tp"])
def test_fused_gradients_of_experts_over_ep(pool, axes):
    pool.run(fusion.over_ep, 4, axes=axes)
