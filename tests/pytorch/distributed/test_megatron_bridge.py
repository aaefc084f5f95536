"""`te_fsdp.compat.megatron_fsdp`, which runs scripts of megatron-fsdp with one changed import."""

from __future__ import annotations

import pytest
from bridge import bodies

# Three steps, each with sums of a few numbers in a different order: some 2^-24 of the largest value each.
RTOL = 1e-5


@pytest.mark.ranks(2)
def test_readme_script(pool, tmp_path):
    for outcome in pool.run(bodies.readme, 2, directory=str(tmp_path / "ckpt")):
        assert outcome["wrong"] == [] and outcome["tensors"] > 40
        assert outcome["before"] + outcome["ahead"] == outcome["native"]
        assert outcome["again"] == outcome["ahead"], "the checkpoint was not taken up"
        assert outcome["before"][0] > outcome["before"][-1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_gradient_accumulation(pool, strategy):
    """Check every way to mark the last microbatch. megatron-fsdp 0.6.1 computes "each" wrongly for two strategies."""
    cases = [
        {"strategy": strategy, "outer": None, "how": how}
        for how in ("each", "no_sync", "sync", "set", "never")
    ]
    for outcomes in pool.run(bodies.loops, 2, cases=cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert outcome["worst"] < RTOL, case


@pytest.mark.ranks(4)
@pytest.mark.parametrize("outer", [0, 1])
def test_gradient_accumulation_over_an_outer_axis(pool, outer):
    """Check "each", which megatron-fsdp 0.6.1 computes too large for HSDP and HFSDP."""
    cases = [{"strategy": 3, "outer": outer, "how": how} for how in ("each", "no_sync", "set")]
    for outcomes in pool.run(bodies.loops, 4, cases=cases):
        for case, outcome in zip(cases, outcomes, strict=True):
            assert outcome["worst"] < RTOL, case


@pytest.mark.ranks(2)
def test_documented_methods(pool):
    for found in pool.run(bodies.methods, 2):
        assert found["groups"] == [2, 2, None]
        assert found["scaled"] and found["rounded"] and found["near"] and found["restored"]
        assert found["inside"] == "torch.bfloat16"
        assert found["state"] == [0.0], "state from before the first step is that of no step"
        assert any("nccl_ub=True has no effect: TORCH_NCCL_USE_TENSOR" in text for text in found["messages"])
        assert any("use_decoupled_grad=True has no effect: FusedAdam" in text for text in found["messages"])


@pytest.mark.ranks(2)
def test_edge_cases(pool):
    for found in pool.run(bodies.edge_cases, 2):
        assert found["state"] == [0.0]
        assert found["lr"] == 0.005
        assert found["gradients"] == [0.0] * 6 and found["none"] == [None] * 6
        assert found["copies"]
        assert "init_model_with_meta_device=True" in found["error"]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("recipe", "tp", "meta"), [("current", 2, False), ("mxfp8", 1, True)])
def test_quantized_weights_equal_native_training(pool, recipe, tp, meta):
    """Check the same training by te_fsdp's own API bit for bit."""
    for outcome in pool.run(bodies.te_model, 4, recipe=recipe, tp=tp, meta=meta):
        assert outcome["wrong"] == [] and outcome["tensors"] > 8
        assert outcome["losses"] == outcome["expected"]
        assert outcome["losses"][-1] < outcome["losses"][0]


@pytest.mark.ranks(2)
def test_summed_and_non_finite_gradients(pool):
    for found in pool.run(bodies.sums_and_nan, 2):
        assert found["worst"] < RTOL
        assert found["error"].startswith("GradientError") and "rank 1" in found["error"]
