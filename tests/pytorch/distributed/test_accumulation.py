"""Gradient accumulation over microbatches.

Gradients are right by default. A marked last microbatch costs least. No mistake is silent.
"""

from __future__ import annotations

import pytest
from harness import BodyFailed
from strategies import contract, corners

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params")
MIXED = {"blocks.0": "optim", "blocks.1": "no_shard", "": "optim_grads"}
#: Test -> arguments: strategy, dp_replicate and another one, by default and with `--matrix full` as well.
CASES = {
    "test_missed_reduction": (
        [("no_shard", 1, "more"), ("optim", 1, "more"), ("optim_grads_params", 2, "more")],
        [("optim_grads", 2, "more"), ("optim", 2, "no_sync"), *((row, 1, "no_sync") for row in ALL)],
    ),
    "test_exceptions": (
        # HSDP holds gradients in three places at once; torch 2.15's own recovery would drop them all.
        [
            ("no_shard", 1, True),
            ("optim", 1, True),
            ("optim_grads", 2, False),
            ("optim_grads_params", 2, True),
        ],
        [("optim", 2, True), ("optim_grads_params", 1, False)],
    ),
    "test_by_hand": (
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


def test_missed_reduction(pool, strategy, dp_replicate, other):
    options = {"strategy": strategy, "loop": other, "dp_replicate": dp_replicate}
    pool.run(contract.missed_reduction, 2 * dp_replicate, **options)


@pytest.mark.ranks(2)
def test_a_step_releases_kept_weights(pool):
    pool.run(contract.kept_over_step, 2, strategy="optim_grads")


@pytest.mark.ranks(2)
def test_without_the_release_the_next_forward_gathers_again(pool):
    pool.run(contract.kept_over_step, 2, strategy="optim_grads", released=False)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_forward_on_stale_weights_is_refused(pool, strategy):
    pool.run(contract.changed_by_hand, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_without_the_check_stale_weights_are_used(pool):
    with pytest.raises(BodyFailed, match="loss"):
        pool.run(contract.changed_by_hand, 2, strategy="optim", checked=False)


@pytest.mark.ranks(2)
def test_contexts_nest(pool):
    off = {strategy: pool.run(contract.nesting, 2, strategy=strategy)[0]["off"] for strategy in ALL[1:]}
    assert [flag[0] for flag in off["optim"]] == [False] * 3
    assert [flag[0] for flag in off["optim_grads"]] == [True] * 3
    assert [flag[2] for flag in off["optim_grads"]] == [False] * 3
    assert [flag[2] for flag in off["optim_grads_params"]] == [True] * 3


def test_exceptions(pool, strategy, dp_replicate, other):
    options = {"strategy": strategy, "dp_replicate": dp_replicate, "stock": other}
    pool.run(contract.failed_forward, 2 * dp_replicate, **options)
    pool.run(contract.failed_backward, 2 * dp_replicate, **options)


def test_by_hand(pool, strategy, dp_replicate, other):
    pool.run(contract.by_hand, 2 * dp_replicate, strategy=strategy, dp_replicate=dp_replicate)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_gathers_by_hand(pool, strategy):
    pool.run(contract.gathered_ahead, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_gathered_parameters_are_recognised(pool):
    pool.run(contract.while_gathered, 2, strategy="optim_grads")


@pytest.mark.ranks(2)
def test_parameters_that_few_microbatches_use(pool):
    cases = [("optim_grads_params", "plain"), ("optim_grads_params", "no_sync"), ("optim", "microbatch")]
    for first, *others in pool.run(contract.partly_used, 2, strategies=cases):
        # The same bf16 gradients, added in fp32 in another order.
        assert others == pytest.approx([first] * 2, rel=1e-6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_one_rank_with_a_narrow_wire(pool, strategy):
    pool.run(contract.narrow_wire, 1, strategy=strategy)


@pytest.mark.covering(days=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "body",
    [
        corners.two_models,
        corners.used_by_one_rank,
        corners.by_method,
        corners.generating,
        corners.moved,
        corners.failed_step,
        corners.closures,
        corners.graph_kept,
        corners.cleared_after_norm,
        corners.clipped_and_kept,
        corners.disagreeing,
        corners.double_precision,
    ],
    ids=lambda body: body.__name__,
)
def test_corners(pool, body):
    pool.run(body, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_of_few_ranks_by_another_method(pool, strategy):
    pool.run(corners.used_by_one_rank, 2, strategy=strategy, method="again")


@pytest.mark.ranks(2)
def test_copies_are_made_equal(pool):
    cases = [
        {"strategy": "no_shard"},
        {"strategy": {"side": "no_shard"}, "copied": "side"},
        {"dp_replicate": 2},
    ]
    cases.append({"dp_replicate": 2, "outer_strategy": "optim"})
    with pytest.raises(BodyFailed, match="strategy"):  # nothing is copied: the negative control
        pool.run(corners.broadcast, 2, cases=[{"strategy": "optim"}])
    pool.run(corners.broadcast, 2, cases=cases)
