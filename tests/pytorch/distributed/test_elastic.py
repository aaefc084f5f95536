"""The elastic example. Its nodes or ranks are killed.

They die in the middle of a save or of a load. One test has too few ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from example_runs import FOLDER, ROOT, example

SCRIPT = ROOT / "scripts/elastic_kills.py"
EXAMPLE = FOLDER / "train_elastic.py"
OPTIONS = "--layers 1 --hidden 64 --ffn 64 --heads 2 --seq 32 --batch 8 --micro 2 --megabytes 0.3 --lr 3e-3"
EVERY = 4

pytestmark = pytest.mark.cpu  # several nodes on one machine


def start(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program as a user does, with emulated TransformerEngine."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TE_FSDP_EMULATION": "10.0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def run_start(words: list[str]) -> None:
    """Run a start of the example."""
    import tyro

    import te_fsdp
    from te_fsdp.collectives.rendezvous import DEFAULT_TIMEOUT

    elastic = example("train_elastic")
    try:
        elastic.main(tyro.cli(elastic.Options, args=words, console_outputs=False))
    finally:
        te_fsdp.set_collective_timeout(DEFAULT_TIMEOUT)


def run_superseded_start(folder: str) -> str:
    """Run a start of the example during which another one starts. Return how it ends."""
    elastic = example("train_elastic")
    step, starts = elastic.train_step, Path(folder, "starts.jsonl")

    def train_step(*given: Any) -> Any:
        if dist.get_rank() == 0:
            with starts.open("a") as file:
                file.write("{}\n")
        return step(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elastic, "train_step", train_step)
        try:
            run_start(
                [*OPTIONS.split(), "--save", folder, "--out", folder, "--steps", "2", "--save-every", "1"]
            )
        except SystemExit as stopped:
            return str(stopped)
    return "went on"


def run_starts_by_hand(pool: Any, folder: Path, parts: list[tuple[int, int]]) -> Path:
    """Run a checkpoint's starts, each on a number of ranks up to a step; return the last checkpoint."""
    before: list[str] = []
    for number, (ranks, step) in enumerate(parts):
        own = folder / str(number)
        words = [*OPTIONS.split(), "--recipe", "current", "--save-every", str(EVERY), "--steps", str(step)]
        words += ["--save", str(own), "--out", str(own), "--no-asynchronous", *before]
        environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}  # as the example does
        pool.run(run_start, ranks, init_group=False, env=environment, words=words)
        before = ["--resume", str(own / f"start-1-step-{step}")]
    return Path(before[1])


@pytest.mark.ranks(2)
def test_killed_job_is_bitwise_equal_to_manual_resumes(pool, tmp_path, python):
    from te_fsdp.checkpoint.portable.convert import compare_contents, open_any

    out = tmp_path / "killed"
    command = [python, str(SCRIPT), "--python", sys.executable, "--rank-python", python, "--kills", "2"]
    command += ["--in-turn", "--phases", "save", "load", "--lost", "4", "--last-call", "3"]
    command += ["--no-by-hand", "--save-every", str(EVERY), "--out", str(out)]
    done = start(command, 600)
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr[-2000:]}\n{(out / 'run.log').read_text()[-4000:]}")
    found = json.loads((out / "result.json").read_text())
    first, second = found["kills"]
    assert (first["hit"], second["hit"]) == ("node", "rank"), found
    assert first["after"].startswith("1 ranks, start-1-step-"), found
    assert len(found["parts"]) > 1, found
    other = run_starts_by_hand(pool, tmp_path / "by-hand", found["parts"])
    compared = compare_contents(
        open_any(out / "checkpoints" / found["last"]), open_any(other), lambda count: None
    )
    assert compared.is_same(strict=True), (compared.differences, found)
    assert compared.equal > 20


def test_too_few_ranks_end_the_job(tmp_path, python):
    command = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command += [
        "--monitor-interval",
        "0.1",
        str(EXAMPLE),
        *OPTIONS.split(),
        "--tp",
        "2",
        "--save",
        str(tmp_path),
    ]
    done = start(command, 120)
    assert done.returncode == 1
    assert done.stderr.count("1 ranks are available, and they cannot form the mesh") == 2, done.stderr[-4000:]
    assert "tp(2)" in done.stderr and "start 1" not in done.stdout


@pytest.mark.ranks(2)
def test_superseded_start_exits(pool, tmp_path):
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    first, second = pool.run(run_superseded_start, 2, init_group=False, env=environment, folder=str(tmp_path))
    assert "start 1 was considered lost: start 2 has begun" in first and second == "1"
    assert not list(tmp_path.glob("start-*")), "nothing was saved"
