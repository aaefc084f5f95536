"""Sharded training, compared with stock TransformerEngine in one process.

Gradients of two steps and parameters are compared by value.

`parity.runs` has the method and the tolerances. Options are distributed over the meshes. Each module kind runs on each
mesh, and each option with and without sequence parallelism.
"""

from __future__ import annotations

import pytest
from checkpointing.selection import is_full
from harness import BodyFailed
from parity.runs import parity

MESHES = {
    "dp2_tp2": {"dp_shard": 2, "tp": 2},
    "dp4": {"dp_shard": 4},
    "tp4": {"dp_shard": 1, "tp": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "hsdp_tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "tp2": {"dp_shard": 1, "tp": 2},
    "dp2": {"dp_shard": 2},
}
WORLD = {"hsdp_tp": 8, "tp2": 2, "dp2": 2}

# Requirements of every run of a case. TE cannot split a Linear on meta, so that attention without input norm and
# with separate projections starts on the device.
ON_DEVICE = {"origin": "device"}
FUSED = {"fuse_qkv_params": True}
STACKED = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}

#: name -> (kind, options, how); the first case of a kind is the one that runs everywhere.
CASES = {
    "column": ("linear", {"parallel_mode": "column"}, {}),
    "column_no_bias": ("linear", {"parallel_mode": "column", "bias": False}, {}),
    "row": ("linear", {"parallel_mode": "row"}, {}),
    "row_no_bias": ("linear", {"parallel_mode": "row", "bias": False}, ON_DEVICE),
    "unsplit": ("linear", {"parallel_mode": None}, {}),
    "norm_linear": ("layer_norm_linear", {}, {}),
    "norm_linear_rms_no_bias": ("layer_norm_linear", {"normalization": "RMSNorm", "bias": False}, {}),
    "mlp_swiglu": ("layer_norm_mlp", {"activation": "swiglu"}, {}),
    "mlp_gelu": ("layer_norm_mlp", {}, ON_DEVICE),
    "mlp_geglu_rms_no_bias": (
        "layer_norm_mlp",
        {"activation": "geglu", "bias": False, "normalization": "RMSNorm"},
        {},
    ),
    "mlp_checkpoint": ("layer_norm_mlp", {"checkpoint": True}, {}),
    "grouped": ("grouped_linear", {}, {}),
    "layer_norm": ("layer_norm", {}, {}),
    "rms_norm": ("rms_norm", {}, {}),
    "core_attention": ("core_attention", {}, {}),
    "core_attention_gqa": ("core_attention", {"groups": 4}, {}),
    "self_norm_split_gqa": (
        "attention",
        {"input_layernorm": True, "groups": 4},
        {"units": "LayerNormLinear"},
    ),
    "self_split": ("attention", {}, ON_DEVICE),
    "self_fused_no_bias": ("attention", {**FUSED, "bias": False}, {"units": "Linear"}),
    "self_stacked_gqa": ("attention", {**STACKED, "groups": 4}, {}),
    "self_qk_rms": ("attention", {**FUSED, "qk_norm_type": "RMSNorm", "softmax_type": "learnable"}, {}),
    "self_qk_layer_norm": (
        "attention",
        {**STACKED, "qk_norm_type": "LayerNorm", "input_layernorm": True},
        {},
    ),
    "self_recomputed": ("attention", {**FUSED, "softmax_type": "learnable", "recompute": True}, {}),
    "cross_split": ("attention", {"attention_type": "cross", "groups": 4}, ON_DEVICE),
    "cross_stacked": ("attention", {"attention_type": "cross", **STACKED, "input_layernorm": True}, {}),
    "layer": (
        "transformer_layer",
        {"normalization": "RMSNorm", "activation": "swiglu", "groups": 4, "qk_norm_type": "RMSNorm"},
        {},
    ),
    "layer_stacked_no_bias": ("transformer_layer", {**STACKED, "bias": False, "output_layernorm": True}, {}),
    "layer_parallel_mlp": ("transformer_layer", {**FUSED, "parallel_attention_mlp": True}, {}),
    "layer_decoder": ("transformer_layer", {"layer_type": "decoder"}, ON_DEVICE),
    "model": ("language_model", {"activation": "swiglu", "normalization": "RMSNorm", "groups": 4}, {}),
    "model_tied": ("language_model", {**FUSED, "tied": True, "layers": 1}, {}),
}
CUT_BY_SEQUENCE = {
    name: kind not in ("grouped_linear", "core_attention") and name != "unsplit"
    for name, (kind, _, _) in CASES.items()
}


def _first_of_kind() -> list[str]:
    seen: dict[str, str] = {}
    for name, (kind, _, _) in CASES.items():
        seen.setdefault(kind, name)
    return [*seen.values(), "row", "mlp_checkpoint", "self_qk_layer_norm"]


