"""Losses over the outputs of a column-parallel head. A loss over one tp rank's part raises."""

from __future__ import annotations

import bodies_vocab_parallel_loss
import pytest
import torch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.ranks(2)
@DTYPES
@pytest.mark.parametrize("how", ["plain", "plain, in the dtype of the logits", "TE's, without a group"])
def test_loss_over_local_logits_raises(pool, how, dtype):
    """Check a loss that normalizes over local classes. Small labels are valid indices on every rank."""
    for raised in pool.run_expect_error(bodies_vocab_parallel_loss.step, 2, how=how, dtype=dtype):
        assert raised.type_name == "GradientError", raised.message
        for text in (
            "head: a loss over one rank's part of the outputs",
            "all 2 ranks of tp",
            "loss_parallel",
        ):
            assert text in raised.message, raised.message
    # The negative control: without the check it trains, with a different loss. ln(64 / 32) = 0.69 at the start.
    for loss, over_all in pool.run(bodies_vocab_parallel_loss.step, 2, how=how, dtype=dtype, checks="setup"):
        assert over_all - loss > 0.3


@pytest.mark.ranks(2)
def test_loss_over_local_logits_of_a_bound_model_raises(pool):
    """Check ``set_device_mesh`` without FSDP2. ``check_inputs=False`` disables the check."""
    arguments = {"how": "plain", "dtype": torch.float32, "is_bound": True}
    for raised in pool.run_expect_error(bodies_vocab_parallel_loss.step, 2, **arguments):
        assert raised.type_name == "GradientError" and "head: a loss over one" in raised.message, (
            raised.message
        )
    for loss, over_all in pool.run(bodies_vocab_parallel_loss.step, 2, **arguments, checks="setup"):
        assert over_all - loss > 0.3
    pool.run(bodies_vocab_parallel_loss.step, 2, **arguments | {"how": "loss_parallel"})


@pytest.mark.ranks(2)
@DTYPES
@pytest.mark.parametrize("only_first", [False, True], ids=["all", "one_rank"])
@pytest.mark.parametrize("how", ["loss_parallel", "TE's", "gathered", "square"])
def test_correct_losses_pass(pool, how, dtype, only_first):
    """Check labels that are all on the first rank, which resembles a loss over local classes most."""
    arguments = {"how": how, "dtype": dtype, "only_first": only_first, "checks": "full"}
    for loss, over_all in pool.run(bodies_vocab_parallel_loss.step, 2, **arguments):
        # Sums of fp32 in a different order: relative 1e-6.
        assert how == "square" or abs(loss - over_all) <= 1e-5 * abs(over_all)
