"""The accumulation contract: right by default, cheapest when told, and never silently wrong."""

from __future__ import annotations

import pytest
from harness import BodyFailed
from strategies import contract

ALL = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "loop"),
    [("no_shard", "more"), ("optim", "more"), *((strategy, "no_sync") for strategy in ALL)],
)
def test_missed_reduction(pool, strategy, loop):
    pool.run(contract.missed_reduction, 2, strategy=strategy, loop=loop)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("strategy", "loop"), [("optim_grads_params", "more"), ("optim_grads", "more"), ("optim", "no_sync")]
)
def test_missed_reduction_of_hsdp(pool, strategy, loop):
    pool.run(contract.missed_reduction, 4, strategy=strategy, loop=loop, dp_replicate=2)


@pytest.mark.ranks(2)
def test_a_step_releases_kept_weights(pool):
    pool.run(contract.kept_over_step, 2, strategy="optim_grads")


@pytest.mark.ranks(2)
def test_without_the_release_the_next_forward_refuses(pool):
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


@pytest.mark.parametrize(
    ("strategy", "dp_replicate", "stock"),
    [
        pytest.param("optim", 1, True, marks=pytest.mark.ranks(2)),
        pytest.param("no_shard", 1, True, marks=pytest.mark.ranks(2)),
        pytest.param("optim_grads_params", 2, True, marks=pytest.mark.ranks(4)),
        pytest.param("optim_grads", 2, False, marks=pytest.mark.ranks(4)),
    ],
)
def test_exceptions(pool, strategy, dp_replicate, stock):
    options = {"strategy": strategy, "dp_replicate": dp_replicate, "stock": stock}
    pool.run(contract.failed_forward, 2 * dp_replicate, **options)
    pool.run(contract.failed_backward, 2 * dp_replicate, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [*ALL, {"blocks.0": "optim", "blocks.1": "no_shard", "": "optim_grads"}])
def test_by_hand(pool, strategy):
    pool.run(contract.by_hand, 2, strategy=strategy)


@pytest.mark.ranks(4)
def test_by_hand_with_hsdp(pool):
    pool.run(contract.by_hand, 4, strategy="optim_grads_params", dp_replicate=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_gathers_by_hand(pool, strategy):
    pool.run(contract.gathered_ahead, 2, strategy=strategy)


@pytest.mark.ranks(2)
def test_gathered_parameters_are_recognised(pool):
    pool.run(contract.while_gathered, 2, strategy="optim_grads")
