"""Test a leading ``~`` in paths."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from te_fsdp import checkpoint, planning
from te_fsdp.checkpoint.portable.huggingface_config import read_config, write_config
from te_fsdp.checkpoint.storage import expanded
from te_fsdp.cli import main
from te_fsdp.errors import CheckpointError
from te_fsdp.planning.job import is_function
from tests.unit.test_huggingface_folders import CONFIG, embedding, folder

__all__ = ["folder"]


@pytest.fixture
def home(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder above the model ``~/model``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (folder / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("as_path", [False, True])
def test_hugging_face_paths_expand_the_home_directory(home: Path, as_path: bool) -> None:
    """Bug class: the path is treated as a directory named ``~`` in the current one."""
    name = Path("~/model") if as_path else "~/model"
    assert torch.equal(embedding(name), embedding(home / "model"))  # type: ignore[arg-type]
    assert read_config(name) == read_config(home / "model")
    assert read_config("~/model/config.json") == read_config(home / "model")
    assert write_config(home / "elsewhere", name, {}) == ["config.json", "tokenizer.json"]
    assert sorted(os.listdir()) == ["config.json", "tokenizer.json"], (
        "nothing is created in a directory called ~"
    )


def test_checkpoint_and_cli_paths_expand_the_home_directory(home: Path) -> None:
    model = torch.nn.Linear(2, 2)
    checkpoint.save("~/checkpoints/step-1", model)
    checkpoint.load("~/checkpoints/step-1", model)
    checkpoint.verify("~/checkpoints/step-1")
    assert checkpoint.latest("~/checkpoints") == home / "checkpoints" / "step-1"
    assert main(["ckpt", "inspect", "~/checkpoints"]) == 0
    assert main(["ckpt", "convert", "~/checkpoints", "~/one.safetensors"]) == 0
    assert (home / "one.safetensors").exists() and not os.listdir()


def test_plan_paths_expand_the_home_directory(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "build:it").mkdir()
    assert not is_function("~/build:it") and is_function("build:it")
    assert planning.Job(model="~/model").described()["model"] == "~/model"
    (home / "plan.json").write_text(json.dumps(CONFIG))
    assert main(["report", "~/plan.json"]) == 1
    assert "does not exist" not in capsys.readouterr().err


def test_remote_and_relative_paths_are_not_expanded() -> None:
    assert str(expanded("s3://bucket/m")) == "s3:/bucket/m" and expanded("./~/m") == Path("~/m")
    with pytest.raises(CheckpointError, match="a user of this machine after ~"):
        expanded("~no_such_user/m")
