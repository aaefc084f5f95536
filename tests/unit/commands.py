"""Commands as a user starts them, in their own process (`tests.forkserver`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path(*first: Path) -> str:
    """Return PYTHONPATH with folders, the project and its old value, which may select a different torch."""
    return os.pathsep.join(filter(None, [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH")]))


def start(python: str, module: str, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a module in a folder and return its output and exit status."""
    return subprocess.run(
        [python, "-m", module, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_text(
    python: str, text: str, *words: str, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run Python source, which must succeed, and return its output."""
    ran = subprocess.run(
        [python, "-c", text, *words],
        env={**env, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran


def run_ranks(python: str, code: str, *words: str, count: int = 2) -> None:
    """Run Python source once per rank at the same time, with rank and words as arguments. All must succeed."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([python, "-c", code, str(rank), *words], env=environment) for rank in range(count)
    ]
    try:
        assert [process.wait(timeout=300) for process in started] == [0] * count
    finally:
        for process in started:
            process.kill()
            process.wait()
