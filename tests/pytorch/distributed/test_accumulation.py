"""Gradient accumulation over microbatches.

Gradients are correct by default. A marked last microbatch costs least. Every mistake raises.
"""

from __future__ import annotations

import pytest
from harness import BodyFailed
from strategies import accumulation, edge_cases

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MIXED = {"blocks.0": "optim", "blocks.1": "no_shard", "": "optim_grads"}
#: Test -> arguments: strategy, dp_replicate and another one, by default and with `--matrix full` as well.
CASES = {
    "test_norm_and_step_raise_without_a_reduction": (
        [("no_shard", 1, "more"), ("optim", 1, "more"), ("optim_grads_params", 2, "more")],
        [("optim_grads", 2, "more"), ("optim", 2, "no_sync"), *((row, 1, "no_sync") for row in ALL)],
    ),
    "test_failed_microbatch_can_be_rerun": (
        # HSDP holds gradients in three places at once; torch 2.15's own recovery would drop them all.
        [
            ("no_shard", 1, True),
            ("optim", 1, True),
            ("optim_grads", 2, False),
            ("optim_grads_params", 2, True),
        ],
        [("optim", 2, True), ("optim_grads_params", 1, False)],
    ),
    "test_manual_gradient_reduction": (
        [("optim", 1, None), (MIXED, 1, None), ("optim_grads_params", 2, None)],
        [*((row, 1, None) for row in ALL if row != "optim"), ("optim", 2, None), ("no_shard", 2, None)],
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "other" in metafunc.fixturenames:
        default, more = CASES[metafunc.definition.name]
        full = metafunc.config.getoption("--matrix", "covering") == "full"
        params = [
            pytest.param(*c, marks=pytest.mark.ranks(2 * c[1])) for c in default + (more if full else [])
        ]
        metafunc.parametrize(("strategy", "dp_replicate", "other"), params)


def test_norm_and_step_raise_without_a_reduction(pool, strategy, dp_replicate, other):
    options = {"strategy": strategy, "loop": other, "dp_replicate": dp_replicate}
    pool.run(accumulation.errors_without_reduction, 2 * dp_replicate, **options)


@pytest.mark.ranks(2)
def test_step_reshards_kept_weights(pool):
    pool.run(accumulation.weights_after_step, 2, strategy="optim_grads")


@pytest.mark.ranks(2)
def test_negative_control_no_reshard_after_step(pool):
    pool.run(accumulation.weights_after_step, 2, strategy="optim_grads", released=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_forward_on_stale_weights_raises(pool, strategy):
    pool.run(accumulation.errors_of_stale_weights, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_negative_control_stale_weights_without_check(pool):
    with pytest.raises(BodyFailed, match="loss"):
        pool.run(accumulation.errors_of_stale_weights, 2, strategy="optim", checked=False)


@pytest.mark.ranks(2)
def test_accumulation_contexts_nest(pool):
    off = {strategy: pool.run(accumulation.nesting, 2, strategy=strategy)[0]["off"] for strategy in ALL[1:]}
    assert [flag[0] for flag in off["optim"]] == [False] * 3
    assert [flag[0] for flag in off["optim_grads"]] == [True] * 3
    assert [flag[2] for flag in off["optim_grads"]] == [False] * 3
    assert [flag[2] for flag in off["optim_grads_params"]] == [True] * 3


def test_failed_microbatch_can_be_rerun(pool, strategy, dp_replicate, other):
    options = {"strategy": strategy, "dp_replicate": dp_replicate, "stock": other}
    pool.run(accumulation.failed_forward, 2 * dp_replicate, **options)
    pool.run(accumulation.failed_backward, 2 * dp_replicate, **options)


def test_manual_gradient_reduction(pool, strategy, dp_replicate, other):
    pool.run(accumulation.reduce_by_hand, 2 * dp_replicate, strategy=strategy, dp_replicate=dp_replicate)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_manual_unshard(pool, strategy):
    pool.run(accumulation.unshard_by_hand, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_optimizer_of_unsharded_parameters_raises(pool):
    pool.run(accumulation.use_unsharded_parameters, 2, strategy="optim_grads")


@pytest.mark.ranks(2)
def test_norm_of_parameters_used_in_some_microbatches(pool):
    cases = [("optim_grads_params", "plain"), ("optim_grads_params", "no_sync"), ("optim", "microbatch")]
    for first, *others in pool.run(accumulation.norms_of_partly_used, 2, strategies=cases):
        # The same bf16 gradients, added in fp32 in a different order.
        assert others == pytest.approx([first] * 2, rel=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_bf16_reduction_over_one_rank(pool, strategy):
    pool.run(accumulation.reduce_in_bf16, 1, strategy=strategy)


@pytest.mark.covering(days=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "body",
    [
        edge_cases.two_models,
        edge_cases.used_by_one_rank,
        edge_cases.by_method,
        edge_cases.generate,
        edge_cases.move_model,
        edge_cases.failed_step,
        edge_cases.closures,
        edge_cases.keep_graph,
        edge_cases.cleared_after_norm,
        edge_cases.clipped_and_kept,
        edge_cases.errors_of_different_units,
        edge_cases.double_precision,
    ],
    ids=lambda body: body.__name__,
)
def test_edge_cases(pool, body):
    pool.run(body, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_on_one_rank_of_a_registered_method(pool, strategy):
    pool.run(edge_cases.used_by_one_rank, 2, strategy=strategy, method="again")


@pytest.mark.ranks(2)
def test_broadcast_params_makes_replicas_equal(pool):
    cases = [
        {"strategy": "no_shard"},
        {"strategy": {"side": "no_shard"}, "copied": "side"},
        {"dp_replicate": 2},
    ]
    cases.append({"dp_replicate": 2, "outer_strategy": "optim"})
    with pytest.raises(BodyFailed, match="strategy"):  # nothing is copied: the negative control
        pool.run(edge_cases.broadcast, 2, cases=[{"strategy": "optim"}])
    pool.run(edge_cases.broadcast, 2, cases=cases)
