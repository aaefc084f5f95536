"""Bound models whose units torch's fully_shard keeps unsharded (``reshard_after_forward=False``)."""

from __future__ import annotations

import pytest
from harness import BodyFailed
from parity import torch_fully_shard


@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", ["evaluation", "backward"])
@pytest.mark.parametrize("change", ["none", "load_state_dict"])
def test_changes_to_unsharded_units_equal_one_process(pool, change, after):
    """Check unsharded weights from before a step or a load, which later forwards read."""
    for outcome in pool.run(torch_fully_shard.compare_changes_to_unsharded, 2, change=change, after=after):
        assert outcome["worst"] < 1e-5 and outcome["weights"] < 1e-5 and outcome["text"] == "", outcome


@pytest.mark.ranks(2)
@pytest.mark.parametrize("after", ["evaluation", "backward"])
def test_optimizer_of_unsharded_parameters_raises(pool, after):
    """Check an optimizer whose steps change nothing, because only shards get gradients."""
    for outcome in pool.run(
        torch_fully_shard.compare_changes_to_unsharded, 2, change="optimizer", after=after
    ):
        assert "SGD.step: an unsharded parameter of shape" in outcome["text"], outcome


@pytest.mark.ranks(2)
def test_torch_units_in_a_te_fsdp_model_raise(pool):
    with pytest.raises(BodyFailed, match="fully_shard on a module that is already sharded"):
        pool.run(
            torch_fully_shard.compare_changes_to_unsharded, 2, change="none", after="evaluation", by="te_fsdp"
        )
