"""Parameters that FSDP2 cannot shard with the rest of their unit. They train, or an error names a fix."""

from __future__ import annotations

import pytest
from matrix import search
from matrix.configurations import Configuration
from strategies import unshardable_parameters as bodies

from te_fsdp.layout import STRATEGIES


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", list(bodies.KINDS))
def test_training_equals_one_process(pool, kind, strategy):
    """Check a different dtype, empty, non-contiguous and scalar parameters over three steps by value."""
    for found in pool.run(bodies.train_as_one_process, 2, kind=kind, strategy=strategy):
        assert found["worst"] < 1e-5  # fp32: sums of 8 rows in two halves, three chained steps


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_learnable_softmax_offset_in_a_bf16_model(pool, strategy):
    pool.run(bodies.learnable_softmax, 2, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("frozen", ["", "blocks.0"], ids=["trained", "frozen"])
def test_fp32_vector_under_a_precision_policy(pool, frozen, strategy):
    """Check an fp32 vector under a policy, which has one compute dtype per unit."""
    drawn = Configuration(
        modules=("linear", "linear"), precision="default", vector=True, frozen=frozen, strategy=strategy
    )
    assert max(pool.run(search.trial, 2, drawn=drawn)[0].values()) <= 1


@pytest.mark.ranks(2)
def test_large_parameters_of_a_different_dtype_raise(pool):
    for error in pool.run_expect_error(bodies.error_of_large_parameter, 2):
        assert error.type_name == "PlacementError"
        assert (
            "small.weight (torch.bfloat16)" in error.message
            or "large.weight (torch.float32)" in error.message
        )
        assert "te_fsdp.fsdp_no_shard(parameter)" in error.message


@pytest.mark.ranks(2)
def test_meta_tensors_in_attributes_raise(pool):
    for error in pool.run_expect_error(bodies.error_of_meta_attribute, 2):
        assert error.type_name == "InitError"
        assert "0.cache" in error.message
