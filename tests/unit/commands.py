"""Commands as a user starts them, in their own process (`tests.forkserver`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path(*first: Path) -> str:
    """PYTHONPATH with folders, the project, and what it was: `make torch-versions` puts another torch there."""
    return os.pathsep.join(filter(None, [*map(str, first), str(ROOT), os.environ.get("PYTHONPATH")]))


def start(python: str, module: str, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a module in a folder; what it printed, and its exit status, come back."""
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
    """Run a text of Python, which ends well; what it printed comes back."""
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
    """Run a text of Python, its arguments a rank and the words given here, for all ranks at once; each ends well."""
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
