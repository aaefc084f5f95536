"""Test records of a plain DCP directory that extend past the end of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest

from te_fsdp.checkpoint.lazy_tensors import DcpRecord
from te_fsdp.checkpoint.storage import resolve_path


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_record_beyond_the_end_of_the_file_is_detected(tmp_path: Path, place: str) -> None:
    file: Any = tmp_path / "a.distcp"
    file.write_bytes(b"0123456789")
    if place == "memory":
        fsspec.filesystem("memory").pipe("/short/a.distcp", b"0123456789")
        file = resolve_path("memory://short/a.distcp")
    assert DcpRecord(file, "weight", 4, 20).has_changed()
