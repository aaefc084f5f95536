"""Error texts of mistakes, raised on all ranks without a hang. Checkpoint errors have their own tests."""

from __future__ import annotations

import math

import bodies_errors as bodies
import pytest

# body, error, what its text must name: the module or parameter, expected, got, the fix
CASES = [
    (
        bodies.world_size_mismatch,
        "MeshError",
        ["dp_shard(3) * tp(2) = 6", "WORLD_SIZE = 2", "Fix: dp_shard=1, or dp_shard=-1"],
    ),
    (
        bodies.wrong_number_of_experts,
        "MeshError",
        [
            "GroupedLinear: experts over ep=2",
            "3 experts distributed as [2, 1]",
            "got num_gemms of the ranks [1, 2]",
        ],
    ),
    (
        bodies.unknown_axis,
        "MeshError",
        ["axis 'data' of size 2", "'dp_replicate', 'dp_shard', 'cp', 'ep', 'tp'", "Fix:"],
    ),
    (
        bodies.model_differs_between_ranks,
        "MeshError",
        ["Block", "different models", "got own.weight (8, 8) in torch.float32, on meta on rank 0", "Fix:"],
    ),
    (
        bodies.settings_differ_between_ranks,
        "MeshError",
        [
            "different models",
            "got 0: eps 1e-05 on rank 0 and 0.001 on rank 1; 1: class ReLU on rank 0 and GELU on",
        ],
    ),
    (
        bodies.sequence_parallelism_differs_between_ranks,
        "MeshError",
        [
            "different models",
            "got layer_norm_weight (8,) in torch.float32, on meta on rank 0",
            "a sum over tp",
        ],
    ),
    (bodies.never_initialised, "InitError", ["own.scale", "own.table", "reset_parameters", "Fix:"]),
    (
        bodies.reset_leaves_bias_uninitialized,
        "InitError",
        ["own.bias: not initialized", "ResetOmitsBias.reset_parameters", "got uninitialized values", "Fix:"],
    ),
    (bodies.replicas_differ, "InitError", ["linear.weight", "differ", "materialize", "Fix:"]),
    (bodies.sharded_twice, "OrderError", ["fully_shard", "already sharded", "Fix:"]),
    (
        bodies.sharded_twice_without_fsdp2,
        "OrderError",
        ["already sharded", "a sharded Block", "units=", "Fix:"],
    ),
    (
        bodies.part_of_a_sharded_model,
        "OrderError",
        ["weight:", "already sharded", "a sharded FSDPBlock", "Fix:"],
    ),
    (
        bodies.incomplete_blocks,
        "PlacementError",
        [
            "linear.weight",
            "mxfp8",
            "(8, 8)",
            "divisible by 2 FSDP ranks * 32",
            "got 8 rows",
            "shape (64, 32)",
        ],
    ),
    (
        bodies.incomplete_stacked_blocks,
        "PlacementError",
        ["fc1_weight", "stacked mxfp8", "(32, 64)", "a multiple of 32 rows", "got [16, 16] rows", "Fix:"],
    ),
    (
        bodies.fused_accumulation,
        "PlacementError",
        ["linear (Linear)", "fuse_wgrad_accumulation=True", "Fix:"],
    ),
    (
        bodies.weight_with_its_own_sharding,
        "PlacementError",
        ["linear.weight (Linear): a DistributedWeight", "FSDP2 would do so again", "Fix:"],
    ),
    (bodies.missing_parallel_mode, "PlacementError", ["LayerNormMLP", "set_parallel_mode=False", "Fix:"]),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("body", "error", "words"), [pytest.param(*case, id=case[0].__name__) for case in CASES]
)
def test_errors_on_all_ranks(pool, body, error, words):
    if (
        body in (bodies.incomplete_blocks, bodies.incomplete_stacked_blocks)
        and not pool.run(bodies_support, 1)[0]
    ):
        pytest.skip("MXFP8 needs Blackwell, or the emulation of one")
    for raised in pool.run_expect_error(body, 2):
        assert raised.type_name == error, raised
        missing = [word for word in words if word not in raised.message]
        assert not missing, f"{missing} not in: {raised.message}"


@pytest.mark.ranks(2)
def test_module_without_parameters_on_one_rank_trains(pool):
    assert pool.run(bodies.module_on_one_rank, 2) == [True, True]


def bodies_support() -> bool:
    """Return whether MXFP8 weights can be declared on this machine."""
    import transformer_engine.pytorch as te

    return bool(te.is_mxfp8_available())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("body", "where", "error", "cause"),
    [
        (bodies.one_rank_fails, "fully_shard", "PlacementError", "unit 'lin' matches no module"),
        (bodies.reset_fails_on_one_rank, "materialize", "TeFsdpError", "no such table on this host"),
        (
            bodies.one_rank_clips_without_a_norm,
            "clip_grad_norm_",
            "PlacementError",
            "max_norm must be a number",
        ),
    ],
    ids=["fully_shard", "materialize", "clip_grad_norm_"],
)
def test_failure_on_one_rank_is_named_on_all_ranks(pool, body, where, error, cause):
    """Check that the failed rank states the reason, and that the others name the rank instead of waiting."""
    other, failing = pool.run_expect_error(body, 2)
    assert cause in failing.message
    assert other.type_name == error
    assert f"{where} failed on rank 1" in other.message and cause in other.message


@pytest.mark.cpu  # a GPU whose kernels were stopped is lost to the other tests
@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize(
    "wrong", [{"max_norm": None}, {"max_norm": -1.0}, {"norm_type": 0}], ids=["none", "negative", "order"]
)
def test_wrong_arguments_on_one_rank_raise_in_later_calls(pool, order, wrong):
    """Check that the other rank raises in the norm's collective, which it left without an error or waited in."""
    other, failing = pool.run(bodies.one_rank_clips_without_a_norm_later, 2, order=order, wrong=wrong)
    name = next(iter(wrong))
    assert len(failing) == 2 and all(f"{name} must be a number" in text for text in failing), failing
    assert len(other) == 2 and all("clip_grad_norm_ failed on another rank" in text for text in other), other
