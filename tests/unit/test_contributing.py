"""The table of CONTRIBUTING.md has each package or module of te_fsdp once."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def listed(page: str) -> Counter[str]:
    """Return the names in the first column of the table under "Where things go"."""
    section = page.partition("## Where things go")[2].partition("## Style")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return Counter(name for row in rows for name in re.findall(r"`(\w+)`", row))


def test_contributing_table_lists_each_package_and_module_once() -> None:
    package = ROOT / "te_fsdp"
    names = {path.stem for path in package.glob("*.py")} | {
        p.parent.name for p in package.glob("*/__init__.py")
    }
    assert listed((ROOT / "CONTRIBUTING.md").read_text()) == Counter(names - {"__init__"})


def test_control_wrong_contributing_table_is_detected() -> None:
    """Negative control: a missing, unknown or repeated name changes the result."""
    table = "## Where things go\n\n| where | contents |\n| --- | --- |\n| `cli`, `plan` | a `word` |\n| `plan` | b |\n"
    assert listed(table) == Counter({"cli": 1, "plan": 2})
