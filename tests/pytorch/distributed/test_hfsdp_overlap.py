"""HFSDP averages over dp_replicate that start during the last backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness.shared_memory import GLOO_VARIABLE
from hfsdp import overlap, overlap_bits

#: Of tests in which ranks begin other collectives: in shared memory an asynchronous one waits for the others.
GLOO = {GLOO_VARIABLE: "1"}

#: Kind, its options, and how many reduce-scatters begin in the second backward and in those after it.
SAME_BITS: dict[str, tuple[str, dict[str, Any], int]] = {
    "2x1": ("run", {"axes": {"dp_replicate": 2, "dp_shard": 1}, "optimizer": "sgd"}, 2),
    "2x1, 3 microbatches": (
        "run",
        {"axes": {"dp_replicate": 2, "dp_shard": 1}, "microbatches": 3, "clip": True, "strategy": "optim"},
        2,
    ),
    "2x2, large, 3 microbatches": (
        "run",
        {
            "axes": {"dp_replicate": 2, "dp_shard": 2},
            "microbatches": 3,
            "strategy": "optim_grads",
            "optimizer": "te",
            "large": 1,
        },
        -1,  # more where a bias has an even number of rows
    ),
    "2x2, exempt": (
        "run",
        {"axes": {"dp_replicate": 2, "dp_shard": 2}, "optimizer": "foreach", "exempt": ("head",)},
        2,
    ),
    "2x1xtp2": ("run", {"axes": {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, "optimizer": "te"}, 2),
    "not marked": (
        "run",
        {"axes": {"dp_replicate": 2, "dp_shard": 1}, "optimizer": "sgd", "marked": False},
        0,
    ),
    "sums": ("chain", {"axes": {"dp_replicate": 2}, "average_gradients": False}, 3),
    "bf16 wire": (
        "chain",
        {"axes": {"dp_replicate": 2}, "policy": {"main_params_dtype": None, "grad_comm_dtype": "bfloat16"}},
        3,
    ),
    "bf16 wire, fp32 sums": (
        "chain",
        {
            "axes": {"dp_replicate": 2},
            "policy": {
                "main_params_dtype": None,
                "grad_comm_dtype": "bfloat16",
                "grad_reduce_dtype": "float32",
            },
        },
        3,
    ),
    "bf16 gradients": (
        "chain",
        {"axes": {"dp_replicate": 2}, "policy": {"main_params_dtype": None, "main_grads_dtype": "bfloat16"}},
        3,
    ),
    "experts": ("experts", {"axes": {"dp_replicate": 2, "dp_shard": 1, "ep": 2}, "experts": 4}, -1),
}


def _case(name: str) -> object:
    kind, options, calls = SAME_BITS[name]
    ranks = math.prod(options["axes"].values()) if "ep" not in options["axes"] else 4
    return pytest.param(kind, options, calls, marks=pytest.mark.ranks(ranks), id=name)


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(("kind", "options", "calls"), [_case(name) for name in SAME_BITS])
def test_overlapped_averages_are_bitwise_equal(pool, kind, options, calls):
    """Check bits against averages in the step. The first marked backward starts none."""
    ranks = 4 if "ep" in options["axes"] else math.prod(options["axes"].values())
    for result in pool.run(overlap_bits.bitwise_equal, ranks, kind=kind, **options):
        first, *others = result["early"]
        assert result["late"] == [0] * overlap_bits.STEPS and first == 0
        assert others == [calls] * 3 if calls >= 0 else min(others) > 1, result


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
def test_overlapped_averages_of_quantized_weights_are_bitwise_equal(pool):
    axes = {"dp_replicate": 2, "dp_shard": 1}
    for result in pool.run(overlap_bits.bitwise_equal, 2, kind="quantized", recipe="current", axes=axes):
        assert result["early"][0] == 0 and min(result["early"][1:]) >= 1, result


@pytest.mark.ranks(2)
def test_communication_counts(pool):
    for result in pool.run(overlap.communication_counts, 2):
        assert result["marked"] == [(0, 1), (3, 0), (3, 0)]
        assert result["plain"] == [(0, 1)] * 2
        # A different set of parameters: a new agreement.
        assert result["frozen"] == result["trained"] == [(0, 1), (3, 0)]
        # The question on the CPU is the only one in addition.
        assert result["kinds"] == ["reduce_scatter"] * 3 + ["all_reduce"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [[True, False], [False, False]], ids=str)
def test_first_step_with_is_last_on_some_ranks_is_correct(pool, first):
    """Check that nothing starts early, that the log reports it, and that all results are correct."""
    marked = [first, [False, True], [True, True]]
    assert pool.run(overlap.marked_on_some_ranks, 2, env=GLOO, marked=marked) == [[(0, 1)] * 3] * 2


@pytest.mark.ranks(2)
def test_is_last_not_marked_on_all_ranks_later(pool):
    """Check that averages start in the step on one rank and in the backward on the other."""
    marked = [[True, True], [True, True], [False, True], [True, True]]
    first, second = pool.run(overlap.marked_on_some_ranks, 2, env=GLOO, marked=marked, lines=0)
    wait, early_ = (0, 1), (3, 0)
    assert first == [wait, early_, (0, 3), early_]
    assert second == [wait, *[early_] * 3]


@pytest.mark.ranks(2)
def test_two_optimizers(pool):
    assert pool.run(overlap.two_optimizers, 2) == [[0, 2, 2]] * 2


@pytest.mark.ranks(2)
def test_different_units_on_replicas(pool):
    """Check replicas that use different units or a different order against one process."""
    for result in pool.run(overlap.different_units, 2, env=GLOO, orders=[[0, 1, 2, 3], [3, 2, 1, 0]]):
        assert result == [(0, 1), (4, 0), (4, 0)]
    for result in pool.run(overlap.different_units, 2, env=GLOO, orders=[[0, 1, 3], [0, 2, 3]]):
        assert result == [(0, 1), (4, 0), (4, 0)]
    orders = [[0, 1, 2, 3], [3, 2, 1, 0]]
    for error in pool.run_expect_error(overlap.different_units, 2, env=GLOO, orders=orders, alone=True):
        assert "blocks" in error.message, error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_units_used_several_times(pool, reentrant):
    """Check that a unit is reduced once in a backward, after its last use."""
    for result in pool.run(overlap.units_used_several_times, 2, reentrant=reentrant):
        assert result == [(0, 1), *[(3, 0)] * 3, (0, 1), (3, 0)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "where",
    [
        {0: 0, 1: 0},
        {0: 0, 1: 2},
        {0: 0, 1: "forward"},
        {0: "before", 1: 0},
        {0: 0},
        {1: "forward"},
    ],
    ids=str,
)
def test_interrupted_backward(pool, where):
    """Check a repeated backward on all ranks, or on one rank while the other waits in its step."""
    for result in pool.run(overlap.interrupted, 2, env=GLOO, where=where):
        assert result[1:] == [(3, 0), (3, 0)]


@pytest.mark.covering(days=2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "how",
    [
        "zero_grad",
        "optimizer.zero_grad",
        "zeros",
        "marked twice",
        "twice in one context",
        "plain",
        "one rank",
        "by hand",
        "scale_gradients",
    ],
)
def test_gradients_changed_before_the_step_are_correct(pool, how):
    for result in pool.run(overlap.change_gradients_before_step, 2, env=GLOO, how=how):
        assert result["sent"] == [3, (3, 0), (3, 0)]
        if how == "scale_gradients":
            assert result["between"] == 3


@pytest.mark.ranks(2)
def test_backward_after_a_norm(pool):
    for error in pool.run_expect_error(overlap.backward_after_norm, 2):
        assert error.type_name == "OrderError" and "changed after they were averaged" in error.message


@pytest.mark.ranks(2)
def test_dtypes_of_overlapped_averages(pool):
    """Check dtypes of the step's averages, also on a rank that has not run the backward."""
    wide, narrow = "float32", "bfloat16"
    for absent in (None, 1):
        for result in pool.run(overlap.communicated_dtypes, 2, env=GLOO, where="step", absent=absent):
            assert result == [[wide], [wide] * 3, [narrow], [narrow] * 3, [wide]]
    for result in pool.run(overlap.communicated_dtypes, 2, env=GLOO, where="backward"):
        assert result == [[wide], [wide] * 3, [wide], [wide], [wide] * 3]


@pytest.mark.ranks(2)
def test_is_last_in_nested_contexts(pool):
    marked = [True, *(value for _ in range(3) for value in (False, True)), False, False]
    assert pool.run(overlap.context_flags, 2) == [marked] * 2
