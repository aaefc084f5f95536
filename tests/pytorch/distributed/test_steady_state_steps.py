"""Steady-state steps. They repeat no checks but detect a user's changes between two steps."""

from __future__ import annotations

import pytest
import torch
from harness import assert_bitwise_equal
from strategies import steady_state
from torch.distributed.fsdp import FSDPModule

SEEN = {
    "gathered": True,
    "shard's on gathered": 1,
    "same shard": True,
    "frozen stays": True,
    "others go on": True,
    "thawed goes on": True,
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_parameter_changes_between_steps_are_applied(pool, transport):
    """Check attributes and `requires_grad` of parameters that FSDP2 swaps."""
    assert pool.run(steady_state.attributes_after_changes, 2, transport=transport) == [SEEN] * 2


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hasattr(FSDPModule, "set_keep_unsharded_storage"), reason="new in torch 2.15")
def test_set_keep_unsharded_storage(pool):
    """`set_keep_unsharded_storage` of FSDP2 has its effect in later steps, too."""
    for keeps in (False, True):
        for found in pool.run(steady_state.unsharded_bytes, 2, keeps=keeps):
            assert len(found) == 3  # of weight, and the norm's weight and bias
            assert all((size > 0) == keeps for size in found), found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", ["flat", "nested"])
def test_nested_inputs_of_a_unit(pool, form):
    """Check gradients for nested inputs, FSDP2's ranges in a profile, and its node before the inputs."""
    for ours, theirs, is_complete in pool.run(steady_state.gradients_by_inputs, 2, form=form):
        assert is_complete
        for number, (have, want) in enumerate(zip(ours, theirs, strict=True)):
            assert want.any()
            assert_bitwise_equal(f"gradient {number}", have, want)  # both ranks have the same rows


@pytest.mark.ranks(2)
def test_norm_gradients_are_reduced_once_per_unit(pool):
    """Check that one all-reduce over tp sums weight and bias of a unit's norms."""
    for calls in pool.run(steady_state.count_tp_reductions, 2):
        assert calls == [2 * steady_state.HIDDEN] * 2


@pytest.mark.ranks(2)
def test_norm_gradient_reductions_equal_dtensor(pool):
    """Check accumulated gradients bit for bit over two ranks."""
    together = pool.run(steady_state.microbatches_over_tp, 2, together=True)
    apart = pool.run(steady_state.microbatches_over_tp, 2, together=False)
    for ours, theirs in zip(together, apart, strict=True):
        for number, (have, want) in enumerate(zip(ours, theirs, strict=True)):
            assert want.any()
            assert_bitwise_equal(f"gradient {number}", have, want)
    assert all(map(torch.equal, together[0], together[1]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("state", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("axes", "is_fp8"),
    [({"dp_shard": 2}, False), ({"dp_shard": 2}, True), ({"dp_replicate": 2, "dp_shard": 1}, False)],
    ids=["bf16", "fp8", "hfsdp"],
)
def test_fused_adam_on_local_tensors(pool, axes, is_fp8, state):
    """Check bits against DTensors, and that a step restores groups, states and gradients."""
    given = {"axes": axes, "is_fp8": is_fp8, "state": state}
    local = pool.run(steady_state.steps_of_fused_adam, 2, local=True, **given)
    apart = pool.run(steady_state.steps_of_fused_adam, 2, local=False, **given)
    for ours, theirs in zip(local, apart, strict=True):
        assert ours["held"] and ours["keys"] and ours["clean"]
        assert ours["losses"][0] != ours["losses"][-1]
        assert ours["states"].keys() == theirs["states"].keys()
        for what in ("losses", "weights"):
            for number, (have, want) in enumerate(zip(ours[what], theirs[what], strict=True)):
                assert_bitwise_equal(f"{what} {number}", have, want)
        for name, value in theirs["states"].items():
            assert_bitwise_equal(name, ours["states"][name], value)


@pytest.mark.ranks(2)
def test_failed_step_restores_param_groups(pool):
    """Check that groups contain parameters after a failed step, and that training continues."""
    assert (
        pool.run(steady_state.state_after_failed_step, 2) == [{"saved": True, "held": True, "same": True}] * 2
    )
