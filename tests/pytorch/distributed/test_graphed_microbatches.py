"""Graphed steps with ``microbatches=N``. CPU tests repeat captured operations, GPU tests use CUDA graphs.

A microbatch may leave state for the next one where no graph reads it.
"""

from __future__ import annotations

import pytest
from graphed import microbatch_bodies

#: Captured operations do not include those that go through memory of the test's own collectives.
GLOO = {"TE_FSDP_TEST_GLOO": "1"}
CASES = {
    "zero3": {},
    "optim": {"strategy": "optim"},
    "optim_grads": {"strategy": "optim_grads"},
    "mixed": {"strategy": {"blocks.0": "optim", "blocks.1": "no_shard"}},
    "main weights": {"bf16": True},
    "FP8 weights": {"bf16": True, "quantized": True},
    "delayed scaling, cached weights": {"bf16": True, "delayed": True, "first": True},
}


@pytest.mark.parametrize("names", [list(CASES)[:4], list(CASES)[4:]], ids=["strategies", "formats"])
def test_graphed_microbatches_are_bitwise_equal(pool, names):
    cases = {name: CASES[name] for name in names}
    for facts in pool.run(
        microbatch_bodies.bitwise_equal, 2, env=GLOO, cases=cases, axes={}, count=4, timeout=240
    ):
        assert facts == {name: ["", "", 3, [3]] for name in names}


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("axes", "case", "ranks", "count"),
    [
        ({"tp": 2}, {}, 2, 3),
        ({"tp": 2}, {"bf16": True, "quantized": True, "strategy": "optim"}, 4, 4),
        ({"dp_replicate": 2}, {"strategy": "optim_grads"}, 4, 4),
        ({"dp_replicate": 2}, {"outer": "optim"}, 4, 4),
        ({}, {}, 2, 2),
        ({}, {}, 2, 1),
    ],
    ids=["tp2", "tp2 FP8 weights", "hsdp", "hfsdp", "two microbatches", "one microbatch"],
)
def test_graphed_microbatches_on_meshes_are_bitwise_equal(pool, axes, case, ranks, count):
    run = {"cases": {"it": case}, "axes": axes, "count": count}
    for facts in pool.run(microbatch_bodies.bitwise_equal, ranks, env=GLOO, timeout=240, **run):
        assert facts == {"it": ["", "", 3, [min(count, 3)]]}


def test_moved_gradients_run_eagerly(pool):
    for why, same, same_without in pool.run(microbatch_bodies.moved_gradients, 2, env=GLOO):
        assert "the gradient of blocks.0." in why and "has a different address after each microbatch" in why
        assert same and not same_without


def test_nan_report_names_the_microbatch(pool):
    for texts in pool.run(microbatch_bodies.report_nan_of_microbatch, 2, env=GLOO):
        assert [text.rpartition("rank 1 ")[2] for text in texts] == [f"(microbatch {n})" for n in (1, 3, 4)]


def test_invalid_arguments_raise(pool):
    for texts in pool.run(microbatch_bodies.mistakes, 2):
        assert [text.split(":")[0] for text in texts] == ["PlacementError"] * 3 + ["InputError"]
        assert "tensors whose dim 0 has microbatches=4 entries" in texts[3] and "(3, 16, 16)" in texts[3]
