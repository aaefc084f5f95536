"""Parameters that stay whole: `te_fsdp.fsdp_no_shard`, and strategy no_shard."""

from __future__ import annotations

import math

import pytest
from no_sharding import training

DP2, DP2_TP2, HSDP = {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}
MIXED = {"": "optim_grads_params", "adapter": "no_shard"}


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (DP2, {"optimizer": "SGD", "microbatches": 3, "clip": "torch"}),
        (DP2, {"optimizer": "FusedAdam", "origin": "meta", "clip": "te_fsdp"}),
        (DP2, {"parts": (), "strategy": "no_shard", "microbatches": 3}),
        (DP2_TP2, {"sequence_parallel": True, "microbatches": 3, "clip": "te_fsdp"}),
        (DP2_TP2, {"parts": (), "strategy": "no_shard", "optimizer": "FusedAdam", "origin": "meta"}),
        (DP2_TP2, {"parts": ("position",), "strategy": MIXED}),
        (HSDP, {"strategy": "optim_grads", "origin": "meta", "sequence_parallel": True}),
    ],
)
def test_numerics(pool, axes, options):
    pool.run(training.numerics, math.prod(axes.values()), axes=axes, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spoil", ["reduction", "order"])
def test_numerics_can_fail(pool, spoil):
    errors = pool.run_expect_error(training.numerics, 2, axes=DP2, spoil=spoil)
    assert all("gradient 0 adapter" in error.message or "position" in error.message for error in errors)
