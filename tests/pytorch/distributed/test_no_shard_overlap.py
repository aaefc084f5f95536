"""Strategy no_shard: reductions that start during backward, in the same order on all ranks."""

from __future__ import annotations

import pytest
from harness.shared_memory import GLOO_VARIABLE
from no_sharding import overlap
from no_sharding.overlap import MIXED, SIZES

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("marked", [False, True])
def test_reductions_have_the_same_order_on_all_ranks(pool, marked):
    results = pool.run(overlap.order, 2, marked=marked)
    (first, early_1), (second, early_2), (third, early_3), (fourth, early_4), fifth = results[0]["calls"]
    assert all(result["calls"] == results[0]["calls"] for result in results)
    # Parameters of all ranks are first, in backward's order; then the others, in the order of modules.
    agreed = [SIZES[name] for name in ("head", "common", "right", "left", "never")]
    assert second == agreed and early_2 == 1  # the head
    # The same buckets, none of them early, and the order of five units.
    assert sorted(first[:-1]) == sorted(agreed) and first[-1] == 10 and early_1 == 0
    # A parameter was frozen: the ranks agree again. When it is trained again, they have the order.
    assert sorted(third[:-1]) == sorted(fourth) and third[-1] == 10 and early_3 == 0
    assert fourth == [129, *agreed[1:]] and early_4 == 1
    assert fifth == (agreed, 1)


def test_reductions_do_not_interfere_with_fsdp2(pool):
    """Check FSDP2's concurrent reductions on the same ranks."""
    results = pool.run(overlap.order, 2, strategy=MIXED)
    assert all(result["calls"] == results[0]["calls"] for result in results)
    second, early = results[0]["calls"][1]
    assert second == [SIZES[name] for name in ("head", "right", "left")] and early == 1


def test_different_orders_with_fsdp2_reductions(pool):
    """Check different orders on ranks, which require separate process groups."""
    # Gloo's: in shared memory an asynchronous collective waits for the others, of which two groups want two first.
    first, second = pool.run(overlap.interleave_with_fsdp2, 2, env={GLOO_VARIABLE: "1"})
    usual = ["reduce_scatter", "all_reduce", "reduce_scatter", "all_reduce"]
    assert first == {"all": usual, "one": usual}
    assert second == {"all": usual, "one": ["reduce_scatter"] * 2 + ["all_reduce"] * 2}


@pytest.mark.parametrize(("spoil", "words"), [("order", "left"), ("late", "")])
def test_negative_control_different_order(pool, spoil, words):
    if spoil == "order":
        errors = pool.run_expect_error(overlap.order, 2, spoil=spoil, left=8)
        assert all(words in error.message for error in errors)
    else:
        assert [early for _, early in pool.run(overlap.order, 2, spoil=spoil)[0]["calls"]] == [0] * 5


def test_several_gradients_in_one_backward(pool):
    """Check that only complete gradients are sent, or an error is raised."""
    assert pool.run(overlap.several_gradients, 2, first=[0, 1, 2], later=[0, 1, 2]) == [2] * 2
    # Used twice: left to the end.
    assert pool.run(overlap.several_gradients, 2, first=[0, 2, 1, 2], later=[0, 2, 1, 2]) == [1] * 2
    # Twice for the first time, but it is not its turn yet.
    pool.run(overlap.several_gradients, 2, first=[0, 1, 2], later=[0, 1, 0, 2])
    for error in pool.run_expect_error(overlap.several_gradients, 2, first=[0, 1, 2], later=[0, 2, 1, 2]):
        assert error.type_name == "OrderError" and "blocks.2." in error.message


def test_interrupted_backward(pool):
    first, second = pool.run(overlap.interrupted, 2, where={0: 0, 1: 2})
    assert first["raised"] and second["raised"]
    alone, other = pool.run(overlap.interrupted, 2, where={0: 0})
    assert alone["raised"] and not other["raised"] and other["spoilt"]
    assert alone["calls"] == other["calls"] == 3


@pytest.mark.parametrize("plain", [False, True], ids=["te_fsdp.zero_grad", "optimizer.zero_grad"])
@pytest.mark.parametrize(
    "where",
    [
        [{0: 0, 1: "loss"}, {0: "forward", 1: 2}],
        [{0: 2, 1: "loss"}, {0: "loss", 1: "forward"}],
        [{0: 0, 1: 2}, {0: 1}],
        [{0: "forward", 1: "loss"}, {0: 1, 1: 1}],
    ],
    ids=str,
)
def test_ranks_that_raise_at_different_points(pool, where, plain):
    """All ranks repeat their microbatches; none uses a different rank's microbatch, and none waits forever.

    The next attempt of a rank without a started reduction joins a reduction that another rank completes, and raises.
    """
    for found in pool.run(overlap.raise_at_different_points, 2, where=where, plain=plain):
        assert found[0] == found[-1] == 1 and max(found) <= 4, found


def test_memory_of_gradient_buckets(pool):
    """Check one bucket in addition to the gradients, a third of their size."""
    for first, later in pool.run(overlap.memory, 2):
        assert first == pytest.approx(4 / 3, rel=0.02)
        assert later <= 4 / 3 * 1.02  # activations and flags


BF16 = {"main_params_dtype": None, "grad_comm_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("options", "early", "kinds", "dtype"),
    [
        pytest.param({"main_params_dtype": None}, 2, ["all_reduce"] * 3, "float32", id="fp32"),
        pytest.param(BF16, 2, ["all_reduce"] * 3, "bfloat16", id="bf16"),
        pytest.param({**BF16, "grad_comm_dtype": "float16"}, 2, ["all_reduce"] * 3, "float16", id="fp16"),
        pytest.param(
            {**BF16, "grad_reduce_dtype": "float32"},
            2,
            ["all_to_all"] * 3 + ["all_gather"] * 3,
            "bfloat16",
            id="fp32 sum",
        ),
        # Would take more memory on its way than before it.
        pytest.param(
            {"main_params_dtype": None, "main_grads_dtype": "bfloat16", "grad_comm_dtype": "float32"},
            0,
            ["all_reduce"] * 3,
            "float32",
            id="fp32 of bf16",
        ),
    ],
)
def test_overlapped_reductions_are_bitwise_equal(pool, options, early, kinds, dtype):
    for result in pool.run(overlap.bitwise_equal, 2, options=options):
        assert result["early"] == [0, early]
        assert result["kinds"] == kinds and set(result["dtypes"]) == {dtype}
