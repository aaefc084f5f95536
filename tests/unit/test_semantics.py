"""Test the module settings that a checkpoint records."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_fsdp
from te_fsdp.modules.semantics import SETTINGS, Semantics, differences, from_json, record, semantics_of
from te_fsdp.upstream.te import KINDS

#: Arguments of TE's constructors that do not change the function of the unsharded weights.
NO_SETTINGS = {
    "hidden_size", "ffn_hidden_size", "in_features", "out_features", "num_gemms", "normalized_shape",
    "layernorm_epsilon", "init_method", "output_layer_init_method", "layer_number", "tp_group", "tp_size",
    "params_dtype", "device", "name", "get_rng_state_tracker", "rng_tracker_name",
    "fuse_wgrad_accumulation", "seq_length", "micro_batch_size", "sequence_parallel", "set_parallel_mode",
    "parallel_mode", "parameters_split", "return_bias", "return_layernorm_output",
    "return_layernorm_output_gathered", "delay_wgrad_compute", "symmetric_ar_type", "save_original_input",
    "checkpoint", "use_grouped_tensor", "single_grouped_weight", "single_grouped_bias", "cp_group",
    "cp_global_ranks", "cp_stream", "cp_comm_type", "return_max_logit", "self", "kwargs", "args", "dtype",
    "cache_quantized_input", "sm_margin",
}  # fmt: skip


class Renamed(nn.Sequential):
    """A user's class."""


def model(te: Any, **kwargs: Any) -> nn.Module:
    settings = {"activation": "swiglu", "normalization": "RMSNorm", "num_gqa_groups": 2, **kwargs}
    layer = te.TransformerLayer(32, 64, 4, fuse_qkv_params=True, device="cpu", **settings)
    return nn.Sequential(nn.Embedding(8, 32), layer, te.RMSNorm(32, device="cpu"), nn.Linear(32, 8))


def test_module_settings_are_recorded(te: Any) -> None:
    result = semantics_of(model(te, zero_centered_gamma=True, layernorm_epsilon=1e-6, qk_norm_type="RMSNorm"))
    assert result["1.self_attention"].settings["num_gqa_groups"] == 2
    assert (
        result["1.self_attention"]["qkv_weight_interleaved"]
        and result["1.self_attention"]["qk_norm_eps"] == 1e-6
    )
    assert result["1.layernorm_mlp"]["zero_centered_gamma"] and result["1.layernorm_mlp"]["eps"] == 1e-6
    assert result["1.layernorm_mlp"]["activation"] == "swiglu" and result["2"]["zero_centered_gamma"] is False
    assert result["1.self_attention.core_attention"]["window_size"] == [-1, 0]
    assert result["3"] == Semantics("Linear", "torch", {}) and result["3"]["zero_centered_gamma"] is False
    assert not any("flash" in name or "fused" in name for name in result), "backends of attention"


def test_module_settings_round_trip_through_json(te: Any) -> None:
    expected = model(te)
    text = json.dumps(record(expected), allow_nan=False)
    assert differences(from_json(json.loads(text)), semantics_of(expected)) == []
    assert from_json(json.loads(text)) == semantics_of(expected)
    twice = nn.ModuleList([model(te), model(te)])
    assert len(record(twice)["kinds"]) == len(record(expected)["kinds"]), (
        "what modules share stands there once"
    )


def test_wrappers_bindings_and_shards_do_not_change_settings(te: Any, fake_world: Any) -> None:
    expected = semantics_of(model(te))
    wrapped = model(te)
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    assert semantics_of(torch.compile(wrapped)) == expected
    fake_world(2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    sharded = model(te)
    te_fsdp.set_device_mesh(sharded)
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    assert semantics_of(fully_shard(sharded, mesh=mesh)) == expected
    assert semantics_of(Renamed(*model(te))) == expected


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallelism_does_not_change_settings(te: Any, tp: int) -> None:
    cut = model(te, tp_size=tp, set_parallel_mode=True, sequence_parallel=tp > 1)
    assert semantics_of(cut) == semantics_of(model(te))


@pytest.mark.parametrize(
    "name", [*KINDS, "ops.LayerNorm", "ops.RMSNorm", "ops.SwiGLU", "ops.ClampedSwiGLU", "ops.ConstantScale"]
)
def test_every_te_argument_is_a_setting_or_listed_as_none(te: Any, name: str) -> None:
    """A new TE argument must be classified: it may change the meaning of weights."""
    cls = te
    for part in name.split("."):
        cls = getattr(cls, part)
    arguments = {a for a in inspect.signature(cls.__init__).parameters if not a.startswith("ub_")}
    assert arguments <= NO_SETTINGS | set(SETTINGS)
