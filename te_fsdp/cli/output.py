"""What commands print: tables for people on a terminal or in a log, JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["human_bytes", "print_json", "print_lines", "print_table"]


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    json.dump(_finite(value), sys.stdout, indent=1, allow_nan=False, default=str)
    sys.stdout.write("\n")


def _finite(value: Any) -> Any:
    """Infinities and NaN, which JSON lacks, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _console() -> Any:
    from rich.console import Console

    # In a pipe rich would assume 80 columns, and fold the names of parameters.
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()
) -> None:
    """A table on stdout.

    Args:
        title: Above it.
        columns: Headings.
        rows: Cells; shown with ``str``.
        right: Headings of columns that are aligned to the right.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text: names may hold brackets, which rich would take for markup.
        table.add_row(*(Text(str(cell)) for cell in row))
    _console().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Plain lines on stdout."""
    for line in lines:
        print(line)


def human_bytes(count: int) -> str:
    """``"1.5 GB"`` of 1500000000."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
