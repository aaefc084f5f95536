"""Round-trip state dicts of stock TransformerEngine through te_fsdp checkpoints with the emulated TE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import te_fsdp
from te_fsdp import checkpoint, emulation
from te_fsdp.checkpoint.portable.convert import open_any
from te_fsdp.cli import main
from te_fsdp.features.main_weights import main_weight
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.te_modules import read_extra_state

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ["delayed", "current", "block", "mxfp8", "nvfp4"]
#: Format in the manifest, and what an element of it is.
FORMATS = {
    "delayed": "float8 delayed kFloat8E4M3",
    "current": "float8 kFloat8E4M3",  # state dicts record delayed scaling only
    "block": "float8-block kFloat8E4M3",
    "mxfp8": "mxfp8 kFloat8E4M3",
    "nvfp4": "nvfp4 kFloat4E2M1",
}


def recipe_of(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "none": lambda: None,
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
    }[name]()


class Model(nn.Module):
    """A gated MLP and a linear layer of TE, and an embedding of torch."""

    def __init__(self, te: Any, recipe: str, *, quantized: bool = True, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.te, self.recipe = te, recipe_of(recipe)
        self.embedding = nn.Embedding(16, 256, dtype=torch.bfloat16)
        with te.quantized_model_init(enabled=quantized and recipe != "none", recipe=self.recipe):
            self.mlp = te.LayerNormMLP(256, 128, activation="swiglu", params_dtype=torch.bfloat16)
            self.head = te.Linear(256, 128, params_dtype=torch.bfloat16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with self.te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.head(self.mlp(self.embedding(ids)))


IDS = torch.arange(128) % 16


@pytest.fixture
def recipe(request: pytest.FixtureRequest, te: Any) -> Any:
    """Name of a recipe, on an architecture that has it."""
    emulation.switch_arch("9.0" if request.param == "block" else "10.0")
    yield request.param
    emulation.switch_arch("10.0")


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["ckpt", *map(str, words), "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


def buffers(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a checkpoint's data of a parameter."""
    from te_fsdp.quantized.components import components_of

    if not _te.is_quantized(tensor):
        return {"": tensor.detach()}
    return {part.name: part.tensor for part in components_of(tensor, "weight")}


def differing(a: nn.Module, b: nn.Module) -> list[str]:
    """Return names of parameters whose bytes, scales included, differ."""
    others = dict(b.named_parameters())
    wrong = []
    for name, parameter in a.named_parameters():
        left, right = buffers(parameter), buffers(others[name])
        if left.keys() != right.keys() or not all(torch.equal(left[k], right[k]) for k in left):
            wrong.append(name)
    return wrong


def trained(te: Any, recipe: str, **kwargs: Any) -> Model:
    """Run a forward and a backward, so that TE has created its state."""
    model = Model(te, recipe, **kwargs)
    model(IDS).sum().backward()
    return model


