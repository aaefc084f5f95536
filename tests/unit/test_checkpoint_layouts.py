"""Check that a load compares the row order of fused projections, since equal shapes do not imply it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError


def attention(te, *, interleaved: bool, parallel: bool, bound: bool, kind: str = "self") -> torch.nn.Module:
    module = te.MultiheadAttention(
        32,
        4,
        fuse_qkv_params=True,
        qkv_weight_interleaved=interleaved,
        set_parallel_mode=parallel,
        attention_type=kind,
        params_dtype=torch.float32,
        device="cpu",
    )
    if bound:
        te_fsdp.set_device_mesh(module)
    return module


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("saved", "here"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_load_rejects_a_different_qkv_layout(te, tmp_path: Path, kind, saved, here, parallel):
    options = {"parallel": parallel, "kind": kind}
    checkpoint.save(tmp_path / "a", attention(te, interleaved=True, bound=saved, **options))
    other = attention(te, interleaved=False, bound=here, **options)
    before = {name: p.detach().clone() for name, p in other.named_parameters()}
    with pytest.raises(CheckpointError, match=r"a different layout.*(qkv|key_value)\.weight.*stacked"):
        checkpoint.load(tmp_path / "a", other)
    assert all(torch.equal(before[name], p) for name, p in other.named_parameters())


@pytest.mark.parametrize("parallel", [True, False])
def test_load_accepts_the_same_qkv_layout(te, tmp_path: Path, parallel):
    model = attention(te, interleaved=False, parallel=parallel, bound=True)
    checkpoint.save(tmp_path / "a", model)
    other = attention(te, interleaved=False, parallel=not parallel, bound=False)
    checkpoint.load(tmp_path / "a", other)
    assert torch.equal(model.qkv.weight, other.qkv.weight)


def test_load_rejects_a_gated_fc1_for_a_plain_one(te, tmp_path: Path):
    options = {"params_dtype": torch.float32, "device": "cpu"}
    checkpoint.save(tmp_path / "a", te.LayerNormMLP(16, 16, activation="swiglu", **options))
    with pytest.raises(CheckpointError, match="fc1_weight"):
        checkpoint.load(tmp_path / "a", te.LayerNormMLP(16, 32, activation="gelu", **options))
