"""Check that checkpoints convert to other formats or back bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from te_fsdp import checkpoint
from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.checkpoint.reader import Contents
from te_fsdp.cli import main


class Model(nn.Module):
    """fp32 and bf16, an empty and a scalar parameter, a buffer of integers, tied weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(30, 50)
        self.b = nn.Linear(50, 7).bfloat16()
        self.tied = self.a
        self.norm = nn.BatchNorm1d(50)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.randn(()))


def trained(seed: int = 0) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(seed)
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        (decay if name.endswith("weight") else rest).append((name, parameter))
    optimizer = torch.optim.AdamW([{"params": decay, "lr": 0.1}, {"params": rest, "weight_decay": 0.0}])
    (model.b(model.norm(model.a(torch.randn(4, 30))).bfloat16()).sum() * model.scale).backward()
    optimizer.step()
    return model, optimizer


def saved(path: Path, seed: int = 0) -> Path:
    model, optimizer = trained(seed)
    checkpoint.save(path, model, optimizer, extra={"step": 3, "order": torch.arange(5), "pair": (1, "x")})
    return path


def run(*words: Any, code: int = 0) -> None:
    assert main(["ckpt", *map(str, words), "--json"]) == code


def differing(a: Contents, b: Contents) -> list[str]:
    wrong = sorted(a.tensors.keys() ^ b.tensors.keys())
    for key in a.tensors.keys() & b.tensors.keys():
        left, right = a.tensors[key].full(), b.tensors[key].full()
        if left.dtype != right.dtype or not torch.equal(left, right):
            wrong.append(key)
    one, other = (dataclasses.asdict(c.manifest) for c in (a, b))
    for described in (one, other):
        del described["files"], described["save_id"]
    return wrong + [field for field in one if one[field] != other[field]]


