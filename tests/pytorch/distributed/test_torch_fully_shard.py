"""Bound models sharded by torch's fully_shard. A forward after a step reads the new weights."""

from __future__ import annotations

import pytest
from parity import torch_fully_shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["evaluated", "kept", "parts"])
def test_step_updates_unsharded_units(pool, how):
    for outcome in pool.run(torch_fully_shard.compare_steps, 2, how=how):
        assert outcome["worst"] < 1e-5  # sums of fp32 in a different order; stale weights: 0.1 and more


@pytest.mark.ranks(2)
@pytest.mark.parametrize("library", ["te", "torch"])
def test_unit_used_twice_in_reentrant_checkpoints(pool, library):
    """Check gradients of both uses. FSDP2 alone reduces only one without an error."""
    for outcome in pool.run(torch_fully_shard.use_block_twice, 2, library=library):
        assert outcome["worst"] < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("parameter", "when"),
    [("head.weight", "after"), ("blocks.0.fc1_weight", "after"), ("blocks.0.fc1_weight", "before")],
)
def test_gradient_hooks_raise(pool, parameter, when):
    """Check hooks that FSDP2 never runs. It runs those of ``register_post_accumulate_grad_hook``."""
    for name, text, called in pool.run(
        torch_fully_shard.errors_of_gradient_hooks, 2, parameter=parameter, when=when
    ):
        assert (name, called) == ("OrderError", [])
        assert f"{parameter}: a gradient hook on a parameter that is" in text
    assert (
        pool.run(torch_fully_shard.errors_of_gradient_hooks, 2, parameter=parameter, when="never")
        == [("", "", [True])] * 2
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["none", "job", "tp", "weight", "group"])
def test_wrong_mesh_raises(pool, mesh):
    """Check meshes that torch cannot combine with ``tp``. Its errors named no parameter and no mesh to pass."""
    for name, text in pool.run(torch_fully_shard.error_of_mesh, 4, mesh=mesh):
        assert name == "MeshError"
        assert (
            text.startswith("fully_shard: mesh of a unit of ") and "whose fc.weight is on DeviceMesh(" in text
        )
        assert 'Fix: fully_shard(module, mesh=mesh["dp_shard"])' in text
    assert pool.run(torch_fully_shard.error_of_mesh, 4, mesh="dp") == [("", "")] * 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("program", ["create_graph", "retain_graph", "two forwards", "recomputed"])
def test_second_backward_and_create_graph_raise(pool, program):
    """Check derivatives that TE's kernels do not have. TE's error named nothing, or terms were missing."""
    texts = {
        "create_graph": "the root unit: backward with create_graph=True through sharded weights",
        "retain_graph": "the root unit: second backward through one forward",
    }
    for error, worst in pool.run(torch_fully_shard.errors_of_second_backward, 2, program=program):
        assert error.partition(":")[0] == texts.get(program, "").partition(":")[0]
        assert texts.get(program, "") in error
        assert worst < 1e-5
