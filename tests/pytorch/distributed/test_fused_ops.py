"""Modules of `te.ops`.

They are initialized and trained as in one process. Unsupported uses raise.
"""

from __future__ import annotations

import pytest
from strategies import fused_ops as bodies


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_meta_built_ops_train_as_one_process(pool, strategy):
    """Check TE modules that te_fsdp does not bind. Initial values are bit-exact, three steps within fp32 rounding."""
    for found in pool.run(bodies.train_from_meta, 2, strategy=strategy):
        assert found["worst"] < 1e-6  # fp32: means over halves of a batch of 8


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
@pytest.mark.parametrize("device", ["meta", "real"])
def test_sharding_quantized_ops_weights_raises(pool, device):
    for error in pool.run_expect_error(
        bodies.error_of_quantized_ops, 2, device=device, strategy="optim_grads_params"
    ):
        assert error.type_name == "PlacementError"
        assert "a quantized weight of te.ops." in error.message
    pool.run(bodies.error_of_quantized_ops, 2, device=device, strategy="no_shard")
