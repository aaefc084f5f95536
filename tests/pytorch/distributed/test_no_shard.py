"""Parameters that are not sharded.

`te_fsdp.fsdp_no_shard` or the strategy no_shard replicates them.
"""

from __future__ import annotations

import math

import pytest
from experts import bodies as experts
from no_sharding import bodies, gradients, training

DP2, DP2_TP2, DP4 = {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 4}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
MIXED = {"": "optim_grads_params", "adapter": "no_shard"}


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param(
            DP2,
            {"optimizer": "SGD", "microbatches": 3, "schedule": "no_sync", "clip": "torch"},
            id="SGD no_sync",
        ),
        pytest.param(
            DP2, {"optimizer": "FusedAdam", "origin": "meta", "clip": "te_fsdp"}, id="FusedAdam meta"
        ),
        pytest.param(
            DP2,
            {"parts": (), "strategy": "no_shard", "microbatches": 3, "recompute": "other"},
            id="all replicated",
        ),
        pytest.param(DP2, {"recompute": "reentrant", "microbatches": 3}, id="reentrant"),
        pytest.param(
            DP2_TP2,
            {"sequence_parallel": True, "microbatches": 3, "schedule": "microbatch", "clip": "te_fsdp"},
            id="sequence parallel",
        ),
        pytest.param(
            DP2_TP2,
            {
                "parts": (),
                "strategy": "no_shard",
                "optimizer": "FusedAdam",
                "origin": "meta",
                "sequence_parallel": True,
            },
            id="all replicated FusedAdam",
        ),
        pytest.param(DP2_TP2, {"parts": ("position",), "strategy": MIXED}, id="mixed strategies"),
        pytest.param(
            HSDP, {"strategy": "optim_grads", "origin": "meta", "sequence_parallel": True}, id="hsdp"
        ),
    ],
)
def test_training_equals_one_process(pool, axes, options):
    pool.run(training.numerics, math.prod(axes.values()), axes=axes, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("spoil", ["reduction", "order"])
def test_negative_control_missing_reduction_or_order(pool, spoil):
    errors = pool.run_expect_error(training.numerics, 2, axes=DP2, spoil=spoil)
    assert all("gradient 0 adapter" in error.message or "position" in error.message for error in errors)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "mixed"),
    [("exempt", False), ("filled", False), ("filled", True)],
)
def test_parameters_used_on_some_ranks(pool, how, mixed):
    for result in pool.run(gradients.unused_on_some_ranks, 2, how=how, mixed=mixed):
        assert result["never"] is None


@pytest.mark.ranks(2)
def test_negative_control_branches_without_zero_gradients(pool):
    for error in pool.run_expect_error(gradients.unused_on_some_ranks, 2, how="neither"):
        assert "left" in error.message or "right" in error.message


@pytest.mark.ranks(2)
def test_long_gradient_sums_are_exact(pool):
    for schedule in ("plain", "no_sync"):
        for dtype, comm, expected in (
            ("float32", None, 300 / 256),
            (None, None, 1.0),  # negative control
        ):
            options = {"schedule": schedule, "grads_dtype": dtype, "comm_dtype": comm}
            assert pool.run(gradients.long_sum, 2, **options) == [expected] * 2, options


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    ("kind", "recipe", "axes", "exempt", "group"),
    [
        ("linear", "current", DP2_TP2, ["second"], "tp"),
        ("linear", "current", DP2_TP2, ["first.weight", "first.bias"], "tp"),
        ("linear", "mxfp8", DP2, ["second"], ""),
        ("linear", "delayed", DP2_TP2, ["second"], "tp"),
        ("mlp_swiglu", "current", DP2_TP2, [""], "tp fp32"),  # all of the model
        ("mlp_swiglu", "delayed", DP2_TP2, ["fc1_weight"], "weight"),  # fc2_weight of the same module is cut
    ],
)
def test_quantized_weights_equal_one_process(pool, kind, recipe, axes, exempt, group):
    options = {"kind": kind, "recipe": recipe, "axes": axes, "exempt": exempt}
    options |= {"group": group.removesuffix(" fp32"), "fp32_gradients": "fp32" in group}
    results = pool.run(gradients.quantized, math.prod(axes.values()), **options)
    assert all(result["init"] and result["steps"] == 2 * result["init"] for result in results)


