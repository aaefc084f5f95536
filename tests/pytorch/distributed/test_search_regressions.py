"""Minimal training programs, found by the random search, that te_fsdp ran differently from one process."""

from __future__ import annotations

import pytest
import torch
from hfsdp import unstepped_parameters, wgrad_fusion
from no_sharding import grad_dtypes
from plain_dcp import search_regressions


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "axes", [{"dp_shard": 2, "ep": 2}, {"dp_shard": 1, "ep": 2, "tp": 2}], ids=["dp", "tp"]
)
def test_fused_wgrad_accumulation_of_experts(pool, axes):
    pool.run(wgrad_fusion.compare_experts_with_unfused, 4, axes=axes)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"dp_replicate": 2, "dp_shard": -1}, {"dp_shard": -1}], ids=["hfsdp", "dp"])
def test_load_of_main_weights_that_have_not_stepped(pool, axes):
    pool.run(unstepped_parameters.continues, 4, axes=axes)


@pytest.mark.ranks(2)
@pytest.mark.arch("9.0", "10.0")
def test_fused_wgrad_accumulation_of_cast_weights(pool):
    pool.run(wgrad_fusion.compare_cast_weights_with_unfused, 2, recipe="current")


@pytest.mark.ranks(2)
def test_fp32_gradients_of_tp_sharded_bf16_parameters(pool):
    assert all(result["moved"] == 4 for result in pool.run(grad_dtypes.steps, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_save_after_a_complete_backward(pool, strategy):
    results = pool.run(search_regressions.saved_after_a_complete_backward, 2, strategy=strategy)
    assert all(result == {"saved": 4, "refused": 4} for result in results)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checks", ["setup", "full"])
def test_torch_clips_gradients_of_no_shard_modules_over_tp(pool, checks):
    for norms in pool.run(search_regressions.clipped_by_torch, 2, dtype=torch.bfloat16, checks=checks):
        assert norms["theirs"] == pytest.approx(norms["ours"], rel=2**-6)  # torch rounds norms to bf16
        assert norms["after"] == pytest.approx(norms["ours"] / 2, rel=2**-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_optimizer_state_of_bf16_parameters_with_fp32_gradients(pool, strategy):
    results = pool.run(
        search_regressions.states_of_unused_optimizers, 2, strategy=strategy, grads=torch.float32
    )
    assert all(result == {"dtypes": {"torch.float32"}, "states": 2, "moved": 2} for result in results)
