"""HFSDP: new weights that arrive while the next forward runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hfsdp import arrival_readers, arrivals

TWO = {"dp_replicate": 2, "dp_shard": 1}
#: Kind, its options, and the units whose weights arrive after the step.
SAME_BITS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "2x1": ("run", {"axes": TWO, "optimizer": "sgd"}, ["", "mlp"]),
    "2x1, 3 microbatches, optim": (
        "run",
        {"axes": TWO, "microbatches": 3, "clip": True, "strategy": "optim"},
        ["", "mlp"],
    ),
    "2x1, bf16, not told": (
        "run",
        {"axes": TWO, "dtype": "bfloat16", "told": False, "optimizer": "foreach"},
        ["", "mlp"],
    ),
    "2x2, large, te": (
        "run",
        {"axes": {"dp_replicate": 2, "dp_shard": 2}, "microbatches": 3, "optimizer": "te", "large": 1},
        ["", "mlp"],
    ),
    "2x2, exempt": (
        "run",
        {"axes": {"dp_replicate": 2, "dp_shard": 2}, "optimizer": "foreach", "exempt": ("head",)},
        ["", "mlp"],
    ),
    "2x1xtp2": ("run", {"axes": {**TWO, "tp": 2}, "optimizer": "te", "clip": True}, ["", "mlp"]),
    "chain": ("chain", {"axes": {"dp_replicate": 2}}, ["blocks.0", "blocks.1", "blocks.2"]),
}


def _case(name: str) -> object:
    kind, options, units = SAME_BITS[name]
    ranks = math.prod(options["axes"].values())
    return pytest.param(kind, options, units, marks=pytest.mark.ranks(ranks), id=name)


@pytest.mark.parametrize(("kind", "options", "units"), [_case(name) for name in SAME_BITS])
def test_same_bits(pool, kind, options, units):
    """As when the step gathers: weights that forward has used, gradients, main weights."""
    ranks = math.prod(options["axes"].values())
    for result in pool.run(arrivals.same_bits, ranks, kind=kind, **options):
        assert result["after"] == [units] * arrivals.STEPS and result["left"] == [[]] * arrivals.STEPS
        overlapped, stock = result["gathers"]
        # Per unit instead of together; where all tensors travel alone, the same.
        assert overlapped >= stock and (overlapped > stock or "large" in options), result
        if kind == "chain":
            assert (overlapped, stock) == (3, 1)


@pytest.mark.ranks(4)
def test_same_bits_of_experts(pool):
    axes = {"dp_replicate": 2, "dp_shard": 1, "ep": 2}
    for result in pool.run(arrivals.same_bits, 4, kind="experts", axes=axes, experts=4):
        assert all(result["after"]) and result["left"] == [[]] * arrivals.STEPS, result


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "delayed"])
def test_same_bits_of_quantized_weights(pool, recipe):
    for result in pool.run(arrivals.same_bits, 2, kind="quantized", recipe=recipe, axes=TWO):
        assert all(result["after"]) and result["left"] == [[]] * arrivals.STEPS, result


@pytest.mark.ranks(2)
def test_stale_without_waiting(pool):
    """Negative control: the comparison sees weights that nobody has waited for."""
    for error in pool.run_expect_error(
        arrivals.same_bits, 2, kind="chain", axes={"dp_replicate": 2}, fault="never"
    ):
        assert error.type_name == "AssertionError" and "step 1 blocks" in error.message, error
    for error in pool.run_expect_error(arrival_readers.readers, 2, who="state_dict", fault="never"):
        assert error.type_name == "AssertionError" and "state_dict blocks" in error.message, error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("who", list(arrival_readers.READERS))
def test_who_reads_or_writes_waits(pool, tmp_path, who):
    for found in pool.run(arrival_readers.readers, 2, who=who, directory=str(tmp_path)):
        assert found == ["blocks.0", "blocks.1", "blocks.2"]


@pytest.mark.ranks(2)
def test_other_units(pool):
    """What this rank does not use is under way until the next step; other ranks need not wait for it."""
    found = pool.run(arrivals.other_units, 2, orders=[[0, 1, 3], [3, 2, 1]])
    assert found == [[[], ["blocks.2"], ["blocks.2"]], [[], ["blocks.0"], ["blocks.0"]]]


@pytest.mark.ranks(2)
def test_frozen(pool):
    every = ["blocks.0", "blocks.1", "blocks.2"]
    assert pool.run(arrivals.frozen, 2) == [[every, [every[0], every[2]], every]] * 2


@pytest.mark.ranks(2)
def test_interrupted(pool):
    assert pool.run(arrivals.interrupted, 2, where="forward") == [["blocks.2"]] * 2
    assert pool.run(arrivals.interrupted, 2, where="backward") == [[]] * 2


@pytest.mark.ranks(2)
def test_two_optimizers(pool):
    """The second step waits for what the first one has begun."""
    assert pool.run(arrivals.two_optimizers, 2) == [[["blocks.0"], ["blocks.1", "blocks.2"]] * 3] * 2


@pytest.mark.ranks(4)
def test_gathers_ahead(pool):
    """FSDP2 gathers units ahead: all are waited for before."""
    assert pool.run(arrivals.gathers_ahead, 4) == [[[]] * 3] * 4
    for error in pool.run_expect_error(arrivals.gathers_ahead, 4, fault="ahead"):
        assert error.type_name == "AssertionError", error


@pytest.mark.ranks(2)
def test_option(pool):
    for options in ({"axes": {"dp_replicate": 2}, "outer": "no_shard"}, {"axes": {}, "outer": "no_shard"}):
        for error in pool.run_expect_error(arrivals.without_effect, 2, **options):
            assert error.type_name == "OrderError" and "would have no effect" in error.message
    for error in pool.run_expect_error(arrivals.given_later, 2):
        assert error.type_name == "OrderError" and "the first call" in error.message
    for error in pool.run_expect_error(arrivals.on_one_rank, 2):
        assert error.type_name == "MeshError" and "same overlap_gather" in error.message
