"""Check that errors for text files passed as weights name the correct argument."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import save_file

import te_fsdp
from te_fsdp import CheckpointError
from te_fsdp.cli import main

TEXTS = {
    "config.json": ('{"model_type": "llama"}', "got JSON"),
    "model.safetensors.index.json": ('{"weight_map": {}}', "got JSON"),
    "README.md": ("# \u00e9\n" * 99, "got text"),
    "model.bin": ("", "got an empty file"),
    "model.safetensors": (
        "version https://git-lfs.github.com/spec/v1\noid sha256:1",
        "got a pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("command", ["inspect", "verify", "diff", "convert", "export"])
def test_commands_reject_text_files_with_a_hint(tmp_path, capsys, command, name):
    """Bug class: files are called "truncated" or "damaged" although they are text."""
    path = tmp_path / name
    text, expected = TEXTS[name]
    path.write_text(text, encoding="utf-8")
    others = {"diff": [path], "convert": [tmp_path / "new", "--to", "torch"], "export": [tmp_path / "new"]}
    if (command, name) != ("verify", "model.safetensors"):  # refused by its name
        assert main(["ckpt", command, str(path), *map(str, others.get(command, []))]) == 1
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("name", TEXTS)
def test_load_rejects_text_files_with_a_hint(tmp_path, name):
    path = tmp_path / name
    path.write_text(TEXTS[name][0], encoding="utf-8")
    with pytest.raises(CheckpointError, match=TEXTS[name][1]):
        te_fsdp.checkpoint.load(path, torch.nn.Linear(2, 2))


def test_text_file_error_names_the_folder_with_weights(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert main(["ckpt", "inspect", str(tmp_path / "tokenizer.json")]) == 1
    assert f"pass its folder, {tmp_path}" in capsys.readouterr().err
    assert main(["ckpt", "inspect", str(tmp_path)]) == 0


@pytest.mark.parametrize("given", [".", "model.safetensors", "README.md"])
def test_load_huggingface_rejects_text_files_with_a_hint(tmp_path, given):
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / name).write_text(TEXTS[name][0], encoding="utf-8")
    expected = TEXTS["README.md" if given == "README.md" else "model.safetensors"][1]
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        te_fsdp.checkpoint.load_huggingface(tmp_path / given, torch.nn.Linear(2, 2))


def test_inspect_rejects_an_optimizer_state_file(tmp_path, capsys):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert main(["ckpt", "inspect", str(tmp_path / "optimizer.pt")]) == 1
    assert "got the state of an optimizer" in capsys.readouterr().err
