"""Check that errors in docs/troubleshooting.md are raised by the tests that mistakes.csv names."""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

import pytest

import te_fsdp
from tests.unit.commands import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
TABLE = ROOT / "tests/unit/mistakes.csv"


class Row(NamedTuple):
    """Quoted part of an error's message, class of the error, and a test that raises it."""

    text: str
    error: str
    test: str


def rows() -> list[Row]:
    """Return the rows of mistakes.csv."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def page_rows(page: str) -> list[list[str]]:
    """Return the cells (mistake, error) of the page's table, without headings."""
    section = page.split("## Mistakes and their errors")[1].split("\n### ")[0]
    lines = [
        line
        for line in section.splitlines()
        if line.startswith("| ") and not line.startswith(("| **", "| ---"))
    ]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[1:]]


def quoted_errors(page: str) -> list[str]:
    """Return each text that the page's table quotes from errors."""
    results = []
    for mistake, errors in page_rows(page):
        assert mistake and re.fullmatch(r'"[^"]+"(, "[^"]+")*', errors), errors
        results += errors.strip('"').split('", "')
    return results


def sources_of(test: str) -> list[str]:
    """Return the text of a test's file, and of the modules in its folder whose bodies it runs."""
    name, _, function = test.partition("::")
    # Files of one process and of several ranks may have one name.
    (path,) = (path for path in ROOT.glob(f"tests/**/{name}") if f"def {function}(" in path.read_text())
    text = path.read_text()
    beside = {path.parent / f"{module}.py" for module in re.findall(r"^import (\w+)", text, re.MULTILINE)}
    for package, modules in re.findall(r"^from (\w+) import ([\w, ]+)$", text, re.MULTILINE):
        beside |= {path.parent / package / f"{module.strip()}.py" for module in modules.split(",")}
    return [text, *(other.read_text() for other in sorted(beside) if other.exists())]


def joined(source: str) -> str:
    """Return the source with adjacent string literals joined."""
    return re.sub(r"[\"']\s*\n\s*f?r?[\"']", "", source)


def test_troubleshooting_page_quotes_each_error_once() -> None:
    quoted = quoted_errors(PAGE.read_text(encoding="utf-8"))
    assert len(quoted) == len(set(quoted)) >= 40
    assert set(quoted) == {row.text for row in rows()}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.text}-{row.test}")
def test_quoted_error_is_raised_by_its_test(row: Row) -> None:
    assert all(row)
    error = getattr(te_fsdp, row.error, None)
    # The emulation is a separate product with one error class.
    assert row.error == "EmulationError" or issubclass(error, te_fsdp.TeFsdpError), row.error
    sources = sources_of(row.test)
    assert any(row.text in text for source in sources for text in (source, joined(source))), row.text


def test_control_wrong_row_is_detected() -> None:
    row = rows()[0]
    with pytest.raises(AssertionError, match="no such words"):
        test_quoted_error_is_raised_by_its_test(row._replace(text="no such words"))
    with pytest.raises((AssertionError, ValueError)):
        test_quoted_error_is_raised_by_its_test(row._replace(test="test_nowhere.py::test_nothing"))
    page = PAGE.read_text(encoding="utf-8").replace(row.text, "no such words")
    assert set(quoted_errors(page)) != {row.text for row in rows()}
