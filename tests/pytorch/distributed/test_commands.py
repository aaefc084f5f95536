"""Command blocks of the README or a page, run by bash.

``make docs-commands`` also runs the blocks that take a minute.

Each has a folder of its own that looks like the repository; what is left out, and what other tests run, is in
tests/unit/documented.py. Targets of make get their own options: few steps, no environment. Without GPUs
TransformerEngine is emulated, as the pages describe.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import harness
import pytest
import torch

from tests.unit import documented
from tests.unit.documented import ROOT

#: (page, number of its block) -> words that it prints.
PRINTED = {
    ("README.md", 0): ["train: done; a run resumed on a different mesh"],
    ("docs/emulation.md", 0): ["emulated Linear (4, 16)"],
    ("docs/install.md", 0): ["Versions", "transformer_engine"],
    ("docs/install.md", 1): ["Versions", "transformer_engine"],
    ("docs/versions.md", 0): ["Versions", "transformer_engine"],
}
#: The same, of those that take half a minute and more.
PRINTED_LATE = {
    ("docs/moe.md", 0): ["done: step 20", "done: step 40"],
    ("docs/moe.md", 1): ["resumed: one process: losses at most", "train-moe: done; see"],
    ("examples/fsdp2_tp/README.md", 0): ["done: step 20", "done: step 40"],
    ("examples/fsdp2_tp/README.md", 1): ["done: step 20", "done: step 40"],
    ("examples/fsdp2_tp/README.md", 2): ["done: step 10", "quantized-weights"],
    ("examples/fsdp2_tp/README.md", 3): ["done: step 20", "done: step 40"],
}
CASES = [
    *(pytest.param(*case, id="-".join(map(str, case))) for case in PRINTED),
    *(pytest.param(*case, id="-".join(map(str, case)), marks=pytest.mark.slow) for case in PRINTED_LATE),
]
#: Packages and files that the reader of a page is assumed to have.
SCRIPT = """
import torch
import transformer_engine.pytorch as te

print("emulated", type(layer := te.Linear(16, 16)).__name__, tuple(layer(torch.ones(4, 16)).shape))
"""
PROGRAMS = {"python": "", "torchrun": "-m torch.distributed.run", "te-fsdp": "-m te_fsdp.cli"}


def folder_of_a_reader(path: Path, python: str) -> dict[str, str]:
    """Put what the commands name into a folder; returns the environment in which they find their programs."""
    for name in ("Makefile", "examples", "scripts"):
        (path / name).symlink_to(ROOT / name)
    (path / "script.py").write_text(SCRIPT)
    (path / "bin").mkdir()
    for name, words in PROGRAMS.items():
        program = path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
        program.chmod(0o755)
    given = {
        "PATH": f"{path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    # Options of make's targets: no separate environment, few steps, results here.
    given |= {"SETUP": "none", "PYTHON": str(path / "bin/python"), "STEPS": "2", "OUT": str(path / "made")}
    given |= {"ARGS": "", "MAKEFLAGS": ""}  # not those of a make that runs these tests
    if harness.device_type() == "cpu":
        given |= {"TE_FSDP_EMULATION": "10.0", "CUDA_VISIBLE_DEVICES": ""}
    return given


@pytest.mark.parametrize(("page", "number"), CASES)
def test_documented_commands_run(page, number, tmp_path, python, request):
    if (page, number) in PRINTED_LATE and request.config.getoption("--matrix") != "full":
        pytest.skip("takes a minute: make docs-commands")
    if 0 < torch.cuda.device_count() < 4:
        pytest.skip("the pages' commands need 4 GPUs")
    if page == "docs/emulation.md" and torch.cuda.device_count():
        pytest.skip("the emulation refuses machines with a GPU")
    if not shutil.which("make"):
        pytest.skip("needs make")
    commands = documented.to_run(page)[number]
    environment = {**os.environ, **folder_of_a_reader(tmp_path, python)}
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(commands)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for words in (PRINTED | PRINTED_LATE)[page, number]:
        assert words in done.stdout + done.stderr, f"{words!r} not in\n{done.stdout[-3000:]}"


def test_every_command_block_is_tested():
    wanted = {
        (page, number)
        for page, test in documented.RUN_BY.items()
        if test.endswith("test_commands.py::test_documented_commands_run")
        for number in range(len(documented.to_run(page)))
    }
    assert wanted == PRINTED.keys() | PRINTED_LATE.keys()


#: Scripts of benchmarks/ that no other test starts: processes, and options that make them short.
BENCHMARKS = {
    "checkpoint": (2, "--gib 0.01 --rounds 1"),
    "checkpoint_read": (2, "--gib 0.01 --rounds 1"),
    "checkpoint_scale": (1, "--measured 2 --ranks 8"),
    "neighbour_copy": (2, "--mib 4 --rounds 1"),
}


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_run(name, tmp_path, python, request):
    if request.config.getoption("--matrix") != "full":
        pytest.skip("takes some seconds: make docs-commands")
    processes, options = BENCHMARKS[name]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [python, *run, str(ROOT / f"benchmarks/{name}.py"), *options.split()],
        cwd=tmp_path,
        env={**os.environ, **folder_of_a_reader(tmp_path, python)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
