"""`fully_shard(zero_copy_gradients=...)`. Gradients that are reduced without a copy equal copied ones."""

from __future__ import annotations

import math

import pytest
import torch
from harness import devices
from hfsdp import zero_copy

_BF16_WIRE = {"main_params_dtype": "fp32", "grad_comm_dtype": "bf16"}


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        pytest.param({"dp_shard": 2}, {}, id="dp2"),
        pytest.param({"dp_shard": 2}, {"dtype": "fp16"}, id="fp16"),
        pytest.param({"dp_shard": 2}, {"microbatches": 3, "strategy": "optim", "fused": True}, id="fused"),
        pytest.param({"dp_shard": 2}, {"policy": _BF16_WIRE}, id="wire"),
        pytest.param(
            {"dp_shard": 2}, {"policy": {**_BF16_WIRE, "grad_reduce_dtype": "fp32"}}, id="fp32-sums"
        ),
        pytest.param(
            {"dp_shard": 2}, {"policy": {}, "microbatches": 2, "strategy": "optim", "fused": True}, id="fp32"
        ),
        pytest.param({"dp_shard": 2}, {"recipe": "current"}, id="fp8"),
        pytest.param({"dp_shard": 2, "tp": 2}, {}, id="tp"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, {"microbatches": 2}, id="hsdp"),
        pytest.param({"dp_replicate": 2, "dp_shard": 2}, {"microbatches": 2, "outer": "optim"}, id="hfsdp"),
    ],
)
def test_zero_copy_gradients_are_bitwise_equal(pool, axes, options):
    for result in pool.run(
        zero_copy.compare_with_copied_gradients, math.prod(axes.values()), axes=axes, **options
    ):
        for number, seen in enumerate(result["counts"]):
            if number % 2:  # the twin
                assert seen == {"reduced": 0, "copied": 0}
            else:  # rows that are not cut evenly, and with fp32 sums the small ones
                assert 0 <= seen["copied"] < 0.2 * seen["reduced"]
                assert seen["copied"] or options.get("recipe") == "current"
        assert "large parameters (branch.linear.weight, ...): " in result["report"]


@pytest.mark.ranks(2)
def test_a_root_without_parameters(pool):
    for result in pool.run(zero_copy.compare_without_root_parameters, 2):
        assert "2 large parameters (1.weight, ...): reduced without a copy" in result["report"]


@pytest.mark.ranks(2)
def test_automatic_choice_of_zero_copy(pool):
    """Check the automatic choice, with weights gathered by copies."""
    if devices.device_type() == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("ranks that share a GPU cannot gather by copies")
    casts = "computed in torch.bfloat16, reduced in torch.float32"
    flags = 2 * 2  # one for each parameter and rank: whether the rank has used it
    for found in pool.run(zero_copy.automatic_choices, 2):
        assert found == {
            ("nccl", "none"): ((), 0, 0),
            ("nccl", "fp32"): ((), 0, 0),
            ("copy_engine", "none"): ((("", ("weight",)),), 64 * 64 + 64 + flags, 0),
            ("copy_engine", "fp32"): (((casts, ("weight",)),), 0, 0),
        }


@pytest.mark.ranks(2)
def test_negative_control_lost_gradients(pool):
    for error in pool.run_expect_error(
        zero_copy.compare_with_copied_gradients, 2, axes={"dp_shard": 2}, fault="lost"
    ):
        assert (
            "layer.self_attention.layernorm_qkv.layer_norm_weight: 16 of 16 elements differ" in error.message
        )


@pytest.mark.ranks(2)
def test_different_settings_on_ranks_raise(pool):
    for error in pool.run_expect_error(zero_copy.error_of_different_settings, 2):
        assert error.type_name == "MeshError" and "were given different arguments" in error.message
        assert "got zero_copy_gradients" in error.message and "False on rank 1" in error.message, error
