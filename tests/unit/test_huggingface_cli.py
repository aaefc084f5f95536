"""Hugging Face models through ``te-fsdp ckpt``: into a checkpoint that models load, and out of it."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fsdp import checkpoint
from te_fsdp.checkpoint import torch_files
from te_fsdp.checkpoint.contents import empty_manifest
from te_fsdp.checkpoint.lazy import InMemory, open_safetensors, write_folder
from te_fsdp.checkpoint.manifest import read_manifest
from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.checkpoint.writing import write_tensors
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from tests.unit import documented
from tests.unit.damage import as_format_2
from tests.unit.huggingface_models import TeModel

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
FUSED = ("--te.layers.fuse-qkv-params", "True")
STACKED = (*FUSED, "--te.layers.qkv-weight-interleaved", "False")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face model's folder, in bf16."""
    return write_model(tmp_path / "model", CONFIG)


def write_model(path: Path, config: dict[str, Any]) -> Path:
    """Random weights, in several files."""
    path.mkdir()
    shapes = hf.WeightMap.build(config).shapes(te=False)
    if config["tie_word_embeddings"]:
        del shapes["lm_head.weight"]
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: InMemory(torch.randn(shape, generator=generator).bfloat16()) for name, shape in shapes.items()
    }
    write_folder(path, tensors, {}, lambda _: None, 20_000)
    (path / "config.json").write_text(json.dumps(config))
    return path


def ckpt(*arguments: Any) -> int:
    return main(["ckpt", *map(str, arguments)])


def build(te: Any, **options: Any) -> TeModel:
    model = TeModel(te, hf.read_config(CONFIG), fuse_qkv_params=True, params_dtype=torch.bfloat16, **options)
    return model.to(torch.bfloat16)


def test_there_and_back(te: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, back = tmp_path / "step-0", tmp_path / "back"
    assert ckpt("convert", folder, saved, "--to", "checkpoint", "--from", "huggingface", *STACKED) == 0
    printed = capsys.readouterr().out
    assert "note: head.weight: tied to embedding.weight, stored there" in printed
    assert ckpt("verify", saved) == 0
    layouts = {
        n: d["layout"] for n, d in json.loads((saved / "te_fsdp.json").read_text())["parameters"].items()
    }
    assert layouts["layers.1.self_attention.layernorm_qkv.bias"] == "stacked(4, 2, 2)"
    assert layouts["layers.1.layernorm_mlp.fc1_weight"] == "stacked(1, 1)"

    model = build(te, qkv_weight_interleaved=False)
    checkpoint.load(saved, model, allow=["*.inv_freq"])
    expected = dict(hf.import_huggingface(folder, blocks=hf.TeBlocks.of(model)))
    assert all(torch.equal(expected[name], value) for name, value in model.named_parameters())
    checkpoint.save(tmp_path / "trained", model)

    assert ckpt("export", tmp_path / "trained", back, "--like", folder, "--max-shard-size", "20kB") == 0
    before, after = open_safetensors(folder)[0], open_safetensors(back)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].whole(), after[name].whole()) for name in before)
    about = {"torch_dtype": "bfloat16", "architectures": ["Qwen2ForCausalLM"]}
    assert json.loads((back / "config.json").read_text()) == CONFIG | about


