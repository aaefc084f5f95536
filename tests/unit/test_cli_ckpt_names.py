"""Check that files written by `convert` can be loaded if only the model determines the names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from te_fsdp import checkpoint
from te_fsdp.checkpoint.lazy_tensors import InMemory
from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.cli import ckpt, main
from te_fsdp.errors import CheckpointError

safetensors = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """The head's name is the first in the alphabet, the embedding's the first in the model."""

    def __init__(self, seed: int, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(11, 6)
        self.a, self.b = nn.LayerNorm(6), nn.LayerNorm(6)  # equal, and not tied
        self.head = nn.Linear(6, 11, bias=False)
        if tie:
            self.head.weight = self.wte.weight


class Numbered(nn.Module):
    """A plain module whose parameters have the names of TE's experts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.sums = nn.Module()
        for index in range(3):
            self.sums.register_parameter(f"weight{index}", nn.Parameter(torch.randn(4, 5)))


def experts(te: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential()
    model.add_module("experts", te.GroupedLinear(4, 16, 32, device="cpu"))
    model.add_module("out", te.Linear(32, 16, device="cpu"))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in copies(model).items() if not name.endswith("_extra_state")}


WRITERS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "dcp": lambda model, path: dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True),
    "dcp_bare": lambda model, path: dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True),
    "a.pt": lambda model, path: torch.save(model.state_dict(), path),
    "copies.pt": lambda model, path: torch.save(copies(model), path),
    "copies.safetensors": lambda model, path: safetensors.save_file(copies(model), path),
    "weights.safetensors": lambda model, path: safetensors.save_file(weights(model), path),
    "model.safetensors": lambda model, path: safetensors.save_model(model, str(path)),
    "te_fsdp": lambda model, path: checkpoint.save(path, model),
}


def convert(source: Path, target: Path, *more: str) -> int:
    return main(["ckpt", "convert", str(source), str(target), *more])


@pytest.mark.parametrize("through", [None, "b.pt", "b.safetensors"])
@pytest.mark.parametrize("source", WRITERS)
@pytest.mark.parametrize("kind", ["tied", "numbered", "experts"])
def test_converted_files_can_be_loaded(
    tmp_path: Path, te: Any, kind: str, source: str, through: str | None
) -> None:
    """Cover names that are ambiguous in the files, for every source and one or two conversions, by value."""
    make = {"tied": Tied, "numbered": Numbered, "experts": lambda seed: experts(te, seed)}[kind]
    model, other = make(0), make(1)
    WRITERS[source](model, tmp_path / source)
    at = tmp_path / source
    if through is not None:
        assert convert(at, tmp_path / through) == 0
        at = tmp_path / through
    assert convert(at, tmp_path / "c", "--to", "checkpoint") == 0
    expected = weights(model)
    before = weights(other)
    assert any(not torch.equal(before[name], expected[name]) for name in expected), "the control"
    checkpoint.load(tmp_path / "c", other)
    result = weights(other)
    assert result.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(result[name], expected[name])] == []
    if kind == "tied":
        assert other.head.weight is other.wte.weight


@pytest.mark.parametrize("source", ["dcp", "copies.pt", "copies.safetensors"])
def test_tied_names_with_different_values_are_rejected(tmp_path: Path, source: str) -> None:
    """Control: two different tensors are not ties, so a model with ties rejects them."""
    WRITERS[source](Tied(0, tie=False), tmp_path / source)
    assert convert(tmp_path / source, tmp_path / "c", "--to", "checkpoint") == 0
    model = Tied(1)
    before = weights(model)
    with pytest.raises(CheckpointError, match=r"head\.weight: tied to wte\.weight in this model, but"):
        checkpoint.load(tmp_path / "c", model)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    untied = Tied(1, tie=False)
    checkpoint.load(tmp_path / "c", untied)
    expected = weights(Tied(0, tie=False))
    assert all(torch.equal(value, expected[name]) for name, value in weights(untied).items())


