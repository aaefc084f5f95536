"""Test the ledger of GPU test results: merges, outdated rows, selection for the next run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/unit/test_gpu_ledger.py"
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture(scope="module")
def gpu_tests():
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "scripts" / "gpu_tests.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_tests"] = module
    spec.loader.exec_module(module)
    return module


def result(gpu_tests, name: str, outcome: str, **changes):
    test = f"{FILE}::{name}"
    values = {"card": CARD, "gpus": 4, "commit": "a0e77c7", "seconds": 2.0, "reason": ""}
    return gpu_tests.Result(
        **{**values, "test": test, "outcome": outcome, "file": gpu_tests.file_digest(test), **changes}
    )


SOURCE = '''"""A file."""

import math


class Shape:
    """A class."""

    sides: int = 4  # not a circle

    def area(self, *, scale=1.5e-3, **options):
        """Return the area."""
        return f"{self.sides:>{4}} {scale!r}" f"{options = }", b"\\x00", math.pi, ...
'''
EDITS = {
    "docstring of the file": ('"""A file."""', '"""The file\'s subject."""'),
    "docstring of a class": ('    """A class."""\n\n', ""),
    "docstring of a function": ("the area", "the area of the shape"),
    "comment": ("  # not a circle", ""),
    "line break": ("scale=", "\n        scale="),
}
CHANGES = {
    "statement": ("math.pi", "math.tau"),
    "default": ("1.5e-3", "1.5e-2"),
    "annotation": ("int = 4", "float = 4"),
    "f-string": ("scale!r", "scale!s"),
    "name": ("area", "surface"),
    "statement before the last": ("return f", "self.sides += 1\n        return f"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_comments_and_docstrings_do_not_change_the_digest(gpu_tests, edit):
    edited = SOURCE.replace(*EDITS[edit])
    assert edited != SOURCE
    assert gpu_tests.code_digest(edited) == gpu_tests.code_digest(SOURCE)


@pytest.mark.parametrize("change", CHANGES)
def test_code_changes_the_digest(gpu_tests, change):
    changed = SOURCE.replace(*CHANGES[change])
    assert gpu_tests.code_digest(changed) != gpu_tests.code_digest(SOURCE)


def test_digest_is_equal_on_every_python_version(gpu_tests):
    """Python 3.10 to 3.13 give this value, although their syntax trees differ in empty fields."""
    assert gpu_tests.code_digest(SOURCE) == "412a3fecb0ba"


def test_ledger_round_trips(gpu_tests, tmp_path):
    rows = [result(gpu_tests, "test_a", "skipped", reason='needs "8", found 4')]
    gpu_tests.write_ledger(rows, tmp_path / "ledger.csv")
    assert gpu_tests.read_ledger(tmp_path / "ledger.csv") == rows
    assert gpu_tests.read_ledger(tmp_path / "absent.csv") == []


def test_newer_result_replaces_older_one(gpu_tests):
    old = result(gpu_tests, "test_a", "failed")
    new = result(gpu_tests, "test_a", "passed", commit="b1")
    other_card = result(gpu_tests, "test_a", "failed", card="NVIDIA H200")
    assert set(gpu_tests.merge_results([old, other_card], [new])) == {new, other_card}


def test_pending_test_keeps_its_result(gpu_tests):
    old = result(gpu_tests, "test_a", "passed")
    pending = result(gpu_tests, "test_a", "pending", commit="b1")
    assert gpu_tests.merge_results([old], [pending]) == [old]
    # Negative control: the test file changed, so the old result is not valid any more.
    stale = dataclasses.replace(old, file="0" * 12)
    assert gpu_tests.merge_results([stale], [pending]) == [pending]


def test_results_of_an_older_file_version_are_removed(gpu_tests):
    """Bug class: rows that no run updates, for example of a renamed test."""
    renamed = result(gpu_tests, "test_old_name", "passed", file="0" * 12)
    other_card = dataclasses.replace(renamed, card="NVIDIA H200")
    new = result(gpu_tests, "test_new_name", "passed")
    assert gpu_tests.merge_results([renamed, other_card], [new]) == [new, other_card]
    assert gpu_tests.needed_tests([FILE], [renamed, new], CARD, 4) == {}


def test_next_run_repeats_failed_and_pending_tests(gpu_tests):
    rows = [
        result(gpu_tests, name, outcome)
        for name, outcome in (("a", "passed"), ("b", "failed"), ("c", "pending"))
    ]
    assert gpu_tests.needed_tests([FILE], rows, CARD, 4) == {FILE: [f"{FILE}::b", f"{FILE}::c"]}
    assert gpu_tests.needed_tests([FILE], rows[:1], CARD, 4) == {}
    changed = [dataclasses.replace(rows[0], file="0" * 12)]
    for needed in (
        gpu_tests.needed_tests([FILE], changed, CARD, 4),
        gpu_tests.needed_tests([FILE], rows, "NVIDIA H200", 4),
        gpu_tests.needed_tests([FILE], rows, CARD, 2),
    ):
        assert needed == {FILE: [FILE]}


def test_tests_are_split_evenly_over_pools(gpu_tests):
    rows = [
        result(gpu_tests, "a", "passed", test=f"{name}::a", seconds=seconds)
        for name, seconds in (("x", 90), ("y", 50), ("z", 40))
    ]
    assert gpu_tests.split_tests({name: [name] for name in "xyz"}, rows, 2) == [["x"], ["z", "y"]]
    assert gpu_tests.split_tests({}, rows, 2) == []
    # Node ids of one file: those of 60 s stay together, the rest runs in the other pool.
    tests = [f"w::{number}" for number in range(15)]
    assert gpu_tests.split_tests({"w": tests}, [], 2) == [tests[:10], tests[10:]]


def test_plugin_records_each_test(gpu_tests, tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_skipped(): pass\n"
    )
    out = tmp_path / "results"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "gpu_tests",
            "-c",
            "/dev/null",
            "--rootdir",
            str(tmp_path),
            str(tmp_path),
        ],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT / "scripts"),
            gpu_tests.RESULTS_VARIABLE: f"{out}.partial",
        },
        check=False,
        capture_output=True,
    )
    records = [json.loads(line) for line in Path(f"{out}.partial").read_text().splitlines()]
    assert [record["outcome"] for record in records] == ["pending"] * 3 + ["passed", "failed", "skipped"]
    collected = gpu_tests._collect(Path(f"{out}.partial"), "a0e77c7", CARD, 4)
    assert [(r.test.split("::")[1], r.outcome) for r in collected] == [
        ("test_good", "passed"),
        ("test_bad", "failed"),
        ("test_skipped", "skipped"),
    ]
    assert "1 == 2" in collected[1].reason and "no GPU" in collected[2].reason
