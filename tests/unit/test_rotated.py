"""Check files of `matrix.rotated`: each test runs a case daily, all its cases in five days."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DISTRIBUTED = Path(__file__).parents[1] / "pytorch" / "distributed"
ROOT = DISTRIBUTED.parents[2]
sys.path.append(str(DISTRIBUTED))

from matrix import rotated, rotation  # noqa: E402  (their folder is on the path now)

GUARD = "tests/pytorch/distributed/test_graphed_state.py::test_buffers_updated_in_forward[10.0-assigned-step]"


def collected(python: str, *options: str) -> list[str]:
    command = [python, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "--device", "cpu"]
    command += [*options, "tests/pytorch/distributed/test_graphed_state.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_rotated_table_names_existing_files():
    missing = [name for name in rotated.FILES if not (DISTRIBUTED / name).is_file()]
    assert not missing
    assert rotated.is_rotated(DISTRIBUTED / "test_rollout.py")
    assert not rotated.is_rotated(DISTRIBUTED / "test_documentation.py")
    assert not rotated.is_rotated(Path("elsewhere", "test_rollout.py"))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize("shift", [0, rotated.shift_of("a"), rotated.shift_of("b")])
def test_each_case_runs_once_in_five_days(count, shift):
    cases = [{"case": place} for place in range(count)]
    first = 740_000 - 740_000 % rotation.COVER_DAYS
    days = [
        rotation.chosen(cases, days=rotation.COVER_DAYS, shift=shift, seed=first + day)
        for day in range(rotation.COVER_DAYS)
    ]
    assert all(1 <= len(day) <= -(-count // rotation.COVER_DAYS) for day in days)
    assert set().union(*days) == set(range(count))


def test_cases_named_by_mutants_run_with_every_seed(python):
    """`--matrix full` runs all cases."""
    assert GUARD in rotated.guards()
    everything = collected(python, "--matrix", "full")
    functions = {name.split("[")[0] for name in everything}
    for seed in ("740000", "740001"):
        today = collected(python, "--matrix-seed", seed)
        assert GUARD in today and len(today) < len(everything)
        assert {name.split("[")[0] for name in today} == functions