# -------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    "way",
    [["x.safetensors"], ["x", "--to", "safetensors", "--max-shard-size", "4kB"]],
    ids=str,
)
def test_converted_checkpoint_with_everything_round_trips(
    tmp_path: Path, way: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Cover weights, optimizer, extra and descriptions. A different model loads the same training state."""
    source, between = saved(tmp_path / "a"), tmp_path / way[0]
    run("convert", source, between, *way[1:], "--everything")
    assert len(json.loads(capsys.readouterr().out)["files"]) == (7 if "4kB" in way else 1)
    run("convert", between, tmp_path / "back", "--to", "checkpoint")
    assert differing(open_any(source), open_any(tmp_path / "back")) == []
    assert differing(open_any(source), open_any(saved(tmp_path / "other", seed=1))), "the comparison can fail"
    checkpoint.verify(tmp_path / "back")

    (model, optimizer), (fresh, fresh_optimizer) = trained(), trained(seed=1)
    extra = checkpoint.load(tmp_path / "back", fresh, fresh_optimizer)
    assert extra["step"] == 3 and extra["pair"] == (1, "x") and torch.equal(extra["order"], torch.arange(5))
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(
        fresh_optimizer.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0
    )


def test_torch_reads_written_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain weights-only torch.load reads model and optimizer, memory-mapped or not."""
    model, optimizer = trained()
    checkpoint.save(tmp_path / "a", model, optimizer)
    run("convert", tmp_path / "a", tmp_path / "w.pt")
    run("convert", tmp_path / "a", tmp_path / "all.pt", "--everything")
    for mapped in (False, True):
        state = torch.load(tmp_path / "w.pt", weights_only=True, mmap=mapped)
        assert state["tied.weight"].data_ptr() == state["a.weight"].data_ptr(), "tied: stored once"
        fresh = Model(seed=1)
        fresh.load_state_dict(state)
        torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    other = trained(seed=1)[1]
    other.load_state_dict(everything["optimizer"])
    got, expected = other.state_dict(), optimizer.state_dict()
    torch.testing.assert_close(got["state"], expected["state"], rtol=0, atol=0)
    assert got["param_groups"] == expected["param_groups"]


@pytest.mark.parametrize("folder", [False, True])
def test_the_safetensors_package_reads_written_files(tmp_path: Path, folder: bool) -> None:
    package = pytest.importorskip("safetensors.torch")
    source = saved(tmp_path / "a")
    target = tmp_path / ("x" if folder else "x.safetensors")
    run("convert", source, target, "--max-shard-size", "4kB", *(["--to", "safetensors"] if folder else []))
    files = sorted(target.glob("*.safetensors")) if folder else [target]
    results = {key: tensor for file in files for key, tensor in package.load_file(file).items()}
    expected = {k: t for k, t in trained()[0].state_dict().items() if not k.startswith("tied")}
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    package.save_file(results, tmp_path / "theirs.safetensors")
    theirs = open_any(tmp_path / "theirs.safetensors")
    torch.testing.assert_close({n: theirs.value(n).full() for n in theirs.names}, expected, rtol=0, atol=0)


def test_convert_reads_state_dicts_of_training_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cover torch.save and plain DCP of a training script's dict, with strided and shared storages."""
    model, optimizer = trained()
    state = dict(model.state_dict())
    base = torch.arange(24.0)
    state |= {"view": base[4:16].view(3, 4), "turned": base.view(4, 6).t(), "same": base}
    torch.save({"model": state, "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "s.pt")
    run("convert", tmp_path / "s.pt", tmp_path / "a", "--to", "checkpoint")
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "left: optimizer, step" in notes, "optimizer state is read from DCP directories only"
    assert "tied.weight: tied to a.weight, stored once" in notes
    got = open_any(tmp_path / "a")
    assert set(got.names) == {name for name in state if not name.startswith("tied")}
    for name in got.names:
        assert torch.equal(got.value(name).full(), state[name]), name
    for name in ("tied.weight", "tied.bias"):
        del state[name]  # DCP writes two tensors, and the tie cannot be detected
    dcp.save(
        {"model": {**state, "_extra_state": torch.empty(0, dtype=torch.uint8)}},
        checkpoint_id=tmp_path / "d",
        no_dist=True,
    )
    run("convert", tmp_path / "d", tmp_path / "b", "--to", "checkpoint")
    run("diff", tmp_path / "a", tmp_path / "b", "--weights-only")

    for extra in ("view", "turned", "same"):
        del state[extra]
    torch.save({"state": {"net": state}, "optimizer": optimizer.state_dict()}, tmp_path / "deep.pt")
    run("convert", tmp_path / "deep.pt", tmp_path / "c", "--to", "checkpoint", "--key", "state.net")
    (fresh, fresh_optimizer), expected = trained(seed=1), optimizer.state_dict()["state"]
    checkpoint.load(tmp_path / "c", fresh)
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "s", no_dist=True)
    capsys.readouterr()
    run("convert", tmp_path / "s", tmp_path / "e", "--to", "checkpoint")
    assert "optimizer: taken, AdamW with 7 states" in json.loads(capsys.readouterr().out)["notes"]
    checkpoint.load(tmp_path / "e", fresh, fresh_optimizer, strict=False)
    torch.testing.assert_close(fresh_optimizer.state_dict()["state"], expected, rtol=0, atol=0)


def test_convert_skips_an_optimizer_without_parameter_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """States are never matched by order, which DCP does not keep. Optimizers in torch.save files are not read."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for name, parameters, note in (
        ("named", model.named_parameters(), "optimizer: taken, SGD with 4 states"),
        ("one", model.parameters(), "optimizer: left, it numbers its parameters without names"),
        ("few", [model[0].weight], "optimizer: left, it numbers its parameters without names"),
    ):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / f"{name}-plain", no_dist=True)
        run("convert", tmp_path / f"{name}-plain", tmp_path / name, "--to", "checkpoint")
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert any(text.startswith(note) for text in notes), notes
        assert (open_any(tmp_path / name).manifest.optimizer is not None) == (name == "named")


def test_dtype_applies_to_parameters_only(tmp_path: Path) -> None:
    run("convert", saved(tmp_path / "a"), tmp_path / "b", "--to", "checkpoint", "--dtype", "bfloat16")
    got, model = open_any(tmp_path / "b"), trained()[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(got.value(name).full(), parameter.detach().bfloat16()), name
    assert got.value("norm.running_var").dtype == torch.float32
    assert got.tensors["optimizer.state.a.weight.exp_avg"].dtype == torch.float32