def test_untied_weights_with_equal_values_stay_untied(tmp_path: Path) -> None:
    """Weights that `save` wrote untied do not become tied because their values happen to be equal."""
    model = Tied(0, tie=False)
    with torch.no_grad():
        model.head.weight.copy_(model.wte.weight)
    checkpoint.save(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match=r"1 only in the checkpoint \(head\.weight\)"):
        checkpoint.load(tmp_path / "c", Tied(1))


@pytest.mark.parametrize("kind", ["tied", "numbered", "experts"])
def test_converted_optimizer_state_keeps_its_parameter_names(tmp_path: Path, te: Any, kind: str) -> None:
    """Moments of tied tensors and experts survive a plain directory, `convert` and `load`."""
    make = {"tied": Tied, "numbered": Numbered, "experts": lambda seed: experts(te, seed)}[kind]
    model, other = make(0), make(1)
    first, second = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, other))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    first.step()
    state, options = get_state_dict(model, first)
    state = {name: value for name, value in state.items() if kind != "experts" or value is not None}
    dcp.save({"model": state, "optimizer": options}, checkpoint_id=tmp_path / "d", no_dist=True)
    assert convert(tmp_path / "d", tmp_path / "c", "--to", "checkpoint") == 0
    checkpoint.load(tmp_path / "c", other, second)
    pairs = [*zip(model.parameters(), other.parameters(), strict=True)]
    assert pairs and all(torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(first.state[a][key], second.state[b][key]), key


@pytest.mark.parametrize("target", ["c", "c.pt", "c.safetensors"])
@pytest.mark.parametrize("force", [False, True])
def test_convert_verifies_written_files(
    tmp_path: Path, target: str, force: bool, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """A wrong target exits with status 1. With --force the previous target is kept, otherwise none is left."""
    torch.save(Tied(0).state_dict(), tmp_path / "a.pt")
    arguments = ["--to", "checkpoint"] if target == "c" else []
    if force:
        assert convert(tmp_path / "a.pt", tmp_path / target, *arguments) == 0, "the control"
        arguments.append("--force")
    for writer in ("write_checkpoint", "write_pt", "write_safetensors"):
        right = getattr(ckpt, writer)

        def wrong(place: Path, contents: Any, *args: Any, right=right, **kwargs: Any) -> list[str]:
            lost = {**contents.tensors, "model.a.weight": InMemory(torch.zeros(5))}
            about = {**contents.manifest.parameters["a.weight"], "shape": [5]}
            parameters = {**contents.manifest.parameters, "a.weight": about}
            manifest = replace(contents.manifest, parameters=parameters)
            return right(place, replace(contents, tensors=lost, manifest=manifest), *args, **kwargs)

        monkeypatch.setattr(ckpt, writer, wrong)
    assert convert(tmp_path / "a.pt", tmp_path / target, *arguments) == 1
    error = capsys.readouterr().err
    assert "1 tensor(s) differ from the source: model.a.weight" in error
    assert force == (tmp_path / target).exists()
    if force:
        monkeypatch.undo()
        one, other = (open_any(tmp_path / name) for name in ("a.pt", target))
        assert one.names == other.names
        assert all(torch.equal(one.value(name).full(), other.value(name).full()) for name in one.names)


def test_diff_compares_a_tied_weight_that_the_other_stores_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies in a ``torch.save`` file, or in a plain DCP directory, do not show that they were tied."""
    model = Tied(seed=0)
    checkpoint.save(tmp_path / "tied", model)
    for name, change in (("same", 0.0), ("other", 1.0)):
        state = copies(model)
        state["head.weight"] += change
        torch.save(state, tmp_path / f"{name}.pt")
        convert = [
            "ckpt",
            "convert",
            str(tmp_path / f"{name}.pt"),
            str(tmp_path / name),
            "--to",
            "checkpoint",
        ]
        assert main(convert) == 0
        for pair in (("tied", name), (name, "tied")):
            paths = [str(tmp_path / one) for one in pair]
            capsys.readouterr()
            assert main(["ckpt", "diff", *paths, "--weights-only", "--strict"]) == int(change)
            printed = capsys.readouterr().out
            assert f"{6 if not change else 5} of 6 tensors equal" in printed and "only in" not in printed
