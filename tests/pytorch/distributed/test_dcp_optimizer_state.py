"""State dicts with main weights only, which optimizers load."""

from __future__ import annotations

import pytest
from plain_dcp import optimizer_state

EQUAL = {"equal": 2, "moved": 2}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_stateless_optimizer_resumes(pool, outer):
    """Check that main weights, its only state, are not rejected as the state of an optimizer before its first step."""
    results = pool.run(optimizer_state.stateless, 2, outer=outer)
    assert all(result == EQUAL for result in results), results


@pytest.mark.ranks(2)
def test_stateful_user_optimizer_raises_before_its_first_step(pool):
    """Negative control: main weights alone are rejected for an optimizer that has other state."""
    for text in pool.run(optimizer_state.with_state, 2, outer="optim"):
        assert "Momentum.load_state_dict: 2 parameters with main weights only" in text
        assert "only main weights for parameters 0, 1" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("outer", ["optim", "no_shard"])
def test_rollback_to_state_before_a_layer_stepped(pool, outer, trained):
    results = pool.run(optimizer_state.rolled_back, 2, outer=outer, trained=trained)
    full, bare = ["exp_avg", "exp_avg_sq", "master_param", "step"], ["master_param"]
    assert all(result == EQUAL | {"states": [full, bare]} for result in results), results


@pytest.mark.ranks(2)
def test_main_weights_filled_in_place_by_dcp_raise(pool):
    for text in pool.run(optimizer_state.filled_in_place, 2, outer="optim"):
        assert "AdamW.load_state_dict: 1 parameters with main weights only" in text
        assert "only main weights for parameters 1" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["AdamW", "FusedAdam"])
def test_load_after_a_failed_load(pool, kind):
    """Check that a failed load leaves neither main parameters in the groups nor main weights that it has read."""
    results = pool.run(optimizer_state.refused_and_loaded, 2, outer="optim", kind=kind)
    expected = {"text": "loaded state dict has a different number of parameter groups"}
    assert all(r == EQUAL | expected | {"groups": True, "unchanged": True} for r in results), results


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [("remainders", "bf16"), ("bf16", "remainders")])
def test_main_weights_in_the_other_form_raise(pool, tmp_path, saved, loaded):
    """Check ``store_param_remainders`` of save and load. The numbers were converted, and the weights used instead."""
    forms = {"remainders": "int16", "bf16": "float32"}
    text = f"master_param: saved {forms[saved]}, this optimizer keeps {forms[loaded]}"
    for found in pool.run(
        optimizer_state.in_the_other_form, 2, saved=saved, loaded=loaded, directory=str(tmp_path)
    ):
        assert found.pop("changed") == []
        ways = {"dcp", "full", "broadcast", "trained", "fresh"}
        assert set(found) == ways | ({"main weights"} if loaded == "bf16" else set())
        assert all(text in error for error in found.values()), found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "current"])
def test_main_weights_of_fp32_weights(pool, tmp_path, quantized):
    """The states of FusedAdam had the initial FP32 weights as main weights, which its steps do not update.

    "own": the optimizer that has FP32 weights keeps them, as TE's does. Negative control: they are not current.
    """
    right: dict[str, list[str]] = {"dcp": [], "full": [], "broadcast": [], "load_state_dict": [], "own": []}
    right["control"] = ["0.bias", "0.weight"]
    results = pool.run(optimizer_state.from_fp32, 2, quantized=quantized, directory=str(tmp_path))
    assert results == [right] * 2
