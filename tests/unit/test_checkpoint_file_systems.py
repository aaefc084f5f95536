"""Test file system conditions: different clocks, long names, permissions, missing files."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.checkpoint import manifest as manifests
from te_fsdp.checkpoint.directory import Owner
from te_fsdp.checkpoint.index import read_index
from te_fsdp.checkpoint.lazy_tensors import open_safetensors
from te_fsdp.errors import CheckpointError

ELSEWHERE = Owner("node7-12345678", 17, "99", 1700000000, "0" * 8)


@pytest.mark.parametrize("hours", [-48, 0, 48])
def test_cleanup_does_not_depend_on_local_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Ages are differences of two file system times. Control: a folder without a write for one day is removed."""
    running = tmp_path / f".x.te_fsdp-saving.{ELSEWHERE}"
    left = tmp_path / f".y.te_fsdp-saving.{ELSEWHERE}"
    server = time.time() + 3600 * hours
    for folder, written in ((running, server - 60), (left, server - 25 * 3600)):
        folder.mkdir()
        os.utime(folder, (written, written))
    real = Path.mkdir

    def mkdir(path: Path, *how: Any, **options: Any) -> None:  # as by a server whose clock is off
        real(path, *how, **options)
        os.utime(path, (server, server))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    checkpoint.save(tmp_path / "z", nn.Linear(2, 2))
    assert running.exists() and not left.exists()


@pytest.mark.parametrize(
    "name",
    ["n" * 200, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 120, "n" * 255],
    ids=["200", "240 bytes", "255"],
)
def test_save_accepts_names_of_the_maximum_length(tmp_path: Path, name: str) -> None:
    """Hidden names add a mark and an owner, within the 255 bytes of a file name. Leftovers are still removed."""
    model = nn.Linear(2, 2)
    for step in (1, 2):
        checkpoint.save(tmp_path / str(step) / name, model, keep_last=1)
        checkpoint.load(tmp_path / str(step) / name, model)
        assert [p.name for p in (tmp_path / str(step)).iterdir()] == [name]
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path / "1" / name, model)
    here = Owner.new()
    dead = Owner(here.machine, 2**22 + 5, "1", 0, "0" * 8)
    (tmp_path / "1" / f".{name[:50]}.te_fsdp-saving.{dead}").mkdir()
    checkpoint.save(tmp_path / "1" / "other", model)
    assert sorted(p.name for p in (tmp_path / "1").iterdir()) == sorted([name, "other"])


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_verify_reports_missing_permissions_instead_of_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2))
    real = manifests.open_checked

    def refused(path: Path, *rest: Any) -> Any:
        if path.suffix == ".distcp":
            raise OSError(number, os.strerror(number), str(path))
        return real(path, *rest)

    monkeypatch.setattr(manifests, "open_checked", refused)
    may = number != errno.EIO
    words = "files that this user may not read: .*check the permissions" if may else "damaged checkpoint"
    with pytest.raises(CheckpointError, match=words) as result:
        checkpoint.verify(tmp_path / "a")
    assert ("damaged" in str(result.value)) != may


def test_load_rejects_an_index_without_files(tmp_path: Path) -> None:
    """The error names the tensor instead of an IndexError. Negative numbers would select files from the end."""
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2))
    manifest = manifests.Manifest.read(tmp_path / "a")
    good = read_index(tmp_path / "a", manifest)
    assert len(dict(good.rows(["model.weight"]))) == 1, "the control"
    file = tmp_path / "a" / "te_fsdp.index"
    from te_fsdp.checkpoint import index as indexes

    real = indexes.json.loads
    for files in ([], None):

        def without(text: Any, files: Any = files) -> Any:
            body = real(text)
            return {**body, "files": [] if files is None else files} if "files" in body else body

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(indexes.json, "loads", without)
            result = read_index(tmp_path / "a", manifest)
            with pytest.raises(
                CheckpointError, match="it places model.weight in a file that it does not list"
            ):
                dict(result.rows(["model.weight"]))
    assert file.is_file()


def test_load_rejects_folders_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a folder without weights.*hf download NAME") as result:
        open_safetensors(tmp_path)
    assert "add the index" not in str(result.value)
    with pytest.raises(CheckpointError, match="a folder without weights"):  # names the same as its folder
        checkpoint.load_huggingface(tmp_path / "config.json", nn.Linear(2, 2))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="but pytorch_model.bin"):
        open_safetensors(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match="unreadable index .*its weight_map is empty"):
        open_safetensors(tmp_path)


def test_save_huggingface_suggests_te_names_for_renamed_layers(tmp_path: Path) -> None:
    """The error suggests ``names=TeNames(...)`` with the layers' prefix instead of the call that has failed."""
    model = nn.ModuleDict({"decoder": nn.ModuleList([nn.ModuleDict({"self_attention": nn.Linear(2, 2)})])})
    config = {"model_type": "llama"}
    with pytest.raises(CheckpointError) as result:
        checkpoint.save_huggingface(tmp_path / "a", model, config=config)
    text = str(result.value)
    assert 'names=TeNames(layer="decoder.{layer}.")' in text and "save_huggingface(path" not in text, text
    assert torch.is_tensor(model["decoder"][0]["self_attention"].weight)
