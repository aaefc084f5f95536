"""Bitwise comparison of two commits' training runs: `python scripts/same_bits --before COMMIT`.

Every case (see `cases.py`) is trained by both trees on this machine, on emulated TransformerEngine. Losses, gradients,
norms, parameters after each step and an evaluation are compared as digests of every rank's bytes. Each rank's list of
collectives is compared too. Bits depend on the processor and on torch, so the repository contains no recording. The
exit status is 1 on a difference that `--expected` does not name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro
from cases import Case, cases
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CHUNK = 16  # number of cases that a process group trains before it is replaced


def main(
    before: str = "HEAD",
    only: Annotated[str, tyro.conf.arg(aliases=["-k"])] = "",
    expected: str = "",
    jobs: int = 1,
    out: Path | None = None,
) -> None:
    """Compare this working tree with another commit.

    Args:
        before: Commit to compare with, or a file that `--out` has written.
        only: Regular expression; cases whose names it does not match are left out.
        expected: Regular expression of cases that may differ, because a fault was fixed in between.
        jobs: Number of process groups that run at the same time.
        out: JSON file for all digests.
    """
    wanted = [case for case in cases() if re.search(only, str(case))]
    old = recorded(before, wanted) if Path(before).is_file() else train_commit(before, wanted, jobs)
    results = {"before": old, "now": train(ROOT, wanted, jobs)}
    if out is not None:
        out.write_text(json.dumps(results, indent=1))
    different = {name: difference(results["before"][name], results["now"][name]) for name in results["now"]}
    sys.exit(show({name: what for name, what in different.items() if what}, expected, results["now"]))


def recorded(file: str, wanted: list[Case]) -> dict[str, list[dict[str, str]]]:
    """Read the digests that an earlier run recorded for its own tree."""
    result = json.loads(Path(file).read_text())["now"]
    return {str(case): result[str(case)] for case in wanted}


def train_commit(commit: str, wanted: list[Case], jobs: int) -> dict[str, list[dict[str, str]]]:
    """Train every case with the tree of a commit."""
    with tempfile.TemporaryDirectory(prefix="same_bits_") as scratch:
        tree = Path(scratch) / "before"
        _run("git", "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            return train(tree, wanted, jobs)
        finally:
            _run("git", "worktree", "remove", "--force", str(tree))


def train(tree: Path, wanted: list[Case], jobs: int) -> dict[str, list[dict[str, str]]]:
    """Return the digests of every case: a dictionary per rank."""
    by_ranks: dict[int, list[Case]] = defaultdict(list)
    for case in wanted:
        by_ranks[case.ranks].append(case)
    chunks = [group[i : i + CHUNK] for group in by_ranks.values() for i in range(0, len(group), CHUNK)]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda chunk: _train_chunk(tree, chunk), chunks))
    return {name: digests for result in results for name, digests in result.items()}


def _train_chunk(tree: Path, chunk: list[Case]) -> dict[str, Any]:
    """Train cases of one number of ranks in a separate process, which forks the ranks."""
    with tempfile.TemporaryDirectory(prefix="same_bits_") as scratch:
        given, result = Path(scratch) / "cases.json", Path(scratch) / "digests.json"
        given.write_text(json.dumps([asdict(case) for case in chunk]))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        _run(sys.executable, str(HERE / "group.py"), str(given), str(result), env=environment)
        return json.loads(result.read_text())


def difference(before: list[dict[str, str]], now: list[dict[str, str]]) -> str:
    """Describe the first value that differs, or return an empty string."""
    for rank, (old, new) in enumerate(zip(before, now, strict=True)):
        for name in dict.fromkeys([*old, *new]):
            if old.get(name) != new.get(name):
                return f"rank {rank}: {name}: {old.get(name)} before, {new.get(name)} now"
    return ""


def show(different: dict[str, str], expected: str, found: dict[str, list[dict[str, str]]]) -> int:
    """Print the differences; return the exit status."""
    console = Console()
    if different:
        table = Table("case", "first difference", title="trained otherwise", show_lines=True)
        for name, what in different.items():
            table.add_row(name, what)
        console.print(table)
    unexpected = [name for name in different if not expected or not re.search(expected, name)]
    raised = sum("error" in ranks[0] for ranks in found.values())
    values = sum(len(ranks[0]) for ranks in found.values())
    console.print(
        f"{len(found)} trainings ({raised} of them refused), {values} values on rank 0 alone: "
        f"{len(different)} differ, {len(unexpected)} of them unexpected"
    )
    return int(bool(unexpected))


def _run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run a command; exit with its output if it fails."""
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")


if __name__ == "__main__":
    tyro.cli(main)
