"""Test expert layers in one process: every file format stores one tensor for all experts."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from te_fsdp import checkpoint, emulation
from te_fsdp.checkpoint.lazy_tensors import load_weights_only
from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError

EXPERTS, HIDDEN, FFN = 4, 64, 128


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "none": lambda: None,
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }[name]()


class Run:
    """Experts and a linear layer with an optimizer. Expert 2 gets no tokens, expert 1 no gradient."""

    def __init__(self, te: Any, recipe: str, *, seed: int, experts: int = EXPERTS) -> None:
        torch.manual_seed(seed)
        self.te, self.recipe, self.experts = te, recipe_of(recipe), experts
        dtype = torch.float32 if recipe == "none" else torch.bfloat16
        quantized = te.quantized_model_init(recipe=self.recipe) if self.recipe else contextlib.nullcontext()
        with quantized:
            layer = te.GroupedLinear(experts, HIDDEN, FFN, params_dtype=dtype, device="cpu")
        self.model = nn.Sequential()
        self.model.add_module("experts", layer)
        self.model.add_module("out", nn.Linear(FFN, 32, dtype=dtype))
        if recipe == "none":
            self.optimizer: Any = torch.optim.AdamW(self.model.named_parameters(), lr=1e-2)
        else:
            self.optimizer = te.optimizers.FusedAdam(self.model.parameters(), lr=1e-2, master_weights=True)

    def output(self) -> torch.Tensor:
        x = torch.randn(96, HIDDEN, generator=torch.Generator().manual_seed(3)).to(
            self.model.out.weight.dtype
        )
        splits = [32, 32, 0, 32] + [0] * (self.experts - EXPERTS)
        with self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.model.out(self.model.experts(x, splits))

    def step(self) -> Run:
        self.output().float().pow(2).mean().backward()
        self.model.experts.weight1.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, torch.Tensor]:
        results = {}
        for name, parameter in self.model.named_parameters():
            results[name] = parameter.dequantize().detach()
            states = self.optimizer.state.get(parameter, {}).items()
            results |= {f"{name}.{key}": value for key, value in states}
        return {name: value.clone() for name, value in results.items()}


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    return sorted((a.keys() ^ b.keys()) | {n for n in a.keys() & b.keys() if not torch.equal(a[n], b[n])})


@pytest.fixture
def recipe(request: pytest.FixtureRequest, te: Any) -> Any:
    """Name of a recipe, on an architecture that has it."""
    emulation.switch_arch("9.0" if request.param == "block" else "10.0")
    yield request.param
    emulation.switch_arch("10.0")


@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8"], indirect=True)
def test_experts_are_stored_as_one_tensor_and_round_trip(te: Any, recipe: str, tmp_path: Path) -> None:
    """Weights, optimizer state of some experts, delayed-scaling state and the next output are bitwise equal."""
    run = Run(te, recipe, seed=0).step().step()
    checkpoint.save(tmp_path / "c", run.model, run.optimizer)
    manifest = json.loads((tmp_path / "c" / "te_fsdp.json").read_text())
    described = manifest["parameters"]
    assert sorted(described) == ["experts.bias", "experts.weight", "out.bias", "out.weight"]
    assert described["experts.weight"]["shape"] == [EXPERTS, FFN, HIDDEN]
    assert described["experts.bias"]["shape"] == [EXPERTS, FFN]
    assert {described[f"experts.{name}"]["layout"] for name in ("weight", "bias")} == {"grouped"}
    if recipe == "none":
        states = manifest["optimizer"]["state"]["experts.weight"]
        assert states["step"] == {"shape": [4], "dtype": "float32", "scalar": True, "experts": [0, 2, 3]}
        assert states["exp_avg"]["experts"] == [0, 2, 3] and states["exp_avg"]["shape"] == [4, FFN, HIDDEN]
    other = Run(te, recipe, seed=1)
    assert len(differing(run.state(), other.state())) >= 10, "the control: before the load they differ"
    loaded = checkpoint.load(tmp_path / "c", other.model, other.optimizer)
    assert loaded.is_complete and not loaded.converted and not loaded.notes
    assert differing(run.state(), other.state()) == []
    assert torch.equal(run.output(), other.output())
    full = open_any(tmp_path / "c").value("experts.weight").full()
    assert torch.equal(full, torch.stack([run.state()[f"experts.weight{i}"] for i in range(EXPERTS)]))


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"], indirect=True)
def test_te_state_dicts_of_experts_convert_to_one_tensor_and_back(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TE's weight0, weight1, ... in torch.save files and plain DCP directories become one tensor and convert back."""
    run = Run(te, recipe, seed=0).step().step()
    checkpoint.save(tmp_path / "ours", run.model, run.optimizer)
    torch.save({"model": run.model.state_dict()}, tmp_path / "te.pt")
    assert (
        main(["ckpt", "convert", str(tmp_path / "te.pt"), str(tmp_path / "converted"), "--to", "checkpoint"])
        == 0
    )
    args = ["diff", str(tmp_path / "ours"), str(tmp_path / "converted"), "--strict", "--weights-only"]
    assert main(["ckpt", *args]) == 0
    delayed = [open_any(tmp_path / name).manifest.delayed for name in ("ours", "converted")]
    assert delayed[0] == delayed[1] and bool(delayed[0]) == (recipe == "delayed")
    if recipe != "delayed":  # DCP's own code cannot flatten its state
        model, states = get_state_dict(run.model, run.optimizer)
        dcp.save({"model": model, "optimizer": states}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        other = Run(te, recipe, seed=1)
        loaded = checkpoint.load(tmp_path / "dcp", other.model, other.optimizer)
        assert differing(run.state(), other.state()) == []
        assert "experts: the weights of 1 layer(s) taken as one tensor each" in loaded.notes

    back = ["ckpt", "convert", str(tmp_path / "ours"), str(tmp_path / "back.pt")]
    assert main(back) == 0
    written = torch.load(tmp_path / "back.pt", weights_only=True)
    assert [n for n in written if n.startswith("experts.w")] == [f"experts.weight{i}" for i in range(4)]
    if recipe == "none":
        other = Run(te, recipe, seed=1)
        other.model.load_state_dict(written)
        assert torch.equal(run.output(), other.output())
    assert main([*back[:-1], str(tmp_path / "all.pt"), "--everything"]) == 0
    optimizer = torch.load(tmp_path / "all.pt", weights_only=True)["optimizer"]
    assert optimizer["param_groups"][0]["param_names"] == [name for name, _ in run.model.named_parameters()]
    other = Run(te, recipe, seed=1)
    other.optimizer.load_state_dict(optimizer)
    states = [{n: t for n, t in r.state().items() if n.count(".") == 2} for r in (run, other)]
    assert differing(*states) == [] and len(states[0]) >= 16, "each expert has its own state"
    again = str(tmp_path / "again")
    assert main(["ckpt", "convert", str(tmp_path / "back.pt"), again, "--to", "checkpoint"]) == 0
    assert main(["ckpt", "diff", str(tmp_path / "ours"), again, "--weights-only"]) == 0
    capsys.readouterr()


def test_load_names_differences_of_experts(te: Any, tmp_path: Path) -> None:
    """Errors name a different number of experts, experts in several param groups, and differing experts."""
    run = Run(te, "none", seed=0).step()
    checkpoint.save(tmp_path / "c", run.model, run.optimizer)
    with pytest.raises(
        CheckpointError, match=r"experts\.weight: saved \(4, 128, 64\) of 4 experts, model has"
    ) as e:
        checkpoint.load(tmp_path / "c", Run(te, "none", seed=0, experts=6).model)
    assert "(6, 128, 64) of 6 experts" in str(e.value)
    parts = [p for n, p in run.model.named_parameters() if n == "experts.weight2"]
    rest = [p for n, p in run.model.named_parameters() if n != "experts.weight2"]
    split = torch.optim.AdamW([{"params": rest}, {"params": parts, "lr": 1.0}])
    with pytest.raises(CheckpointError, match=r"experts of experts\.weight in the groups 0 and 1"):
        checkpoint.save(tmp_path / "d", run.model, split)
    run.model.experts.weight3 = nn.Parameter(run.model.experts.weight3.detach().half())
    with pytest.raises(
        CheckpointError, match=r"experts\.weight3 differs from the tensors of the other experts"
    ):
        checkpoint.save(tmp_path / "d", run.model)


def test_documented_script_reads_experts_with_plain_dcp(te: Any, tmp_path: Path) -> None:
    """Run the unchanged block of docs/checkpoints.md with plain DCP. `weight3` is `[3]` of the stored tensor."""
    run = Run(te, "none", seed=0).step()
    checkpoint.save(tmp_path / "a", run.model, run.optimizer)
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    (block,) = (
        b for b in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "FileSystemReader" in b
    )
    names: dict[str, Any] = {"path": tmp_path / "a", "torch": torch}
    exec(block, names)
    weights, expected = names["weights"], {n: p.detach() for n, p in run.model.named_parameters()}
    for kind in ("weight", "bias"):
        for expert in range(EXPERTS):
            value = weights[f"model.experts.{kind}"][expert]
            assert torch.equal(value, expected[f"experts.{kind}{expert}"]), (kind, expert)
    # The rest, and optimizer states, by the names of the model.
    own = {
        "model": {"out.weight": torch.zeros(32, FFN)},
        "optimizer": {"state": {"out.weight": {"exp_avg": torch.zeros(32, FFN)}}},
    }
    dcp.load(own, checkpoint_id=tmp_path / "a", no_dist=True)
    assert torch.equal(own["model"]["out.weight"], expected["out.weight"])
    moment = run.optimizer.state[run.model.out.weight]["exp_avg"]
    assert torch.equal(own["optimizer"]["state"]["out.weight"]["exp_avg"], moment) and moment.any()


class _ByName:
    """Pickled as Python 3.11.0 to 3.11.4 pickle the member of an enum: getattr(owner, name)."""

    def __init__(self, owner: Any, name: str) -> None:
        self.named = owner, name

    def __reduce__(self) -> Any:
        return getattr, self.named


def test_weights_only_load_resolves_enum_members_by_name_only(te: Any, tmp_path: Path) -> None:
    """TE's tensors contain enum members. getattr of any other object is rejected because it could reach code."""
    import transformer_engine_torch as tex

    torch.save({"a": _ByName(tex.DType, "kFloat8E4M3")}, tmp_path / "a.pt")
    assert load_weights_only(tmp_path / "a.pt", "a") == {"a": tex.DType.kFloat8E4M3}
    torch.save({"a": _ByName(torch.Tensor, "__init__")}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match="cannot be read weights-only"):
        load_weights_only(tmp_path / "b.pt", "b")


@pytest.mark.parametrize("recipe", ["current", "mxfp8"], indirect=True)
def test_single_quantized_expert_of_a_plain_directory_is_dequantized(
    te: Any, recipe: str, tmp_path: Path
) -> None:
    """A module with one parameter for all experts has one, which DCP writes as one piece."""
    weight = Run(te, recipe, seed=0).model.experts.weight0.detach()
    dcp.save({"experts.weight": weight.view(1, FFN, HIDDEN)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert main(["ckpt", "convert", str(tmp_path / "dcp"), str(tmp_path / "c"), "--to", "checkpoint"]) == 0
    assert main(["ckpt", "verify", str(tmp_path / "c")]) == 0
    full = open_any(tmp_path / "c").value("experts.weight").full()
    assert full.shape == (1, FFN, HIDDEN) and torch.equal(full[0], weight.dequantize())
