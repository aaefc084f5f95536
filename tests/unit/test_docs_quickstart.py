"""The documentation's code is run, and the names that it mentions exist.

The quickstart's Python blocks, joined, are the script that its commands start; both are taken from the page.
"""

import ast
import importlib
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = ROOT / "docs/quickstart.md"


def blocks(page: Path, language: str) -> list[str]:
    """Contents of the page's fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path) -> str:
    """Run a torchrun command of the page; returns what it printed."""
    program, *arguments = shlex.split(command)
    assert program == "torchrun", command
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def losses(output: str) -> dict[int, float]:
    """Step -> loss of the lines that the script prints."""
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", output, re.MULTILINE)
    }


def test_the_quickstart_runs(tmp_path):
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < 4:
        pytest.skip(f"the quickstart's commands need 4 GPUs, found {gpus}")
    (tmp_path / "quickstart.py").write_text("\n".join(blocks(QUICKSTART, "python")))
    language = "text" if gpus else "sh"
    lines = [line for block in blocks(QUICKSTART, language) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("torchrun")]
    assert len(commands) == 2, commands
    assert all(("te_fsdp.emulation" in command) == (gpus == 0) for command in commands), commands

    first, second = (run(command, tmp_path) for command in commands)
    assert "placements" in first, f"no report in\n{first}"
    assert list(losses(first)) == list(range(10)), first
    assert list(losses(second)) == list(range(10, 20)), second
    everything = [*losses(first).values(), *losses(second).values()]
    assert all(math.isfinite(loss) for loss in everything), everything
    # Ten steps take a fifth off the toy task's loss: a resume without the weights would begin at the top.
    assert losses(second)[10] < 0.9 * losses(first)[0], everything


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks_are_python(page):
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_code_blocks_exist(page):
    for block in blocks(page, "python"):
        for name in sorted(set(re.findall(r"\bte_fsdp(?:\.[A-Za-z_]\w*)+", block))):
            assert resolves(name), f"{page.name} mentions {name}, which does not exist"


def resolves(name: str) -> bool:
    """Whether a dotted name of te_fsdp leads to a module or attribute."""
    first, *rest = name.split(".")
    found = importlib.import_module(first)
    for n, part in enumerate(rest, 1):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([first, *rest[:n]]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part)
    return True


def test_a_wrong_name_is_noticed():
    assert resolves("te_fsdp.errors.MeshError")
    assert not resolves("te_fsdp.errors.MashError")
    assert not resolves("te_fsdp.nowhere")
