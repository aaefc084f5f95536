"""Jobs that resume by plain DCP alone, with optimizers that have not stepped."""

from __future__ import annotations

import pytest
from plain_dcp import search_regressions

CASES = [
    ("torch", "quantized", "no_shard"),
    ("torch", "bf16", "no_shard"),
    ("te_fsdp", "quantized", "no_shard"),
    ("te_fsdp", "bf16", "optim"),
    ("torch", "fp32", "no_shard"),
    ("te_fsdp", "fp32", "no_shard"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("sharder", "weights", "outer"), CASES)
def test_optimizers_that_have_not_stepped_resume(pool, sharder, weights, outer):
    for result in pool.run(
        search_regressions.resumed_by_plain_dcp, 4, sharder=sharder, weights=weights, outer=outer
    ):
        assert result["read"]
        assert result["after"] < 1e-6  # fp32, elementwise; moments that are lost: 0.01 and more
        assert result["control"] > 1e-3
