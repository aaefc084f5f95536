"""Test tensors whose names in the files are equal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError


def stage(layer: int, rope: float, *, persistent: bool = True) -> nn.Module:
    """Return a stage under the names of the unsplit model, with the table that all stages have."""
    torch.manual_seed(layer)
    result = nn.Module()
    result.layers = nn.ModuleDict({str(layer): nn.Linear(3, 3)})
    result.register_buffer("rope", torch.full((4,), rope), persistent=persistent)
    return result


def test_stages_with_equally_named_non_persistent_buffers_are_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", [stage(n, float(n), persistent=False) for n in (0, 1)])
    assert checkpoint.load(tmp_path / "a", [stage(n, 7.0, persistent=False) for n in (0, 1)]).is_complete


def test_stages_share_entries_listed_in_shared(tmp_path: Path) -> None:
    """Entries are stored once and loaded into each stage. Every save, also a repeated one, rejects differing copies."""
    stages, others = [stage(n, 1.0) for n in (0, 1)], [stage(n, 7.0) for n in (0, 1)]
    with pytest.raises(CheckpointError, match="repeated in the stages of one rank: rope"):
        checkpoint.save(tmp_path / "a", stages)
    checkpoint.save(tmp_path / "a", stages, shared=["ro*"])
    checkpoint.load(tmp_path / "a", others)
    assert [item.rope.tolist() for item in others] == [[1.0] * 4] * 2
    stages[1].rope[2] = 3.0
    with pytest.raises(CheckpointError, match=r"model\.rope differs between stages of one rank"):
        checkpoint.save(tmp_path / "b", stages, shared=["ro*"])
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_stages_share_a_trained_parameter_with_optimizer_state(tmp_path: Path) -> None:
    """Its optimizer state is also shared and must be equal."""

    def made(seed: int) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        torch.manual_seed(seed)
        stages, value = [nn.Module(), nn.Module()], torch.randn(3)
        for item in stages:
            item.weight = nn.Parameter(value.clone())
        return stages, torch.optim.AdamW([entry.weight for entry in stages])

    (stages, adam), (others, other_adam) = made(0), made(1)
    for one in stages:
        one.weight.grad = torch.ones(3)
    adam.step()
    checkpoint.save(tmp_path / "a", stages, adam, shared=["weight"])
    checkpoint.load(tmp_path / "a", others, other_adam)
    for one, other in zip(stages, others, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(adam.state[one.weight]["exp_avg"], other_adam.state[other.weight]["exp_avg"])
    adam.state[stages[1].weight]["exp_avg"].add_(1)
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.weight\.exp_avg differs"):
        checkpoint.save(tmp_path / "b", stages, adam, shared=["weight"])


@pytest.mark.parametrize("kind", ["dots", "compiled", "buffers", "both"])
def test_save_rejects_two_tensors_with_one_name(tmp_path: Path, kind: str) -> None:
    """Otherwise one of them would be lost without an error."""
    model = nn.Module()
    inner, name = nn.Module(), "a" if kind == "dots" else "_orig_mod"
    model.add_module(name, inner)
    if kind == "dots":
        model._parameters["a.w"] = nn.Parameter(torch.zeros(2))
    elif kind == "buffers":
        model.register_buffer("w", torch.zeros(2))
    else:
        model.w = nn.Parameter(torch.zeros(2))
    if kind in ("buffers", "both"):
        inner.register_buffer("w", torch.ones(2))
    else:
        inner.w = nn.Parameter(torch.ones(2))
    with pytest.raises(
        CheckpointError, match=r"1 name\(s\) shared by several tensors of the model: (a\.)?w:"
    ):
        checkpoint.save(tmp_path / "a", model)
    assert os.listdir(tmp_path) == []


def test_async_save_rejects_too_long_names_before_writing(tmp_path: Path) -> None:
    """Also by an asynchronous save: in the call, not in its thread."""
    with pytest.raises(CheckpointError, match="File name too long"):
        checkpoint.save(tmp_path / ("p" * 256), nn.Linear(2, 2), asynchronous=True)
    checkpoint.save(tmp_path / ("p" * 255), nn.Linear(2, 2))


def test_save_accepts_paths_with_undecodable_bytes(tmp_path: Path) -> None:
    """``os.listdir`` returns them with surrogates."""
    path, model = tmp_path / os.fsdecode(b"step-\xff"), nn.Linear(2, 2)
    checkpoint.save(path, model)
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.load(path, model).is_complete


@pytest.mark.parametrize("kind", ["parameter", "child"])
def test_plain_directories_have_names_without_wrappers(tmp_path: Path, kind: str) -> None:
    """A parameter or child called as the wrapper of ``torch.compile`` was missing, as in directories of such models."""
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        value = nn.Parameter(torch.randn(3))
        model._orig_mod = value if kind == "parameter" else nn.ParameterDict({"table": value})
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert not any(map(torch.equal, *(model.parameters() for model in models))), "the control"
    checkpoint.load(tmp_path / "a", models[1])
    assert all(map(torch.equal, *(model.parameters() for model in models)))
