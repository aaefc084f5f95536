"""Updates of quantized weights in one batch: one reduction of amaxes, no copies of gradients."""

from __future__ import annotations

import pytest
from quantization import weight_updates

DP2, DP2_TP2, HFSDP = {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 1}
OUTER = {"outer_strategy": "optim"}
CASES = {
    "fused-current-dp2xtp2": ("current", "fused", DP2_TP2, {}),
    "adamw-current-dp2xtp2": ("current", "adamw", DP2_TP2, {"kind": "mlp_swiglu"}),
    "fused-current-tp2": ("current", "fused", {"dp_shard": 1, "tp": 2}, {"kind": "mlp_swiglu"}),
    "fused-mxfp8-dp2": ("mxfp8", "fused", DP2, {"kind": "mlp_swiglu"}),
    "fused-nvfp4-dp2": ("nvfp4", "fused", DP2, {"kind": "mlp_swiglu"}),
    "fused-block-dp2": ("block", "fused", DP2, {"kind": "mlp_swiglu"}),
    "adamw-delayed-dp2": ("delayed", "adamw", DP2, {"kind": "mlp_swiglu"}),
    "fused-delayed-dp2": ("delayed", "fused", DP2, {"kind": "mlp_swiglu"}),
    "adamw-hybrid-dp2": ("e4m3/e5m2", "adamw", DP2, {"kind": "linear"}),
    "adamw-current-no_shard": ("current", "adamw", DP2, {"strategy": "no_shard", "kind": "mlp_swiglu"}),
    "fused-current-hfsdp": ("current", "fused", HFSDP, OUTER | {"kind": "mlp_swiglu"}),
    "adamw-current-hfsdp": ("current", "adamw", HFSDP, OUTER),
}


def _case(name):
    recipe, _, meshes, _ = CASES[name]
    marks = [pytest.mark.ranks(4 if meshes is DP2_TP2 else 2), pytest.mark.recipe(recipe)]
    # Stock te.Linear has no hybrid weights on GPUs before torch 2.13.
    return pytest.param(name, marks=[*marks, pytest.mark.cpu] if "/" in recipe else marks)


@pytest.mark.covering(always=[{"case": "fused-current-dp2xtp2"}, {"case": "adamw-hybrid-dp2"}], strength=0)
@pytest.mark.parametrize("case", [*map(_case, CASES)])
def test_batched_quantization_is_bitwise_equal(pool, case):
    recipe, optimizer, meshes, options = CASES[case]
    ranks = 4 if meshes is DP2_TP2 else 2
    expected = 4 if options.get("kind", "transformer") == "transformer" else 2
    results = pool.run(
        weight_updates.compare_with_one_by_one,
        ranks,
        recipe=recipe,
        optimizer=optimizer,
        meshes=meshes,
        **options,
    )
    assert results == [expected] * ranks


@pytest.mark.arch("9.0")
@pytest.mark.cpu  # of a GPU's casts and reductions TE's extension makes some itself
@pytest.mark.ranks(4)
@pytest.mark.recipe("current")
@pytest.mark.parametrize("optimizer", ["fused", "adamw"])
def test_communication_and_casts_per_step(pool, optimizer):
    """Check one reduction over both axes and one cast per weight. On Hopper shards keep no transpose."""
    for found in pool.run(weight_updates.cost, 4, recipe="current", optimizer=optimizer, meshes=DP2_TP2):
        assert found["reductions"] == 1 and found["casts"] == found["weights"] == 4, found
        assert found["transposes"] == 0
        if optimizer == "fused":  # gradients in the dtype that they have, with and without main weights
            assert found["torch.float32 by torch.bfloat16"] == found["torch.bfloat16 by torch.bfloat16"] == 1


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
def test_fused_adam_with_gradients_of_several_dtypes(pool):
    for found in pool.run(weight_updates.mixed_gradients, 2):
        assert found["torch.float32 by torch.float32"] == 1 and found["gradient"] == "torch.bfloat16", found
        assert found["state"] == ["exp_avg", "exp_avg_sq", "master_param"] and found["held"]
