"""Budget of te_fsdp's own calls in a steady-state step.

The order of te_fsdp's hooks in a step is tested, too.

Python 3.10 and 3.11 also count a call for each comprehension.
"""

from __future__ import annotations

import pytest
from strategies import te_fsdp_calls


@pytest.mark.cpu  # on GPUs a backward's Python runs on a thread that torch starts, which nothing can profile
@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
@pytest.mark.parametrize(
    ("axes", "budget"),
    [({"dp_shard": 1, "tp": 2}, 800), ({"dp_shard": 2}, 725), ({"dp_replicate": 2, "dp_shard": 1}, 1750)],
    ids=["tp2", "dp2", "hfsdp"],
)
def test_te_fsdp_calls_per_step_are_within_budget(pool, axes, budget):
    for counted in pool.run(te_fsdp_calls.calls_per_step, 2, axes=axes):
        assert sum(dict(counted).values()) <= budget, counted[:20]
        # Calls of the gathers of its 8 weights, which show that the step was counted at all.
        assert dict(counted)["quantized/fsdp_hooks.py:post_all_gather"] == 16


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_a_reader_of_one_linear_passes_few_files(pool):
    """Check the files that a debugger shows, and how often it jumps to another one."""
    for walk in pool.run(te_fsdp_calls.walk_of_one_linear, 2):
        files, changes = walk["step"]
        assert files <= 22
        assert changes <= 30
        # fully_shard also applies the patches in the first call of a process.
        files, changes = walk["fully_shard"]
        assert files <= 75
        assert changes <= 310


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
@pytest.mark.parametrize("fused", [False, True], ids=["sgd", "fused"])
def test_one_hook_before_and_after_the_optimizer_step(pool, fused):
    """Check that a user's weight average after each step reads the new weights."""
    seen = [True, True] * (3 if fused else 1)
    assert pool.run(te_fsdp_calls.user_hooks, 2, fused=fused) == [{"seen": seen, "before": 1, "after": 1}] * 2


@pytest.mark.ranks(2)
def test_tp_replicas_are_equal_after_a_failed_step(pool):
    """Check a failed step that left main weights in the groups. Gradients of replicas are still made equal."""
    assert pool.run(te_fsdp_calls.replicas_after_a_failed_step, 2) == [True, True]


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
def test_step_uses_a_replaced_main_weight(pool):
    """Check that a step updates a main weight that replaced the previous one, for example after a load."""
    assert pool.run(te_fsdp_calls.step_with_replaced_main_weight, 2) == [(True, True)] * 2
