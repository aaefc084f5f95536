"""The table of mistakes in docs/troubleshooting.md says what its tests make: each error's class, its words, the fix."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

import te_fsdp
from tests.unit.commands import ROOT

PAGE = ROOT / "docs/troubleshooting.md"


class Row(NamedTuple):
    """A mistake, the class of its error, words of its text, the fix, and the test that makes it."""

    mistake: str
    error: str
    words: str
    fix: str
    test: str


def rows() -> list[Row]:
    """The table, without its headings."""
    section = PAGE.read_text().split("## Mistakes, and what they end in")[1].split("\n### ")[0]
    lines = [
        line
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith(("| **", "| ---"))
    ]
    found = [Row(*(cell.strip() for cell in line.strip("| ").split(" | "))) for line in lines[1:]]
    return [
        row._replace(error=row.error.strip("`"), words=row.words.strip('"'), test=row.test.strip("`"))
        for row in found
    ]


def sources_of(test: str) -> list[str]:
    """The text of a test's file, and of the modules beside it whose bodies it runs."""
    name, _, function = test.partition("::")
    # Files of one process and of several ranks may have one name.
    (path,) = (path for path in ROOT.glob(f"tests/**/{name}") if f"def {function}(" in path.read_text())
    text = path.read_text()
    beside = {path.parent / f"{module}.py" for module in re.findall(r"^import (\w+)", text, re.MULTILINE)}
    for package, modules in re.findall(r"^from (\w+) import ([\w, ]+)$", text, re.MULTILINE):
        beside |= {path.parent / package / f"{module.strip()}.py" for module in modules.split(",")}
    return [text, *(other.read_text() for other in sorted(beside) if other.exists())]


def joined(source: str) -> str:
    """Source in which strings that follow each other are one."""
    return re.sub(r"[\"']\s*\n\s*f?r?[\"']", "", source)


def test_there_are_forty():
    assert len({row.mistake for row in rows()}) >= 40


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.mistake)
def test_a_row_is_true(row: Row) -> None:
    assert row.fix and row.words and all(row)
    error = getattr(te_fsdp, row.error, None)
    # The emulation, which is a product of its own, has one class.
    assert row.error == "EmulationError" or issubclass(error, te_fsdp.TeFsdpError), row.error
    sources = sources_of(row.test)
    assert any(row.words in text for source in sources for text in (source, joined(source))), row.words


def test_a_wrong_row_is_noticed() -> None:
    row = rows()[0]
    with pytest.raises(AssertionError, match="no such words"):
        test_a_row_is_true(row._replace(words="no such words"))
    with pytest.raises((AssertionError, ValueError)):
        test_a_row_is_true(row._replace(test="test_nowhere.py::test_nothing"))
