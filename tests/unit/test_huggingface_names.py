"""Test errors for arguments of Hugging Face functions, such as names of model parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp.checkpoint import save_huggingface
from te_fsdp.checkpoint.portable import huggingface
from te_fsdp.errors import CheckpointError
from tests.unit.huggingface_models import make_huggingface

pytest.importorskip("transformers", reason="transformers is not installed (extra: test)")
OWN = {"layer": "blocks.{layer}.", "embedding": "tok.weight", "final_norm": "last.", "head": "out.weight"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    theirs: Any = make_huggingface("llama")
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    return tmp_path / "theirs"


@pytest.fixture
def model(te: Any, folder: Path) -> nn.Module:
    described = huggingface.read_config(folder)
    result = nn.Module()
    result.tok = nn.Embedding(described.vocabulary, described.hidden)
    layers = [te.TransformerLayer(**described.te_kwargs(), device="cpu") for _ in range(described.layers)]
    result.blocks, result.last = nn.ModuleList(layers), te.RMSNorm(described.hidden, device="cpu")
    result.out = nn.Linear(described.hidden, described.vocabulary, bias=False)
    return result


def test_invalid_arguments_are_rejected(tmp_path: Path, folder: Path, model: nn.Module) -> None:
    """Bug class: AttributeError and IndexError."""
    with pytest.raises(
        CheckpointError, match=r"names: expected te_fsdp.*huggingface.TeNames\(...\), got dict"
    ):
        save_huggingface(tmp_path / "a", model, config=folder, names=OWN)  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointError, match=r"blocks: expected te_fsdp.*huggingface.TeBlocks\(...\), got dict"
    ):
        save_huggingface(tmp_path / "a", model, config=folder, blocks={})  # type: ignore[arg-type]
    for layer in ("blocks.{}.", "blocks.{n}.", "blocks.{.", None):
        with pytest.raises(CheckpointError, match=r"TeNames\(layer=...\): expected a prefix with \{layer\}"):
            huggingface.TeNames(**{**OWN, "layer": layer})
    with pytest.raises(CheckpointError, match="max_file_bytes: expected a positive byte count, got '5GB'"):
        save_huggingface(
            tmp_path / "a", model, config=folder, names=huggingface.TeNames(**OWN), max_file_bytes="5GB"
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("part", ["embedding", "final_norm", "head"])
def test_wrong_te_names_are_rejected_with_a_fix(
    tmp_path: Path, folder: Path, model: nn.Module, part: str
) -> None:
    """Bug class: the error recommends the call that has failed."""
    with pytest.raises(CheckpointError, match="TeNames") as caught:
        save_huggingface(
            tmp_path / "a", model, config=folder, names=huggingface.TeNames(**{**OWN, part: "x"})
        )
    assert "save_huggingface" not in str(caught.value)
    if part == "final_norm":
        assert "last.weight" in str(caught.value) and "blocks" not in str(caught.value)


def test_config_path_also_copies_the_tokenizer(tmp_path: Path, folder: Path, model: nn.Module) -> None:
    """Bug class: the tokenizer is omitted without an error."""
    names = huggingface.TeNames(**OWN)
    for number, config in enumerate((folder, folder / "config.json")):
        save_huggingface(tmp_path / str(number), model, config=config, names=names)
        assert (tmp_path / str(number) / "tokenizer.json").exists()
    with pytest.raises(CheckpointError, match="pass the folder of a model, with config.json"):
        save_huggingface(tmp_path / "a", model, config=folder / "model.safetensors", names=names)
    with pytest.raises(CheckpointError, match="a quantized|a meta"):
        weights = {
            name: tensor.to("meta") for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
        }
        huggingface.export_huggingface(
            weights, tmp_path / "a", config=folder, names=names, blocks=huggingface.TeBlocks.of(model, names)
        )
