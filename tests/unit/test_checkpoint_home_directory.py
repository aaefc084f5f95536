"""Test checkpoint paths such as ``~/run``."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError

EXAMPLES = Path(__file__).parents[2] / "examples" / "fsdp2_tp"


@pytest.mark.parametrize("kind", [str, Path])
def test_checkpoint_paths_expand_the_home_directory(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover every path argument of te_fsdp.checkpoint and ``te-fsdp ckpt``. Python alone would create a "~"."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    handle = checkpoint.save(kind("~/run/step-1"), model)
    assert handle.path == home / "run" / "step-1" and (handle.path / "te_fsdp.json").is_file()
    assert checkpoint.latest(kind("~/run")) == handle.path
    assert not torch.equal(model.weight, other.weight), "the control: the load has something to do"
    checkpoint.load(kind("~/run/step-1"), other)
    assert torch.equal(model.weight, other.weight)
    assert main(["ckpt", "convert", "~/run/step-1", "~/out", "--to", "safetensors"]) in (0, None)
    assert list(home.glob("out*")) and list(here.iterdir()) == []
    checkpoint.save("./~/run", model)
    assert (here / "~" / "run" / "te_fsdp.json").is_file(), "a directory of this name is written with ./"
    with pytest.raises(
        CheckpointError, match=r"path ~no-such-user/run: expected a user of this machine after ~"
    ):
        checkpoint.save(kind("~no-such-user/run"), model)


@pytest.mark.parametrize("name", ["train.py", "train_moe.py", "train_elastic.py"])
def test_examples_wait_for_the_last_async_save(name: str) -> None:
    """The examples end with ``os._exit``, which does not wait for threads. An asynchronous save would be incomplete."""
    tree = ast.parse((EXAMPLES / name).read_text())
    text = ast.unparse(tree)
    assert "os._exit(" in text, "the reason for this test"
    saves = [
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("te_fsdp.checkpoint.save(")
    ]
    assert text.count("te_fsdp.checkpoint.save(") == len(saves) >= 1, "each handle is kept"
    main_ = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    assert all(f"{handle}.result()" in ast.unparse(main_) for handle in saves)
