"""Test Hugging Face models with ``te-fsdp ckpt``."""

from __future__ import annotations

import argparse
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fsdp import checkpoint
from te_fsdp.checkpoint import plain_dcp
from te_fsdp.checkpoint.index import Index, read_metadata
from te_fsdp.checkpoint.lazy_tensors import InMemory, open_safetensors, write_folder
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.planner import write_tensors
from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.checkpoint.reader import empty_manifest
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a Hugging Face model's folder, in bf16."""
    return write_model(tmp_path / "model", CONFIG)


def write_model(path: Path, config: dict[str, Any]) -> Path:
    """Write random weights in several files."""
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


def test_export_writes_a_hugging_face_folder_from_a_checkpoint(te: Any, folder: Path, tmp_path: Path) -> None:
    saved, back = tmp_path / "step-0", tmp_path / "back"
    model = build(te, qkv_weight_interleaved=False)
    checkpoint.load_huggingface(folder, model)
    checkpoint.save(saved, model)
    assert ckpt("export", saved, back, "--like", folder, "--max-shard-size", "20kB") == 0
    before, after = open_safetensors(folder)[0], open_safetensors(back)[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].full(), after[name].full()) for name in before)
    assert json.loads((back / "config.json").read_text()) == CONFIG | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("told", "flags", "expected"),
    [
        ({"dtype": "float32"}, (), torch.float32),
        ({"torch_dtype": "float32"}, (), torch.float32),
        ({"dtype": "float32"}, ("--dtype", "bfloat16"), torch.bfloat16),
        ({"dtype": "float64"}, (), torch.bfloat16),
        ({}, (), torch.bfloat16),
    ],
)
def test_export_uses_the_dtype_of_config_json(
    te: Any, tmp_path: Path, told: dict[str, str], flags: tuple[str, ...], expected: torch.dtype
) -> None:
    """Without a flag, an fp32 model is not rounded."""
    folder = write_model(tmp_path / "model", CONFIG | told)
    model = TeModel(te, hf.read_config(CONFIG), fuse_qkv_params=True)
    checkpoint.load_huggingface(folder, model)
    with torch.no_grad():
        model.embedding.weight.add_(2**-12)  # no number of bf16's any more
    checkpoint.save(tmp_path / "step-0", model)
    assert ckpt("export", tmp_path / "step-0", tmp_path / "back", "--like", folder, *flags) == 0
    after = {name: tensor.full() for name, tensor in open_safetensors(tmp_path / "back")[0].items()}
    assert {tensor.dtype for tensor in after.values()} == {expected}
    assert torch.equal(after["model.embed_tokens.weight"], model.embedding.weight.detach().to(expected))
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {config.get("dtype"), config.get("torch_dtype")} - {None} == {str(expected)[6:]}


