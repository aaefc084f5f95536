"""Test ambiguous or unreadable Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp.checkpoint.lazy_tensors import INDEX, InMemory, write_file, write_folder
from te_fsdp.checkpoint.portable import huggingface as hf
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError

CONFIG = {"model_type": "llama", "vocab_size": 12, "hidden_size": 8, "intermediate_size": 16}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": False}
EMBEDDING = "model.embed_tokens.weight"


def tensors(seed: int) -> dict[str, InMemory]:
    generator = torch.Generator().manual_seed(seed)
    shapes = hf.WeightMap.build(CONFIG).shapes(te=False)
    return {name: InMemory(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one file, of seed 0."""
    result = tmp_path / "model"
    result.mkdir()
    write_folder(result, tensors(0), {}, lambda _: None, 10**9)
    (result / "config.json").write_text(json.dumps(CONFIG))
    return result


def embedding(folder: Path) -> torch.Tensor:
    return dict(hf.import_huggingface(folder))["embedding.weight"]


def test_folder_with_a_file_and_an_unrelated_index_is_rejected(folder: Path) -> None:
    """``transformers`` reads the file. Bug class: the index was read, with different values."""
    other = "model-00001-of-00001.safetensors"
    write_file(folder / other, tensors(1), {}, lambda _: None)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors(1), other)}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="weights of two models: expected model.safetensors, or"):
        embedding(folder)
    (folder / "model.safetensors").unlink()
    assert torch.equal(embedding(folder), tensors(1)[EMBEDDING].tensor)
    (folder / other).rename(folder / "model.safetensors")
    index["weight_map"] = dict.fromkeys(tensors(1), "model.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    assert torch.equal(embedding(folder), tensors(1)[EMBEDDING].tensor), "an index of the file itself"


@pytest.mark.parametrize("other", ["consolidated.safetensors", "model.fp16.safetensors"])
def test_additional_weight_formats_are_ignored(folder: Path, other: str) -> None:
    """Mistral's folders contain such files. ``transformers`` reads the usual name."""
    write_file(folder / other, tensors(1), {}, lambda _: None)
    assert torch.equal(embedding(folder), tensors(0)[EMBEDDING].tensor)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match=rf"got {other}, weights\.safetensors without an index"):
        embedding(folder)


def test_load_rejects_adapters(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors, model\.safetensors without"):
        embedding(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="merge the adapter into its model first"):
        embedding(folder)


@pytest.mark.parametrize("file", ["", "adapter_model.safetensors", "adapter_model.bin"])
def test_ckpt_commands_reject_adapters(folder: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug class: commands accepted an adapter's weights as a model."""
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    torch.save({"lora_A": torch.ones(2)}, folder / "adapter_model.bin")
    path = str(folder / file)
    assert main(["ckpt", "inspect", path]) == 0, "the control: without the adapter's description"
    (folder / "adapter_config.json").write_text("{}")
    for command in (["inspect", path], ["diff", path, path], ["convert", path, f"{folder}-2.safetensors"]):
        assert main(["ckpt", *command]) == 1
        assert "an adapter (adapter_config.json)" in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes((folder / "adapter_model.safetensors").read_bytes())
    assert main(["ckpt", "inspect", str(folder / "model.safetensors")]) == 0, (
        "a model's file next to an adapter"
    )


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"head": "embedding.weight"}, "embedding.weight"),
        ({"layer": "layers."}, "layers.self_attention.layernorm_qkv.layer_norm_weight"),
    ],
)
def test_equal_names_of_model_parts_are_rejected(names: dict[str, str], text: str) -> None:
    """Bug class: a load used the last one's values, and a save wrote both with the same values."""
    with pytest.raises(CheckpointError, match=f"have one name in the model: {text}"):
        hf.WeightMap.build(CONFIG, names=hf.TeNames(**names))
    hf.WeightMap.build(CONFIG)
    hf.WeightMap.build({**CONFIG, "num_hidden_layers": 1}, names=hf.TeNames(layer="layers."))


def test_tied_head_with_the_embedding_name_is_rejected() -> None:
    """Bug class: KeyError on saving."""
    with pytest.raises(CheckpointError, match=r"pass TeNames\(head=None\)"):
        hf.WeightMap.build({**CONFIG, "tie_word_embeddings": True}, names=hf.TeNames(head="embedding.weight"))


def test_values_beyond_the_range_of_a_dtype_are_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug class: the values became infinite."""
    weights = hf.WeightMap.build(CONFIG)
    state = {name: lazy.full() for name, lazy in weights.lazily(tensors(0), to_te=True).items()}
    state["embedding.weight"][0, 0] = torch.inf  # of the model itself
    options: dict[str, Any] = {
        "config": CONFIG,
        "blocks": hf.TeBlocks(False, False, False, False, False, False),
    }
    hf.export_huggingface(state, tmp_path / "a", **options, dtype=torch.float16)
    state["embedding.weight"][0, 1] = 1e5
    hf.export_huggingface(state, tmp_path / "b", **options, dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError, match="embed_tokens.weight: values beyond the range of float16: .*65504"
    ):
        hf.export_huggingface(state, tmp_path / "c", **options, dtype=torch.float16)
    source = tmp_path / "state.pt"
    torch.save(state, source)
    assert main(["ckpt", "convert", str(source), str(tmp_path / "x.safetensors"), "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "convert", str(source), str(tmp_path / "y.safetensors"), "--dtype", "float16"]) == 1
    assert "embedding.weight: values beyond the range of float16" in capsys.readouterr().err
    assert not {"c", "y.safetensors"} & {path.name for path in tmp_path.iterdir()}


def test_arguments_that_are_not_tensors_or_models_are_rejected(folder: Path) -> None:
    """Bug class: AttributeError."""
    lists = {name: one.tensor.tolist() for name, one in tensors(0).items()}
    with pytest.raises(CheckpointError, match="Hugging Face model: dict, not tensors by name"):
        hf.import_huggingface(lists, config=CONFIG)
    for model in (None, nn.Linear(2, 2).state_dict()):
        with pytest.raises(CheckpointError, match="load_huggingface: model: expected a model, got"):
            hf.load_huggingface(folder, model)  # type: ignore[arg-type]


def test_files_of_quantized_models_are_rejected(folder: Path) -> None:
    """Bug class: the advice was for a model in memory."""
    quantized = {name: InMemory(one.tensor.to(torch.int8)) for name, one in tensors(0).items()}
    write_file(folder / "model.safetensors", quantized, {}, lambda _: None)
    with pytest.raises(
        CheckpointError, match="is a tensor of torch.int8, .*dequantize the Hugging Face model"
    ):
        embedding(folder)