def _runs(full: bool) -> list:
    """Return every case on dp2 x tp2 with sequence parallelism, the first of each kind without, and other meshes.

    With `--matrix full`, and on GPUs, every case in all these ways.
    """
    runs, first = [], _first_of_kind()
    for place, (name, cut) in enumerate(CUT_BY_SEQUENCE.items()):
        if full or name in first:
            runs += [("dp2_tp2", name, parallel) for parallel in ((False, True) if cut else (False,))]
            runs += [("dp4", name, False), ("hsdp", name, False), ("tp4", name, cut and place % 2 == 0)]
        else:
            runs.append(("dp2_tp2", name, cut and place % 4 != 0))
    for place, name in enumerate(first):
        runs.append(("hsdp_tp", name, CUT_BY_SEQUENCE[name] and place % 2 == 1))
        runs.append(("dp2", name, False))
    # GroupedLinear has no bias under tensor parallelism.
    return [_param(*run) for run in runs] + [
        pytest.param(mesh, "grouped", {"bias": True}, False, id=f"{mesh}-grouped_bias")
        for mesh in ("dp4", "hsdp")
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.name == "test_training_equals_stock_te":
        runs = _runs(is_full(metafunc.config))
        metafunc.parametrize(("mesh", "case", "more", "sequence_parallel"), runs)


def _param(mesh: str, name: str, sequence_parallel: bool) -> object:
    marks = pytest.mark.ranks(WORLD.get(mesh, 4))
    return pytest.param(
        mesh, name, {}, sequence_parallel, id=f"{mesh}-{name}{'-sp' * sequence_parallel}", marks=marks
    )


def _run(pool, mesh: str, case: str, sequence_parallel: bool, more: dict | None = None, **how) -> dict:
    kind, options, usual = CASES[case]
    options = {**options, **(more or {})}
    how = {**usual, **how, "sequence_parallel": sequence_parallel}
    results = pool.run(parity, WORLD.get(mesh, 4), kind=kind, options=options, axes=MESHES[mesh], **how)
    return max(results, key=lambda result: result["worst"])


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
def test_training_equals_stock_te(pool, mesh, case, more, sequence_parallel):
    _run(pool, mesh, case, sequence_parallel, more)


@pytest.mark.covering(
    # Parameters whose gradient each tp rank has for its own part of the sequence.
    always=[{"case": "row", "sequence_parallel": True}, {"case": "norm_linear", "sequence_parallel": True}],
    strength=1,
)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "sequence_parallel"),
    [
        (case, parallel)
        for case in _first_of_kind()
        for parallel in (False, True)[: 1 + CUT_BY_SEQUENCE[case]]
    ],
)
def test_tensor_parallelism_without_fsdp(pool, case, sequence_parallel):
    """Check that set_device_mesh reduces Partial gradients, because no FSDP reduction follows."""
    _run(pool, "tp2", case, sequence_parallel, wrap="tp", units=None)


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["dp2_tp2", "hsdp"])
@pytest.mark.parametrize("case", ["mlp_swiglu", "self_qk_layer_norm", "layer", "model"])
def test_torch_fully_shard(pool, mesh, case):
    """Check set_device_mesh followed by the user's own calls of torch's fully_shard."""
    _run(pool, mesh, case, sequence_parallel="tp" in mesh, wrap="torch", units=None)


@pytest.mark.ranks(4)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("case", ["column", "mlp_swiglu", "layer", "model"])
def test_training_equals_stock_te_on_hopper(pool, case):
    _run(pool, "dp2_tp2", case, sequence_parallel=True)


# --- negative controls: a test that cannot fail proves nothing ------------------------------------------------------


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", ["te_fsdp", "tp"])
@pytest.mark.parametrize(
    ("case", "parameter", "sequence_parallel"),
    [
        ("row", "bias", True),
        ("norm_linear", "layer_norm_weight", True),
        ("mlp_gelu", "fc2_bias", True),
        ("layer_norm", "weight", True),
        ("self_qk_rms", "q_norm.weight", False),
        ("self_qk_layer_norm", "k_norm.weight", True),
        ("model", "embedding.weight", True),
    ],
)
def test_negative_control_unreduced_partial_gradients(pool, case, parameter, sequence_parallel, wrap):
    mesh = "dp2_tp2" if wrap == "te_fsdp" else "tp2"
    with pytest.raises(BodyFailed, match=rf"(?s)AssertionError.*gradient \d {parameter}: relative error"):
        _run(pool, mesh, case, sequence_parallel, wrap=wrap, units=None, drop="partial_grad")


@pytest.mark.ranks(4)
@pytest.mark.parametrize("origin", ["meta", "device"])
@pytest.mark.parametrize(
    ("case", "parameter"), [("mlp_swiglu", "fc1_weight"), ("self_stacked_gqa", "qkv.weight")]
)
def test_negative_control_stacked_layout_as_unstacked(pool, case, parameter, origin):
    with pytest.raises(BodyFailed, match=rf"(?s)AssertionError.*gradient \d {parameter}: relative error"):
        _run(pool, "dp2_tp2", case, sequence_parallel=False, drop="layout", origin=origin)
