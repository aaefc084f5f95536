"""Scripts that shard state dicts themselves, by ``distribute_tensor``, ``torch.save`` of each rank, or from rank 0."""

from __future__ import annotations

import pytest
from plain_dcp import user_sharded_state_dicts

# One step of AdamW from the same state, with sums in a different order.
NEXT_STEP = {"none": 1e-5, "bf16": 2**-8}


@pytest.mark.ranks(2)
def test_assign_distributed_tensors_to_meta_parameters(pool):
    """Check the load of the FSDP2 tutorial. Rows in unsharded order were taken for rows in rank order."""
    for found in pool.run(user_sharded_state_dicts.assigned_on_meta, 2):
        assert found.pop("after") <= NEXT_STEP["none"] and found == {"wrong": [], "control": False}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("recipe", "axes", "sharder", "by"),
    [
        ("none", {"dp_shard": 2, "tp": 2}, "torch", "the example"),
        ("none", {"tp": 2}, "te_fsdp", "the example"),
        ("bf16", {"tp": 2}, "torch", "the example"),
        ("bf16", {"dp_shard": 2}, "te_fsdp", "the example, main weights"),
        ("none", {"tp": 2}, "torch", "torch.save"),
        ("bf16", {"tp": 2}, "te_fsdp", "torch.save"),
    ],
)
def test_user_sharded_optimizer_state(pool, recipe, axes, sharder, by):
    """Check moments and main weights, whose rows were wrong or exported in rank order without an error.

    With main weights the example's function created no other states: ``KeyError: 'step'``.
    """
    ranks = axes.get("tp", 1) * axes.get("dp_shard", 1)
    run = {"recipe": recipe, "axes": axes, "sharder": sharder, "by": by}
    for found in pool.run(user_sharded_state_dicts.loaded_states, ranks, **run):
        assert found.pop("control") > 0 and found.pop("after") <= NEXT_STEP[recipe], found
        assert found == {"wrong": [], "exported": []}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["none", "current"])
def test_copies_and_pickles_of_a_stacked_weight(pool, tmp_path, recipe):
    """Copies, and what was read from a pickle, returned the rows in the order of the ranks without an error."""
    for found in pool.run(
        user_sharded_state_dicts.copies_and_pickles, 2, recipe=recipe, directory=str(tmp_path)
    ):
        for name in ("full_tensor", "dcp.save"):
            assert "rows of a stacked weight in the order of the ranks" in found.pop(name)
        assert found == {"copy": True, "deepcopy": True, "loaded": True}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8", "nvfp4"])
def test_quantized_tensors_of_rank_0(pool, recipe, broadcast):
    """Check tensors of stock TE. Rank 0 copied bytes while others waited for its amax, and NVFP4 slices raised."""
    run = {"recipe": recipe, "broadcast": broadcast, "timeout": 60}
    assert pool.run(user_sharded_state_dicts.quantized_tensors, 2, **run) == [[], []]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_async_save_of_main_weights_in_a_process(pool, recipe):
    """Check ``dcp.async_save`` in a process, which raised TypeError: cannot pickle a weak reference."""
    assert pool.run(user_sharded_state_dicts.main_weights_in_a_process, 2, recipe=recipe) == [[], []]
