"""TE's `fuse_wgrad_accumulation`. FSDP2 reduces the accumulated gradients under every strategy."""

from __future__ import annotations

import pytest
from hfsdp import wgrad_fusion


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"dp_shard": 2}, {"microbatches": 3}, marks=pytest.mark.ranks(2), id="dp2"),
        pytest.param(
            {"dp_shard": 2},
            {"microbatches": 3, "contexts": True, "strategy": "optim"},
            marks=pytest.mark.ranks(2),
            id="dp2-optim",
        ),
        pytest.param({"dp_shard": 2, "tp": 2}, {}, marks=pytest.mark.ranks(4), id="dp2xtp2"),
        pytest.param(
            {"dp_replicate": 2, "dp_shard": 2},
            {"microbatches": 2, "contexts": True, "outer": "optim"},
            marks=pytest.mark.ranks(4),
            id="hfsdp",
        ),
    ],
)
def test_fused_accumulation_equals_one_process(pool, axes, options):
    ranks = 2 if axes == {"dp_shard": 2} else 4
    for result in pool.run(wgrad_fusion.training, ranks, axes=axes, **options):
        # TE leaves each weight's full gradient on it; all but the last ones are dropped.
        assert result["left"] <= 1


@pytest.mark.ranks(2)
def test_negative_control_unreduced_gradients(pool):
    assert all(
        "relative error" in seen for seen in pool.run(wgrad_fusion.without_reduction, 2, axes={"dp_shard": 2})
    )


@pytest.mark.ranks(2)
def test_fused_accumulation_outside_fsdp2_raises(pool):
    for error in pool.run_expect_error(wgrad_fusion.error_outside_fsdp2, 2):
        assert error.type_name == "PlacementError" and "last.weight: fuse_wgrad_accumulation" in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("none", {}),
        ("none", {"policy": True}),
        ("none", {"policy": True, "microbatches": 3}),
        ("none", {"microbatches": 3}),
        ("current", {}),
    ],
)
def test_fused_accumulation_of_bf16_and_quantized_weights(pool, recipe, options):
    pool.run(wgrad_fusion.compare_with_unfused, 2, axes={"dp_shard": 2}, recipe=recipe, **options)


@pytest.mark.ranks(2)
def test_fused_accumulation_with_te_that_always_adds(pool):
    pool.run(wgrad_fusion.with_te_that_always_adds, 2, axes={"dp_shard": 2})
