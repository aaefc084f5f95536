"""Bound models that torch's own fully_shard shards: a forward after a step reads the new weights."""

from __future__ import annotations

import pytest
from parity import torch_units


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["evaluated", "kept", "parts"])
def test_a_step_reaches_units_that_are_unsharded(pool, how):
    for outcome in pool.run(torch_units.stepped, 2, how=how):
        assert outcome["worst"] < 1e-5  # sums of fp32 in another order; stale weights: 0.1 and more


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["te", "torch"])
def test_gradients_of_a_unit_that_reentrant_checkpoints_use_twice(pool, library):
    """FSDP2 alone reduces those of one use, without an error."""
    for outcome in pool.run(torch_units.reused, 2, library=library):
        assert outcome["worst"] < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parameter", "when"),
    [("head.weight", "after"), ("blocks.0.fc1_weight", "after"), ("blocks.0.fc1_weight", "before")],
)
def test_gradient_hooks_are_refused(pool, parameter, when):
    """FSDP2 never runs them. It runs those of ``register_post_accumulate_grad_hook``."""
    for name, text, called in pool.run(torch_units.hooked, 2, parameter=parameter, when=when):
        assert (name, called) == ("OrderError", [])
        assert f"{parameter}: a gradient hook on a parameter that is" in text
    assert pool.run(torch_units.hooked, 2, parameter=parameter, when="never") == [("", "", [True])] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("program", ["create_graph", "retain_graph", "two forwards", "recomputed"])
def test_second_backwards_and_derivatives(pool, program):
    """TE's kernels have none: its error named nothing, or terms were missing."""
    texts = {
        "create_graph": "the root unit: backward with create_graph=True through sharded weights",
        "retain_graph": "the root unit: second backward through one forward",
    }
    for error, worst in pool.run(torch_units.derived, 2, program=program):
        assert error.partition(":")[0] == texts.get(program, "").partition(":")[0]
        assert texts.get(program, "") in error
        assert worst < 1e-5
