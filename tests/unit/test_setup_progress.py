"""Test progress messages of the setup script while pip works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Stand-in for the environment's interpreter: pip and compileall do nothing, all else is Python's.
PYTHON = f"""#!/bin/sh
case "$*" in
  *"sys.executable"*) echo "$0" ;;
  "-m compileall"*) ;;
  "-m pip install"*)
    echo "Collecting torch==2.13.0"
    echo "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.0 MB)"
    echo "Requirement already satisfied: numpy in somewhere"
    sleep 1
    echo "Installing collected packages: torch, numpy, einops"
    [ -z "$FAILS" ] || {{ echo "ERROR: No matching distribution found for torch"; exit 1; }} ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.mark.parametrize("fails", ["", "1"])
def test_each_setup_step_prints_a_line_with_seconds(tmp_path: Path, fails: str) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    environment = {**os.environ, "VENV": str(tmp_path / "venv"), "SETUP": "cpu", "FAILS": fails}

    def set_up(*extras: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / "scripts" / "setup.sh"), *extras]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    ran = set_up("test", "lint")
    lines = [re.sub(r"^set-up: +\d+ s: ", "", line) for line in ran.stdout.splitlines()]
    assert all(re.match(r"set-up: +\d+ s: ", line) for line in ran.stdout.splitlines()), ran.stdout
    shown = [
        "Collecting torch==2.13.0",
        "Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (190.0 MB)",
    ]
    assert [line for line in lines if line.startswith(("Coll", "Down"))] == shown
    assert "installing 3 packages" in lines
    assert (ran.returncode != 0) == bool(fails)
    assert ("No matching distribution" in ran.stderr) == bool(fails)
    if not fails:
        assert lines[-2] == "compiling the packages' Python files" and lines[-1].startswith("done in")
        for extras in (("test", "lint"), ("lint",), ("test",), ()):
            again = set_up(*extras)
            assert again.returncode == 0 and again.stdout == "", f"nothing is left to do for {extras}"
        for extras in (("docs", "lint"), ("te",)):
            assert "done in" in set_up(*extras).stdout, f"{extras} is not part of what was set up"