@pytest.mark.ranks(4)
def test_collectives_and_memory(pool):
    before = pool.run(bodies.collectives_and_memory, 4, axes=DP4, parts=())[0]
    frozen = pool.run(bodies.collectives_and_memory, 4, axes=DP4, parts=("encoder",))[0]
    # root, two blocks, frozen encoder: forward and backward, where FSDP2 prefetches the encoder for nothing
    assert (before["all_gather"], before["reduce_scatter"], before.get("all_reduce", 0)) == (8, 3, 0)
    assert (frozen["all_gather"], frozen["reduce_scatter"], frozen.get("all_reduce", 0)) == (6, 3, 0)
    assert before["bytes"] == before["all"] / 4
    assert frozen["bytes"] == before["bytes"] + frozen["encoder"] * 3 / 4
    assert before["hooks"] == 1 and frozen["hooks"] == 0
    assert not before["noted"] and len(frozen["noted"]) == 4
    everything = ("encoder", "adapter", "position")
    for microbatches, marked, all_reduces in ((1, False, 1), (3, False, 3), (3, True, 1)):
        options = {"axes": DP4, "parts": everything, "microbatches": microbatches, "marked": marked}
        assert pool.run(bodies.collectives_and_memory, 4, **options)[0]["all_reduce"] == all_reduces, options


@pytest.mark.ranks(2)
def test_no_second_copy_of_parameters(pool):
    (whole, _), (gathered, _) = (
        pool.run(bodies.no_second_copy, 2, axes=DP2, strategy=strategy)
        for strategy in ("no_shard", "optim_grads")
    )
    assert whole["units"] == 0 and gathered["units"] == 3
    assert whole["held"] <= 1.01


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["assign", "materialize", "interrupted"])
def test_gradients_after_parameters_are_replaced(pool, how):
    pool.run(bodies.reset_after_sharding, 2, axes=DP2, how=how)


@pytest.mark.ranks(2)
def test_forward_methods(pool):
    assert pool.run(bodies.forward_method, 2, how="registered") == [True] * 2
    assert pool.run(bodies.forward_method, 2, how="exempt") == [True] * 2
    pool.run_expect_error(bodies.forward_method, 2, how="forgotten")


@pytest.mark.ranks(2)
def test_torch_fully_shard_raises(pool):
    for error in pool.run_expect_error(bodies.torch_fully_shard, 2):
        assert error.type_name == "PlacementError" and "fsdp_no_shard was called for it" in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("where", "kind", "words"),
    [
        ("fully_shard", "InitError", "position"),
        ("materialize", "InitError", "encoder.0.bias"),
        ("save", "CheckpointError", "position"),
    ],
)
def test_different_replicas_raise(pool, where, kind, words):
    for error in pool.run_expect_error(bodies.different_replicas, 2, where=where):
        assert error.type_name == kind and words in error.message, error


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("recipe", "weights"), [("none", "fp32"), ("mxfp8", "quantized")])
def test_no_shard_experts(pool, recipe, weights):
    """Check that gradients of different experts on ep ranks are divided like those of dense parameters."""
    options = {"experts": 4, "bias": False, "route": "every", "strategy": "no_shard"}
    pool.run(experts.training, 4, axes={"ep": 2, "dp_shard": 2}, recipe=recipe, weights=weights, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("average", [True, False])
def test_mean_and_sum_of_gradients(pool, average):
    assert pool.run(gradients.mean_without_fully_shard, 2, average=average) == [1.5 if average else 3.0] * 2


@pytest.mark.ranks(4)
def test_checkpoints_between_sharded_and_no_shard(pool, tmp_path):
    for tensors, differed in pool.run(
        bodies.checkpoint_round_trip, 4, path=str(tmp_path), first=DP2_TP2, second=DP4
    ):
        assert tensors > 40 and differed > 40
