"""Check that the rows of tests/mutants match the sources, that their runner (`make mutants`) works."""

from __future__ import annotations

import builtins
import importlib.util
import re
import symtable
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


mutants = _load()
ROWS = mutants.rows()


def test_every_row_matches_the_sources():
    """A change of a guarded line must update its row."""
    problems = [f"{row.area}.toml: {row.fault}: {row.problem()}" for row in ROWS if row.problem()]
    assert not problems, "\n" + "\n".join(problems)


def _undefined(source: str) -> set[str]:
    """Return names that a module's code reads and does not define."""
    top = symtable.symtable(source, "module", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    read, tables = set[str](), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return read - defined - set(dir(builtins)) - {"__file__"}


def test_replacement_code_uses_defined_names():
    """A row with an undefined name is killed by NameError, whatever its test is about."""
    problems = []
    for row in ROWS:
        source = (ROOT / row.file).read_text()
        unknown = set(re.findall(r"[A-Za-z_]\w*", row.new)) - set(re.findall(r"\w+", source))
        if unknown and row.file.endswith(".py"):
            names = _undefined(source.replace(row.old, row.new, 1)) - _undefined(source)
            problems += [f"{row.area}.toml: {row.fault}: {name}" for name in sorted(names)]
    assert not problems, "\n" + "\n".join(problems)
    assert _undefined("import a\ndef f(x):\n    return a.b(x, missing, len(y))\ny = 1\n") == {"missing"}


def test_rows_are_unique():
    faults = [(row.file, row.old, row.new) for row in ROWS]
    assert len(set(faults)) == len(faults)


def test_every_package_has_mutants():
    packages = {path.parent.name for path in (ROOT / "te_fsdp").glob("*/__init__.py")}
    tried = {Path(row.file).parts[1] for row in ROWS}
    assert not packages - tried - {"huggingface", "sharding"}  # re-exports alone
    assert len(ROWS) >= 100


def test_rows_of_missing_packages_are_skipped(tree):
    _, row = tree
    rows = [row(needs=n) for n in ("", "json", "torch>=2.1", "no_such_package", "torch>=99")]
    assert mutants.without_absent(rows) == (rows[:3], ["no_such_package", "torch>=99"])


def test_forked_runs_distinguish_killed_and_survived(tree):
    folder, row = tree
    forked = mutants.Forked()
    try:
        verdicts = [mutants.judge(each, folder, forked).verdict for each in (row(), row(new="x + x"), row())]
        assert verdicts == [mutants.KILLED, mutants.SURVIVED, mutants.KILLED]
    finally:
        forked.close()


@pytest.fixture
def tree(tmp_path, monkeypatch, python):
    """Return a tree with one module and one test of it, and a way to make a row."""
    monkeypatch.setattr(sys, "executable", python)
    (tmp_path / "double.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "test_double.py").write_text(
        "from double import double\n\ndef test_two():\n    assert double(2) == 4\n"
    )
    monkeypatch.setattr(mutants.Mutant.problem, "__defaults__", (tmp_path,))

    def row(old="2 * x", new="3 * x", test="test_two", **more):
        return mutants.Mutant("area", "fault", "double.py", old, new, (f"test_double.py::{test}",), **more)

    return tmp_path, row


def test_a_detected_fault_is_killed_and_reverted(tree):
    folder, row = tree
    assert mutants.judge(row(), folder).verdict == mutants.KILLED
    assert "2 * x" in (folder / "double.py").read_text()


def test_an_undetected_fault_survives(tree):
    folder, row = tree
    assert mutants.judge(row(new="x ** 2"), folder).verdict == mutants.SURVIVED
    explained = row(new="x + x", survives="the same number")
    assert mutants.judge(explained, folder).verdict == mutants.EXPLAINED


@pytest.mark.parametrize(
    "change",
    [
        {"old": "4 * x"},  # nowhere
        {"old": "x"},  # in two places
        {"new": "2 *"},  # no Python
        {"test": "test_three"},
        {"survives": "it does not"},
    ],
    ids=["gone", "twice", "syntax", "test", "noticed"],
)
def test_outdated_row_is_stale(tree, change):
    folder, row = tree
    assert mutants.judge(row(**change), folder).verdict == mutants.STALE