def test_the_page(te: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands as they stand, around a training that leaves the weights as they are."""
    folder.rename(tmp_path / "my-llama")
    monkeypatch.chdir(tmp_path)
    ((convert, export),) = documented.to_run("docs/huggingface.md")
    assert main(documented.words(convert)[1:]) == 0
    model = build(te)
    checkpoint.load("out/step-0", model, allow=["*.inv_freq"])
    checkpoint.save("out/step-900", model)
    assert main(documented.words(export)[1:]) == 0
    before, after = (open_safetensors(Path(name))[0] for name in ("my-llama", "my-llama-trained"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].whole(), after[name].whole()) for name in before)


def test_another_layout_is_noticed(
    te: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import te_fsdp

    saved = tmp_path / "step-0"
    assert ckpt("convert", folder, saved, "--to", "checkpoint", "--from", "huggingface", *STACKED) == 0
    # Same names and shapes; it would load, and compute nonsense.
    model = build(te, qkv_weight_interleaved=True, set_parallel_mode=True)
    te_fsdp.set_device_mesh(model)
    with pytest.raises(
        CheckpointError, match=r"with another layout \(layers\.0\.self_attention\.layernorm_qkv\.bias"
    ):
        checkpoint.load(saved, model)
    assert ckpt("export", saved, tmp_path / "back", "--like", folder) == 0, "the manifest tells"
    as_format_2(saved)
    old = ("export", saved, tmp_path / "old", "--like", folder)
    assert ckpt(*old) == 1
    lacking = "zero_centered_gamma, final_norm_zero_centered"
    assert f"nothing tells: qkv_weight_interleaved, {lacking}" in capsys.readouterr().err.replace(
        "zero_centered_gamma, qkv_weight_interleaved", "qkv_weight_interleaved, zero_centered_gamma"
    )
    centered = ("--te.layers.zero-centered-gamma", "False", "--te.layers.final-norm-zero-centered", "False")
    assert ckpt(*old, *centered, "--te.layers.qkv-weight-interleaved", "True") == 1
    assert "layernorm_qkv.weight is stacked(4, 2, 2), not plain" in capsys.readouterr().err
    assert not (tmp_path / "old").exists()
    assert ckpt(*old, *centered, "--te.layers.qkv-weight-interleaved", "False") == 0
    assert "semantics (eps, activation, window, ...) are not recorded" in capsys.readouterr().out
    told, known = (open_safetensors(tmp_path / name)[0] for name in ("old", "back"))
    assert all(torch.equal(told[name].whole(), known[name].whole()) for name in known)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layernorm_epsilon": 1e-3}, "eps is 0.001, not 1e-06"),
        ({"activation": "geglu"}, "activation is geglu, not swiglu"),
        ({"window_size": (5, 0)}, "window_size is [5, 0], not [-1, 0]"),
    ],
    ids=str,
)
def test_another_function_is_no_such_model(
    te: Any,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    text: str,
) -> None:
    checkpoint.save(tmp_path / "trained", build(te, **options))
    assert ckpt("export", tmp_path / "trained", tmp_path / "back", "--like", folder) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_experts(te: Any, tmp_path: Path) -> None:
    """Into a checkpoint and out of it, with no option."""
    config = {**CONFIG, "model_type": "mixtral", "num_local_experts": 3, "tie_word_embeddings": False}
    folder = tmp_path / "mixtral"
    write_model(folder, config)
    assert ckpt("convert", folder, tmp_path / "step-0", "--to", "checkpoint", "--from", "huggingface") == 0
    parameters = read_manifest(tmp_path / "step-0").parameters
    assert parameters["layers.1.experts.fc1.weight"]["shape"] == [3, 128, 32]
    assert ckpt("export", tmp_path / "step-0", tmp_path / "back", "--like", folder) == 0
    before, after = open_safetensors(folder)[0], open_safetensors(tmp_path / "back")[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].whole(), after[name].whole()) for name in before)


def test_what_is_wrong_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "step-0"
    convert = ("convert", folder, target, "--to", "checkpoint")
    assert ckpt(*convert, *FUSED) == 2
    assert "--from huggingface, which is not given" in capsys.readouterr().err
    assert ckpt("export", target, tmp_path / "x.pt", "--like", folder) == 2
    assert "--like makes a folder" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 48}))
    assert ckpt(*convert, "--from", "huggingface") == 1
    assert "mlp.up_proj.weight has shape [64, 32], not [48, 32]" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert ckpt(*convert, "--from", "huggingface") == 1
    assert "not a readable config.json" in capsys.readouterr().err
    assert not target.exists()


def test_untied(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    assert (
        ckpt(
            "convert", folder, target, "--from", "huggingface", "--te.untie", "--te.names.head", "out.weight"
        )
        == 0
    )
    tensors = open_safetensors(target)[0]
    assert torch.equal(tensors["out.weight"].whole(), tensors["embedding.weight"].whole())
    assert "head.weight" not in tensors


def test_one_block_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One that is written, and the next one.
    given: list[weakref.ref[torch.Tensor]] = []
    rows_of = InMemory.rows

    def watched(tensor: InMemory, first: int, last: int) -> torch.Tensor:
        block = rows_of(tensor, first, last)
        given.append(weakref.ref(block))
        assert sum(each() is not None for each in given) <= 2
        return block

    monkeypatch.setattr(InMemory, "rows", watched)
    tensors = {f"model.{n}": InMemory(torch.full((4, 3), float(n))) for n in range(9)}
    (tmp_path / "x").mkdir()
    write_tensors(tmp_path / "x", tensors, lambda _: None, empty_manifest())
    assert len(given) == 9
    read = torch_files.open_dcp(tmp_path / "x").tensors
    assert all(torch.equal(read[key].whole(), tensor.tensor) for key, tensor in tensors.items())


def test_into_a_quantized_model(te: Any, folder: Path, tmp_path: Path) -> None:
    from transformer_engine.common.recipe import Float8CurrentScaling

    saved = tmp_path / "step-0"
    assert ckpt("convert", folder, saved, "--to", "checkpoint", "--from", "huggingface", *FUSED) == 0
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        model, oracle = build(te), build(te)
    checkpoint.load(saved, model, allow=["*.inv_freq"])
    weights = dict(hf.import_huggingface(folder, blocks=hf.TeBlocks(fuse_qkv_params=True)))
    quantized = 0
    for (name, got), expected in zip(model.named_parameters(), oracle.parameters(), strict=True):
        with torch.no_grad():
            expected.copy_(weights[name])  # TE quantizes the whole weight
        if isinstance(got, te.QuantizedTensor):
            quantized += 1
            got, expected = got.dequantize(), expected.dequantize()
        assert torch.equal(got, expected), name
    assert quantized == 2 * 4
