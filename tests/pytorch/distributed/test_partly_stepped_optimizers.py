"""Loads of state dicts into an optimizer in which some parameters have no state."""

from __future__ import annotations

import pytest
from plain_dcp import partly_stepped

CASES = [
    ({"dp_shard": 2}, "AdamW", "te_fsdp", "broadcast"),
    ({"dp_shard": 2}, "AdamW", "te_fsdp", "full"),
    ({"dp_shard": 2}, "AdamW", "te_fsdp", "flat"),
    ({"dp_shard": 2}, "AdamW", "te_fsdp", "full flat"),
    ({"dp_shard": 2}, "main weights", "te_fsdp", "broadcast flat"),
    ({"dp_shard": 2}, "AdamW", "torch", "broadcast"),
    ({"dp_shard": 2}, "SGD", "te_fsdp", "broadcast"),
    ({"dp_shard": 2}, "main weights", "te_fsdp", "broadcast"),
    ({"dp_shard": 2}, "main weights", "te_fsdp", "full"),
    ({"dp_shard": 2}, "main weights", "te_fsdp", "flat"),
    ({"dp_shard": 1, "tp": 2}, "AdamW", "te_fsdp", "broadcast"),
    ({"dp_shard": 1, "tp": 2}, "main weights", "te_fsdp", "broadcast"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axes", "optimizer", "by", "form"),
    CASES,
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_state_dict_has_states_that_the_optimizer_lacks(pool, axes, optimizer, by, form):
    """Rank 0 kept unsharded states, and rank 1 none; without broadcast, or with main weights, errors or a hang.

    A flattened state dict lost these states. Negative control: the optimizer has fewer states before the load.
    """
    for found in pool.run(partly_stepped.load, 2, axes=axes, optimizer=optimizer, by=by, form=form):
        assert 0 < found["before"] < found["states"], found
        assert found["differ"] == found["unsharded"] == found["changed"] == [], found
        assert found["rates"] == [1e-2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("flat", "prefix", "form"),
    [
        (False, "optimizer", "own"),
        (True, "a.state.of", "own"),
        (True, "optimizer", "deepcopy"),
        (False, "b", "clone"),
    ],
)
def test_dcp_refuses_states_that_the_optimizer_lacks(pool, tmp_path, flat, prefix, form):
    """They were lost without an error. Negative control: a checkpoint without these states loads."""
    for text, control, states in pool.run(
        partly_stepped.load_by_dcp, 2, directory=str(tmp_path), flat=flat, prefix=prefix, form=form
    ):
        assert (
            "dcp.load: states of 3 parameters that have not stepped: 0.fc1_weight, 1.bias, 1.weight" in text
        )
        assert control == "" and states > 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("broadcast", [True, False])
def test_gradients_refuse_states_that_the_optimizer_lacks(pool, broadcast):
    for text in pool.run(partly_stepped.load_with_gradients, 2, broadcast=broadcast):
        assert "OrderError: AdamW: load of states before the first step of 0.fc1_weight, 1.bias" in text, text
        assert "optimizer.zero_grad()" in text
