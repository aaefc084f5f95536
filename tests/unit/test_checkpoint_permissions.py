"""Check that files without read permission are not called corrupted. The permission error is simulated."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.cli import main


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """Return paths that cannot be opened."""
    results: set[Path] = set()

    def refuse(stock: Any) -> Any:
        def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and Path(path) in results:
                raise PermissionError(13, os.strerror(13), str(path))
            return stock(path, *args, **kwargs)

        return opened

    monkeypatch.setattr(io, "open", refuse(io.open))
    monkeypatch.setattr("builtins.open", refuse(open))
    monkeypatch.setattr(os, "open", refuse(os.open))
    # Path.open of Python 3.10 keeps the io.open that it found when pathlib was imported.
    monkeypatch.setattr(Path, "open", refuse(Path.open))
    return results


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_convert_reports_missing_read_permission(
    tmp_path: Path, refused: set[Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    state = nn.Linear(2, 2).state_dict()
    torch.save(state, tmp_path / name) if name.endswith("pt") else save_file(state, tmp_path / name)
    refused.add(tmp_path / name)
    assert main(["ckpt", "convert", str(tmp_path / name), str(tmp_path / "out"), "--to", "checkpoint"]) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "Permission denied" in shown and "check the permissions" in shown and "damaged" not in shown


def test_verify_reports_missing_read_permission(
    tmp_path: Path, refused: set[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    refused.add(tmp_path / "a" / ".metadata")
    assert main(["ckpt", "verify", str(tmp_path / "a")]) == 1
    assert f"{tmp_path / 'a'}: not readable" in capsys.readouterr().out
    (tmp_path / "b" / ".metadata").write_bytes(b"")
    assert main(["ckpt", "verify", str(tmp_path / "b")]) == 1
    assert f"{tmp_path / 'b'}: damaged" in capsys.readouterr().out
