"""Constructors of the Megatron-FSDP bridge.

The bridge's index and the methods of its wrapper are tested by their effects.
"""

from __future__ import annotations

import pytest
from bridge import constructors

# Sums of a few numbers in a different order, two steps of SGD.
RTOL = 1e-5


@pytest.mark.ranks(4)
@pytest.mark.parametrize("outer", [None, "no_shard", "optim"])
def test_wrapping_with_dist_index(pool, outer):
    for found in pool.run(constructors.construct_with_dist_index, 4, outer=outer):
        assert found["worst"] < RTOL
        assert found["same"] and found["auto"] is False
        assert found["cut"] == (2 if outer is None else 4), "8 rows over all ranks, or over half of them"


@pytest.mark.ranks(2)
def test_wrapping_without_dist_index(pool):
    for found in pool.run(constructors.construct_without_dist_index, 2):
        assert found["worst"] < RTOL and found["sums"] < RTOL
        assert found["names"] == ("fsdp", "tp")
        assert found["sharded"] and found["whole"], (
            "no_shard is the default of a configuration, and only there"
        )
        assert len(found["messages"]) == 1 and "nccl_ub=True has no effect" in found["messages"][0]
        assert sorted(text.split(" has no effect")[0] for text in found["config"]) == [
            "megatron_fsdp: fp8_param_gather=True",
            "megatron_fsdp: outer_dp_sharding_strategy='optim'",
        ]
        assert found["nan"] == "GradientError"


@pytest.mark.ranks(4)
def test_dist_index(pool):
    results = pool.run(constructors.dist_index_methods, 4)
    for rank, found in enumerate(results):
        outer, inner = divmod(rank, 2)
        assert found["near"] == [2 * outer, 2 * outer + 1] and found["far"] == [inner, inner + 2]
        assert found["dp"] == [0, 1, 2, 3] and found["place"] == 2 * inner + outer
        assert found["apart"] and found["root"] and found["one"] and found["two"] == (2, 2)
        assert found["hybrid"] and found["experts"] == [None, None, None] and found["given"]
        assert found["expert_near"] == found["expert_dp"] == [inner, inner + 2]
        assert found["expert_far"] == [rank] and found["expert_mesh"]
        errors = found["errors"]
        assert (
            "dp_shard_dim: expected the name of the sharding axis, one of ('far', 'near', "
            "'wide')" in errors["no axis"]
        )
        assert "get_submesh('tp'" in errors["unknown"] and "('near', 'tp')" in errors["submesh"]
        assert "get_submesh(None" in errors["none"] and "is_expert_parallel=True" in errors["no experts"]
        assert "expected HFSDP" in errors["place"]


@pytest.mark.ranks(2)
def test_effects_of_methods(pool):
    for found in pool.run(constructors.effects_of_methods, 2):
        for method in ("synchronize_gradient_reduce", "attach_grad_to_optimizer_state", "finish_grad_sync"):
            waits, worst = found[method]
            assert waits and worst < 1e-6, method  # sums of two numbers, and a mean of few
        for key in ("gathered", "loaded", "installed", "released"):
            assert found[key], key
        assert found["policy"] == ["torch.float32", "torch.bfloat16"]
        assert "finish_grad_sync(force_all_reduce=True)" in found["messages"][0]
        assert "main_params_dtype and main_grads_dtype stay torch.float32 and None" in found["messages"][1]


@pytest.mark.ranks(2)
def test_start_param_sync_gathers_root_weights(pool):
    for found in pool.run(constructors.start_param_sync, 2):
        assert found == {"early": [6], "late": [8 * 6 + 8]}


@pytest.mark.ranks(2)
def test_initialization_by_underscore_reset_parameters(pool):
    for found in pool.run(constructors.underscore_reset_parameters, 2):
        assert found["wrong"] == [] and found["tensors"] == 4
        assert "1 tensor(s) were not initialized: shift" in found["error"]


@pytest.mark.ranks(2)
def test_fsdp_no_shard_keeps_weights_unsharded(pool):
    for found in pool.run(constructors.no_shard, 2):
        assert found["kinds"] == [True, False] and found["worst"] < RTOL