@pytest.mark.parametrize("zero_centered", [False, True])
def test_export_rounds_shifted_norms_once(
    te: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, zero_centered: bool
) -> None:
    """Gemma's files have norms minus one. Small differences from one need more bits than their sum with one."""
    config = {**CONFIG, "model_type": "gemma", "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}
    folder = write_model(tmp_path / "model", config)
    model = TeModel(te, hf.read_config(config), zero_centered_gamma=zero_centered)
    gamma = 1 + torch.arange(1, 33) * 2.0**-12
    with torch.no_grad():
        model.norm.weight.copy_(gamma - 1 if zero_centered else gamma)
    checkpoint.save(tmp_path / "step-0", model)
    hf.save_huggingface(tmp_path / "saved", model, config=folder, dtype=torch.bfloat16)
    assert ckpt("export", tmp_path / "step-0", tmp_path / "back", "--like", folder) == 0
    saved, exported = (open_safetensors(tmp_path / name)[0] for name in ("saved", "back"))
    assert all(torch.equal(exported[name].full(), saved[name].full()) for name in saved)
    assert torch.equal(exported["model.norm.weight"].full(), (gamma - 1).bfloat16())
    assert not [record for record in caplog.records if "zero-centering rounded" in record.message]


def test_huggingface_page_command_runs(
    te: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the page's command unchanged, with weights that training did not change."""
    folder.rename(tmp_path / "my-llama")
    monkeypatch.chdir(tmp_path)
    ((export,),) = documented.to_run("docs/huggingface.md")
    model = build(te)
    checkpoint.load_huggingface("my-llama", model)
    checkpoint.save("out/step-900", model)
    assert main(documented.words(export)[1:]) == 0
    before, after = (open_safetensors(Path(name))[0] for name in ("my-llama", "my-llama-trained"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].full(), after[name].full()) for name in before)


def test_load_and_export_reject_a_different_qkv_layout(
    te: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import te_fsdp

    saved, first = tmp_path / "step-0", build(te, qkv_weight_interleaved=False, set_parallel_mode=True)
    te_fsdp.set_device_mesh(first)
    checkpoint.load_huggingface(folder, first)
    checkpoint.save(saved, first)
    # Same names and shapes; it would load, and compute nonsense.
    model = build(te, qkv_weight_interleaved=True, set_parallel_mode=True)
    te_fsdp.set_device_mesh(model)
    with pytest.raises(
        CheckpointError, match=r"with a different layout \(layers\.0\.self_attention\.layernorm_qkv\.bias"
    ):
        checkpoint.load(saved, model)
    assert ckpt("export", saved, tmp_path / "back", "--like", folder) == 0, "the manifest tells"
    as_format_2(saved)
    old = ("export", saved, tmp_path / "old", "--like", folder)
    assert ckpt(*old) == 1
    lacking = "zero_centered_gamma, final_norm_zero_centered"
    assert (
        f"unknown options of the layers: qkv_weight_interleaved, {lacking}"
        in capsys.readouterr().err.replace(
            "zero_centered_gamma, qkv_weight_interleaved", "qkv_weight_interleaved, zero_centered_gamma"
        )
    )
    centered = ("--te.layers.zero-centered-gamma", "False", "--te.layers.final-norm-zero-centered", "False")
    assert ckpt(*old, *centered, "--te.layers.qkv-weight-interleaved", "True") == 1
    assert "layernorm_qkv.weight is stacked(4, 2, 2), not plain" in capsys.readouterr().err
    assert not (tmp_path / "old").exists()
    assert ckpt(*old, *centered, "--te.layers.qkv-weight-interleaved", "False") == 0
    assert "semantics (eps, activation, window, ...) are not recorded" in capsys.readouterr().out
    told, known = (open_safetensors(tmp_path / name)[0] for name in ("old", "back"))
    assert all(torch.equal(told[name].full(), known[name].full()) for name in known)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"layernorm_epsilon": 1e-3}, "eps: 0.001, not 1e-06 (layers.0"),
        ({"activation": "geglu"}, "activation: geglu, not swiglu (layers.0"),
        ({"window_size": (5, 0)}, "window_size: [5, 0], not [-1, 0] (layers.0"),
    ],
    ids=str,
)
def test_export_rejects_layers_that_differ_from_config_json(
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


def test_export_writes_experts(te: Any, tmp_path: Path) -> None:
    """Export experts from a checkpoint without options."""
    config = {**CONFIG, "model_type": "mixtral", "num_local_experts": 3, "tie_word_embeddings": False}
    folder = write_model(tmp_path / "mixtral", config)
    top = argparse.Namespace(num_experts_per_tok=2)
    model = TeModel(te, hf.read_config(config), config=top, params_dtype=torch.bfloat16).to(torch.bfloat16)
    checkpoint.load_huggingface(folder, model)
    checkpoint.save(tmp_path / "step-0", model)
    parameters = Manifest.read(tmp_path / "step-0").parameters
    assert parameters["layers.1.experts.fc1.weight"]["shape"] == [3, 128, 32]
    assert ckpt("export", tmp_path / "step-0", tmp_path / "back", "--like", folder) == 0
    before, after = open_safetensors(folder)[0], open_safetensors(tmp_path / "back")[0]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].full(), after[name].full()) for name in before)


def test_export_errors_name_the_mistake(
    te: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, target = tmp_path / "step-0", tmp_path / "back"
    checkpoint.save(saved, build(te))
    assert ckpt("export", saved, target, "--te.layers.bias", "True") == 2
    assert "the --te... options describe the model to export" in capsys.readouterr().err
    assert ckpt("export", saved, tmp_path / "x.pt", "--like", folder) == 2
    assert "--like writes a folder" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 48}))
    assert ckpt("export", saved, target, "--like", folder) == 1
    assert "fc2_weight has shape [32, 64], not [32, 48]" in capsys.readouterr().err
    (folder / "config.json").unlink()
    assert ckpt("export", saved, target, "--like", folder) == 1
    assert "not a readable config.json" in capsys.readouterr().err
    assert not target.exists()


def test_export_keeps_one_block_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    read = plain_dcp.tensors_of(tmp_path / "x", Index.of(read_metadata(tmp_path / "x")))
    assert all(torch.equal(read[key].full(), tensor.tensor) for key, tensor in tensors.items())
