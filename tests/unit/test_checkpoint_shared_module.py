"""Test a module that is registered under two names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint.manifest import Manifest


@pytest.mark.parametrize("kind", ["plain", "ours"])
def test_delayed_scaling_state_of_a_shared_module_loads(te: Any, tmp_path: Path, kind: str) -> None:
    """A plain state dict contains its state under both names. Bug class: rejected as state of an unknown module."""
    from transformer_engine.common.recipe import DelayedScaling

    def model() -> nn.Module:
        result = nn.Module()
        with te.quantized_model_init(recipe=DelayedScaling()):
            result.first = result.second = te.Linear(32, 32, device="cpu")
        with te.autocast(recipe=DelayedScaling()):
            result.first(torch.randn(32, 32, dtype=result.first.weight.dtype)).sum().backward()
        return result

    torch.manual_seed(1)
    saved, target = model(), model()
    if kind == "plain":
        dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        checkpoint.save(tmp_path / "a", saved)
        assert [*Manifest.read(tmp_path / "a").delayed] == ["first"]
    weights = [item.first.weight.dequantize() for item in (saved, target)]
    assert not torch.equal(*weights)
    checkpoint.load(tmp_path / "a", target)
    assert torch.equal(saved.first.weight.dequantize(), target.first.weight.dequantize())
    states = [item.first.fp8_meta["scaling_fwd"] for item in (saved, target)]
    assert states[0].amax_history.any() and torch.equal(states[0].amax_history, states[1].amax_history)
