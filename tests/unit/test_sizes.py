"""Test the counts of `scripts/sizes.py` on made-up sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sizes.py"
spec = importlib.util.spec_from_file_location("sizes", SCRIPT)
sizes = importlib.util.module_from_spec(spec)
sys.modules["sizes"] = sizes
spec.loader.exec_module(sizes)


def test_type_checking_imports_count_in_import_cycles():
    files = {
        "te_fsdp.a": "from te_fsdp import b\n",
        "te_fsdp.b": "if TYPE_CHECKING:\n    from te_fsdp.c import C\n",
        "te_fsdp.c": "def f():\n    import te_fsdp.a\n",
        "te_fsdp.d": "from te_fsdp.a import x\n",
    }
    assert sizes.circles(files) == [["te_fsdp.a", "te_fsdp.b", "te_fsdp.c"]]
    assert sizes.circles({**files, "te_fsdp.c": ""}) == []


def test_helpers_used_once_are_listed():
    text = "def _once():\n    pass\n\ndef _twice():\n    pass\n\n_once(), _twice(), _twice()\n"
    assert sizes.helpers_used_once({"te_fsdp.a": text}) == {"te_fsdp.a._once": 2}


def test_fields_and_comments_are_counted():
    text = "class State:\n    a: int\n    b: Any = None  # why\n    c = 1\n"
    assert sizes.fields_of(text, "State") == (2, 1)
    assert sizes.comment_lines({"te_fsdp.a": text}) == 1


def test_spine_equals_the_documented_reading_order():
    page = "## Read these files in this order\n\n1. `a.py`, `b/c.py`: text of `d.py`.\n\n## Next\n\n1. `e.py`: no.\n"
    assert sizes.spine_of(page) == ["te_fsdp", "te_fsdp.errors", "te_fsdp.a", "te_fsdp.b.c"]
