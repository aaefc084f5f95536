"""Expected placements of each parameter of each module kind, written by hand from TE's parameter shapes."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from parity.models import EXPERTS, GROUPS

ROWS, COLUMNS, COPIES = Shard(0), Shard(1), Replicate()
_NORM = {"layer_norm_weight": COPIES, "layer_norm_bias": COPIES}
_FC = {"fc1_weight": ROWS, "fc1_bias": ROWS, "fc2_weight": COLUMNS, "fc2_bias": COPIES}
_MLP = {**_NORM, **_FC}
_PROJ = {"proj.weight": COLUMNS, "proj.bias": COPIES}
_SPLIT = {f"{name}_{what}": ROWS for name in ("query", "key", "value") for what in ("weight", "bias")}


def _under(prefix: str, table: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": placement for name, placement in table.items()}


#: Module kind and options -> tensor-parallel placement of each parameter, from TE's documentation of its shapes.
PLACEMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "column": ("linear", {"parallel_mode": "column"}, {"weight": ROWS, "bias": ROWS}),
    "column_no_bias": ("linear", {"parallel_mode": "column", "bias": False}, {"weight": ROWS}),
    "row": ("linear", {"parallel_mode": "row"}, {"weight": COLUMNS, "bias": COPIES}),
    "unsplit": ("linear", {"parallel_mode": None}, {"weight": COPIES, "bias": COPIES}),
    "norm_linear": ("layer_norm_linear", {}, {**_NORM, "weight": ROWS, "bias": ROWS}),
    "norm_linear_rms": (
        "layer_norm_linear",
        {"normalization": "RMSNorm", "bias": False},
        {"layer_norm_weight": COPIES, "weight": ROWS},
    ),
    "mlp": ("layer_norm_mlp", {}, _MLP),
    "mlp_swiglu_no_bias": (
        "layer_norm_mlp",
        {"activation": "swiglu", "bias": False},
        {**_NORM, "fc1_weight": ROWS, "fc2_weight": COLUMNS},
    ),
    "grouped": (
        "grouped_linear",
        {},
        {f"fc{n}.weight{i}": (ROWS, COLUMNS)[n - 1] for n in (1, 2) for i in range(EXPERTS)},
    ),
    "layer_norm": ("layer_norm", {}, {"weight": COPIES, "bias": COPIES}),
    "rms_norm": ("rms_norm", {}, {"weight": COPIES}),
    "core_attention": ("core_attention", {}, {"softmax_offset": ROWS}),
    "attention": (
        "attention",
        {"qk_norm_type": "RMSNorm", "input_layernorm": True, "softmax_type": "learnable"},
        {
            **_under("layernorm_qkv", {**_NORM, **_SPLIT}),
            "core_attention.softmax_offset": ROWS,
            "q_norm.weight": COPIES,
            "k_norm.weight": COPIES,
            **_PROJ,
        },
    ),
    "attention_fused": (
        "attention",
        {"fuse_qkv_params": True, "groups": GROUPS},
        {"qkv.weight": ROWS, "qkv.bias": ROWS, **_PROJ},
    ),
    "layer": (
        "transformer_layer",
        {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
        {
            **_under(
                "self_attention",
                {**_under("layernorm_qkv", {**_NORM, "weight": ROWS, "bias": ROWS}), **_PROJ},
            ),
            **_under("layernorm_mlp", _MLP),
        },
    ),
    "layer_output_norm": (
        "transformer_layer",
        {"output_layernorm": True},
        {
            **_under("self_attention", {**_under("qkv", _SPLIT), **_PROJ}),
            **_under("layernorm_mlp", _MLP),
            "layernorm.weight": COPIES,
            "layernorm.bias": COPIES,
        },
    ),
}
