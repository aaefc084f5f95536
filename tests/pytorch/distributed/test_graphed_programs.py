"""Graphs in loops that use memory in an unusual order or release it between steps."""

from __future__ import annotations

import pytest
from graphed import program_bodies

#: Captured operations do not include those that go through memory of the test's own collectives.
ENVIRONMENT = {"TE_FSDP_TEST_GLOO": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@pytest.mark.parametrize("loop", list(program_bodies.LOOPS))
def test_unusual_loops_are_bitwise_equal(pool, loop):
    ranks = 1 if loop == "casts" else 2
    for recordings, replays in pool.run(
        program_bodies.bitwise_equal, ranks, env=ENVIRONMENT, loop=loop, timeout=240
    ):
        assert recordings >= 3
        assert replays >= 6


@pytest.mark.ranks(2)
def test_weight_caches_dropped_by_an_evaluation_are_recorded_again(pool):
    for recordings, replays in pool.run(program_bodies.cached_weights, 2, env=ENVIRONMENT, timeout=240):
        assert (recordings, replays) == (2, 4)


@pytest.mark.ranks(2)
def test_no_shard_units_run_eagerly(pool):
    strategy = {"blocks.0": "no_shard", "blocks.1": "optim_grads", "blocks.2": "optim_grads_params"}
    for why_eager in pool.run(program_bodies.reasons_of_no_shard_units, 2, strategy=strategy):
        assert why_eager == {"blocks.0": 'strategy="no_shard", so that it is not an FSDP2 unit'}
    for error in pool.run_expect_error(program_bodies.reasons_of_no_shard_units, 2, strategy="no_shard"):
        assert error.message.startswith("graphed_units of a model without FSDP2 units")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["no_shard", "sharded", "quantized"])
def test_graphed_steps_use_written_weights(pool, kind):
    for recordings, replays in pool.run(
        program_bodies.write_between_steps, 2, env=ENVIRONMENT, kind=kind, timeout=240
    ):
        assert recordings >= 1
        assert replays >= 4


@pytest.mark.ranks(2)
def test_capture_that_fails_during_gradient_reduction(pool):
    for why in pool.run(program_bodies.capture_fails_in_backward, 2, env=ENVIRONMENT, timeout=240):
        assert why.startswith("the capture has failed"), why