@pytest.mark.parametrize("recipe", RECIPES, indirect=True)
@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_quantized_te_state_dict_round_trips(
    te: Any, recipe: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes, scales and delayed-scaling state are unchanged, and the next outputs are equal."""
    model = trained(te, recipe)
    state = model.state_dict()
    if kind == "dcp":
        dcp.save({"model": state}, checkpoint_id=tmp_path / "s", no_dist=True)
    torch.save(state, tmp_path / "s.pt")
    said = run(
        capsys, "convert", tmp_path / ("s" if kind == "dcp" else "s.pt"), tmp_path / "c", "--to", "checkpoint"
    )
    assert {t["name"]: t["from"] for t in said["tensors"]}["mlp.fc1_weight"] == "quantized"
    contents = open_any(tmp_path / "c")
    assert contents.manifest.parameters["head.weight"]["format"] == FORMATS[recipe]
    for name in ("head.weight", "mlp.fc1_weight", "mlp.fc2_weight"):
        weight = model.get_parameter(name)
        assert torch.equal(contents.value(name).full(), weight.dequantize()), f"{name}: dequantize() of TE"
        blocks = [contents.value(name).rows(*block) for block in contents.value(name).blocks(10_000)]
        assert len(blocks) > 1 and torch.equal(torch.cat(blocks), weight.dequantize())

    other = Model(te, recipe, seed=1)
    assert len(differing(model, other)) >= 4, "the control: without the load they differ"
    checkpoint.load(tmp_path / "c", other)
    assert differing(model, other) == []
    torch.manual_seed(5)  # NVFP4 rounds at random
    outputs = model(IDS)
    torch.manual_seed(5)
    assert torch.equal(other(IDS), outputs)


@pytest.mark.parametrize("recipe", ["delayed"], indirect=True)
def test_te_delayed_scaling_state_is_read_from_state_dicts(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The state equals TE's own. Outputs differ without it. TE's older entries are supported."""
    model = trained(te, recipe, quantized=False)
    state = model.state_dict()
    described, tensors = read_extra_state(state["mlp._extra_state"].numpy().tobytes(), "mlp._extra_state")
    live = model.mlp.fp8_meta
    assert torch.equal(tensors["scaling_fwd.amax_history"], live["scaling_fwd"].amax_history)
    assert torch.equal(tensors["scaling_bwd.scale"], live["scaling_bwd"].scale)
    assert (
        described["num_gemms"] == 2
        and described["amax_history_len"] == 4
        and described["fp8_format"] == "HYBRID"
    )
    torch.save(state, tmp_path / "s.pt")
    notes = run(capsys, "convert", tmp_path / "s.pt", tmp_path / "c", "--to", "checkpoint")["notes"]
    assert "delayed-scaling state: taken from TransformerEngine's _extra_state of 2 module(s)" in notes
    run(capsys, "convert", tmp_path / "s.pt", tmp_path / "d", "--to", "checkpoint", "--extra-state", "drop")
    with_state, without = Model(te, recipe, quantized=False), Model(te, recipe, quantized=False)
    checkpoint.load(tmp_path / "c", with_state)
    checkpoint.load(tmp_path / "d", without)
    outputs = model(IDS)
    assert torch.equal(with_state(IDS), outputs)
    assert not torch.equal(without(IDS), outputs), "the control: amax histories matter"


@pytest.mark.parametrize("recipe", ["delayed"], indirect=True)
def test_delayed_weights_without_extra_state_keep_their_bytes(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TE's tensors do not record delayed scaling, so that a load took them for current scaling and rounded again."""
    model = trained(te, recipe)
    torch.save({k: v for k, v in model.state_dict().items() if "_extra_state" not in k}, tmp_path / "s.pt")
    run(capsys, "convert", tmp_path / "s.pt", tmp_path / "c", "--to", "checkpoint")
    shown = {item["name"]: item["format"] for item in run(capsys, "inspect", tmp_path / "s.pt")["parameters"]}
    assert shown["head.weight"] == "float8 kFloat8E4M3", "the file does not record the scaling"
    other = Model(te, recipe, seed=1)
    assert len(differing(model, other)) >= 4, "the control: without the load they differ"
    loaded = checkpoint.load(tmp_path / "c", other)
    assert differing(model, other) == [] and not loaded.converted


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("recipe", ["delayed"], indirect=True)
def test_delayed_scaling_state_of_a_bound_model_round_trips(
    te: Any, recipe: str, quantized: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bound model's state dict contains tensors instead of TE's pickle. Quantized weights have a load condition."""
    model = trained(te, recipe, quantized=quantized)
    te_fsdp.set_device_mesh(model)
    torch.save(model.state_dict(), tmp_path / "s.pt")
    run(capsys, "convert", tmp_path / "s.pt", tmp_path / "c", "--to", "checkpoint")
    run(capsys, "convert", tmp_path / "s.pt", tmp_path / "d", "--to", "checkpoint", "--extra-state", "drop")
    with_state, without = (Model(te, recipe, quantized=quantized) for _ in range(2))
    checkpoint.load(tmp_path / "c", with_state)
    checkpoint.load(tmp_path / "d", without)
    live = [m.mlp.fp8_meta["scaling_fwd"].amax_history for m in (model, with_state)]
    assert torch.equal(*live) and live[0].any()
    assert "scaling_fwd" not in without.mlp.fp8_meta or not torch.equal(
        without.mlp.fp8_meta["scaling_fwd"].amax_history, live[0]
    )
    outputs = model(IDS)
    assert torch.equal(with_state(IDS), outputs)


@pytest.mark.parametrize("recipe", ["none", "current", "mxfp8"], indirect=True)
def test_a_stock_model_loads_written_files(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Strict load_state_dict of stock TE gives equal outputs. Quantized weights are stored in high precision."""
    model = trained(te, recipe)
    checkpoint.save(tmp_path / "c", model)
    run(capsys, "convert", tmp_path / "c", tmp_path / "s.pt")
    state = torch.load(tmp_path / "s.pt", weights_only=True)
    stock = Model(te, "none", seed=1)
    assert not torch.equal(stock(IDS), model(IDS))
    stock.load_state_dict(state)
    if recipe == "none":
        assert torch.equal(stock(IDS), model(IDS))
    else:
        for name, parameter in stock.named_parameters():
            weight = model.get_parameter(name)
            value = weight.dequantize() if _te.is_quantized(weight) else weight
            assert torch.equal(parameter, value), name
    run(capsys, "convert", tmp_path / "s.pt", tmp_path / "back", "--to", "checkpoint")
    assert main(["ckpt", "diff", str(tmp_path / "c"), str(tmp_path / "back"), "--weights-only"]) == 0


@pytest.mark.parametrize("recipe", ["current", "mxfp8"], indirect=True)
def test_quantized_components_round_trip_through_safetensors(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, way = trained(te, recipe), "x.safetensors"
    checkpoint.save(tmp_path / "c", model)
    run(capsys, "convert", tmp_path / "c", tmp_path / way, "--quantized", "keep", "--everything")
    run(capsys, "convert", tmp_path / way, tmp_path / "back", "--to", "checkpoint")
    other = Model(te, recipe, seed=1)
    checkpoint.load(tmp_path / "back", other)
    assert differing(model, other) == []


@pytest.mark.parametrize("recipe", ["current", "mxfp8"], indirect=True)
def test_quantized_components_without_formats_are_rejected(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such components can neither be loaded nor exported as bf16 weights."""
    checkpoint.save(tmp_path / "c", trained(te, recipe))
    run(capsys, "convert", tmp_path / "c", tmp_path / "x.pt", "--quantized", "keep")
    for command, target in ((["convert", "--to", "checkpoint"], "back"), (["export"], "bf16")):
        assert main(["ckpt", command[0], str(tmp_path / "x.pt"), str(tmp_path / target), *command[1:]]) == 1
        assert "expected a source that records their formats" in capsys.readouterr().err
        assert not (tmp_path / target).exists()


@pytest.mark.parametrize("recipe", ["current", "mxfp8"], indirect=True)
def test_components_of_experts_are_written_by_torch_save(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names of the weights of single experts counted as differences from the source."""
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        experts = te.GroupedLinear(2, 256, 128, params_dtype=torch.bfloat16)
    checkpoint.save(tmp_path / "c", experts)
    run(capsys, "convert", tmp_path / "c", tmp_path / "x.pt", "--quantized", "keep")
    written = torch.load(tmp_path / "x.pt", weights_only=True)
    for index in range(2):
        data = getattr(
            getattr(experts, f"weight{index}"), "_data" if recipe == "current" else "_rowwise_data"
        )
        assert torch.equal(written[f"weight{index}:{'' if recipe == 'current' else 'rowwise_'}data"], data)


def test_state_dict_of_experts_is_loaded_weights_only(
    te: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The marks of experts in a state dict were objects that only pickles that may run code can have."""
    experts = te.GroupedLinear(2, 64, 32, params_dtype=torch.bfloat16)
    te_fsdp.set_device_mesh(experts)
    torch.save(experts.state_dict(), tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(loaded["weight1"], experts.weight1)
    run(capsys, "convert", tmp_path / "x.pt", tmp_path / "c", "--to", "checkpoint")
    assert torch.equal(open_any(tmp_path / "c").value("weight").full()[1], experts.weight1)


@pytest.mark.parametrize("recipe", ["mxfp8"], indirect=True)
def test_quantized_weight_of_all_experts_is_pickled(
    te: Any, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.save`` of a state dict raised PicklingError. Pickles have TE's class, as those of the stock module."""
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")
    options = {"single_grouped_weight": True, "use_grouped_tensor": True, "params_dtype": torch.bfloat16}
    with te.quantized_model_init(recipe=recipe_of(recipe)):
        one, other = (te.GroupedLinear(3, 64, 64, bias=False, **options) for _ in range(2))
    te_fsdp.set_device_mesh(one)
    torch.save(one.state_dict(), tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=False)
    assert isinstance(loaded["weight"], te.tensor.GroupedTensor)
    other.load_state_dict(loaded)
    for expected, expert in zip(one.weight.experts, other.weight.split_into_quantized_tensors(), strict=True):
        assert torch.equal(expert.dequantize(), expected.dequantize())


@pytest.mark.parametrize("remainders", [False, True])
def test_export_uses_main_weights(
    te: Any, remainders: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Export uses fp32 main weights, also from bf16 weights and remainders, and reports the source."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    model, twin = Model(te, "none"), Model(te, "none")
    whole = FusedAdam(twin.parameters(), lr=1e-2, master_weights=True)
    optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True, store_param_remainders=remainders)
    # With remainders bf16 weights are rounded differently, so that the second step has different gradients.
    for _ in range(1 if remainders else 3):
        for each, steps in ((model, optimizer), (twin, whole)):
            each(IDS).float().square().sum().backward()
            steps.step()
            steps.zero_grad()
    checkpoint.save(tmp_path / "c", model, optimizer)
    said = run(capsys, "export", tmp_path / "c", tmp_path / "x.safetensors", "--dtype", "float32")
    assert {t["from"] for t in said["tensors"]} == {"main"} and {t["dtype"] for t in said["tensors"]} == {
        "float32"
    }
    run(
        capsys,
        "export",
        tmp_path / "c",
        tmp_path / "y.safetensors",
        "--weights",
        "compute",
        "--dtype",
        "float32",
    )
    exported, computed = open_any(tmp_path / "x.safetensors"), open_any(tmp_path / "y.safetensors")
    apart = 0
    for name, parameter in twin.named_parameters():
        main_weight = whole.state[parameter]["master_param"]
        assert torch.equal(exported.value(name).full(), main_weight), name
        apart += not torch.equal(computed.value(name).full(), main_weight)
    assert apart > 3, "the control: bf16 weights are not the main weights"


def test_copies_of_fp32_weights_are_not_main_weights(
    te: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FusedAdam does not update its main weights of FP32 weights. Exports and loads used these initial values."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    model, other = (te.Linear(32, 32, params_dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    optimizer, optimizer_of_other = (FusedAdam(m.parameters(), master_weights=True) for m in (model, other))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    copies = [optimizer.state[p]["master_param"] for p in model.parameters()]
    assert not any(map(torch.equal, copies, model.parameters())), "the control"
    assert [main_weight(optimizer, p) for p in model.parameters()] == [None, None]
    checkpoint.save(tmp_path / "c", model, optimizer)
    run(capsys, "export", tmp_path / "c", tmp_path / "x.safetensors", "--dtype", "float32")
    exported = open_any(tmp_path / "x.safetensors")
    checkpoint.load(tmp_path / "c", other, optimizer_of_other)
    for name, parameter in model.named_parameters():
        assert torch.equal(exported.value(name).full(), parameter)
        low = other.get_parameter(name)
        assert torch.equal(low, parameter.bfloat16())
        assert torch.equal(optimizer_of_other.state[low]["master_param"], parameter)


@pytest.mark.parametrize("recipe", ["mxfp8"], indirect=True)
def test_export_dequantizes_quantized_weights(
    te: Any, recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(te, recipe)
    checkpoint.save(tmp_path / "c", model)
    said = run(capsys, "export", tmp_path / "c", tmp_path / "x")
    origin = {t["name"]: t["from"] for t in said["tensors"]}
    assert origin["head.weight"] == "dequantized" and origin["head.bias"] == "stored"
    assert torch.equal(open_any(tmp_path / "x").value("head.weight").full(), model.head.weight.dequantize())
    assert main(["ckpt", "export", str(tmp_path / "c"), str(tmp_path / "y"), "--weights", "main"]) == 1
    assert "mlp.fc1_weight: no main weight" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()
