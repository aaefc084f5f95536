"""Test loads that convert a checkpoint, in one process without TransformerEngine."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0, more: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6, dtype=dtype)
        self.second = nn.Linear(6, 5, dtype=dtype)
        self.register_buffer("mean", torch.randn(3, dtype=dtype))
        self.register_buffer("count", torch.tensor(seed))
        if more:
            self.more = nn.Linear(5, 5, dtype=dtype)


def adam(model: nn.Module, steps: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        train(model, optimizer)
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("saved", "here"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_load_casts_to_the_dtype_of_the_model(tmp_path: Path, caplog, saved, here, used):
    """Weights, buffers and moments are cast once, to the dtypes that the optimizer itself would use."""
    model = Model(saved)
    optimizer = adam(model, 2)
    checkpoint.save(tmp_path / "a", model, optimizer)
    other = Model(here, seed=1)
    other_optimizer = adam(other, 3 * used)
    with caplog.at_level(logging.WARNING, "te_fsdp"):
        loaded = checkpoint.load(tmp_path / "a", other, other_optimizer)
    names = {"first.weight", "first.bias", "second.weight", "second.bias", "mean"}
    assert names <= set(loaded.converted) and not loaded.left and loaded.is_complete
    assert "tensor(s) converted (first.bias: " in caplog.text
    expected = {k: v.to(here) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    torch.testing.assert_close(other.state_dict(), expected, rtol=0, atol=0)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        then, now = optimizer.state[ours], other_optimizer.state[theirs]
        assert torch.equal(now["exp_avg"], then["exp_avg"].to(here)) and now["exp_avg"].dtype == here
        assert now["step"] == 2
    train(other, other_optimizer)
    with pytest.raises(CheckpointError, match=r"that would be converted \(first.bias: "):
        checkpoint.load(tmp_path / "a", other, other_optimizer, convert=False)


def test_load_does_not_cast_integers(tmp_path: Path):
    model, other = Model(), Model(seed=1)
    checkpoint.save(tmp_path / "a", model)
    other.count = other.count.float()
    with pytest.raises(
        CheckpointError, match=r"1 with a different dtype \(count: saved int64, model has float32\)"
    ):
        checkpoint.load(tmp_path / "a", other)
    assert list(checkpoint.load(tmp_path / "a", other, allow="count").left) == ["count"]
    assert other.count == 1 and torch.equal(other.mean, model.mean)


def test_allow_skips_parameters_that_the_model_does_not_have(tmp_path: Path):
    model, other = Model(more=True), Model(seed=1)
    checkpoint.save(tmp_path / "a", model, adam(model, 1))
    with pytest.raises(CheckpointError, match="2 only in the checkpoint"):
        checkpoint.load(tmp_path / "a", other, adam(other))
    optimizer = adam(other)
    loaded = checkpoint.load(tmp_path / "a", other, optimizer, allow=["more.*"])
    assert set(loaded.left) == {
        "more.bias",
        "more.weight",
        "optimizer.state.more.bias",
        "optimizer.state.more.weight",
    }
    assert not loaded.is_complete
    assert torch.equal(other.first.weight, model.first.weight)
    assert len(optimizer.state) == 4 and all(state["step"] == 1 for state in optimizer.state.values())


def test_allow_skips_the_optimizer(tmp_path: Path):
    model, other = Model(), Model(seed=1)
    checkpoint.save(tmp_path / "a", model, adam(model, 1))
    momentum = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    with pytest.raises(CheckpointError, match="optimizer: saved AdamW, this one is SGD"):
        checkpoint.load(tmp_path / "a", other, momentum, allow=["first.*"])
    loaded = checkpoint.load(tmp_path / "a", other, momentum, allow=["optimizer"])
    assert loaded.left == {"optimizer": "optimizer: saved AdamW, this one is SGD"}
    assert not momentum.state and momentum.param_groups[0]["lr"] == 0.5
    assert torch.equal(other.first.weight, model.first.weight)


def test_allow_patterns_without_matches_have_no_effect(tmp_path: Path):
    model, other = Model(), Model(more=True)
    checkpoint.save(tmp_path / "a", model)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"2 missing in the checkpoint \(more.bias, more.weight\)"):
        checkpoint.load(tmp_path / "a", other, allow=["More.*", "more"])
    torch.testing.assert_close(other.state_dict(), before, rtol=0, atol=0)
