"""Check that programs of a fork server import the packages of this process."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.forkserver import ForkServer
from tests.forkserver.server import PRELOADED


def test_fork_server_imports_modules_from_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make torch-versions` selects a different torch with PYTHONPATH."""
    for name in {preloaded.partition(".")[0] for preloaded in PRELOADED}:
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "torch.py").write_text("get_num_threads = set_num_threads = lambda *_: None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer()
    try:
        command = [
            server.executable,
            "-c",
            "import sys, torch; print(torch.__file__, 'torch' in sys.modules)",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        server.close()
    assert done.stdout.split() == [str(tmp_path / "torch.py"), "True"]
