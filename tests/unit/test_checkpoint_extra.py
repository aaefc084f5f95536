"""Unusual values in ``extra``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError


def test_strided_nested_tensors(tmp_path: Path) -> None:
    """They have no sizes (kind: torch's internal error without the name of the value)."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"nested": nested})
    result = checkpoint.load(tmp_path / "a", nn.Linear(2, 2))["nested"]
    assert all(torch.equal(*pair) for pair in zip(result.unbind(), nested.unbind(), strict=True))


def test_containers_in_themselves(tmp_path: Path) -> None:
    """(kind: RecursionError without the name of the value)."""
    own: list[Any] = []
    own.append(own)
    deep: Any = 1
    for _ in range(5000):
        deep = {1: deep}
    for value in (own, deep):
        with pytest.raises(CheckpointError, match="extra: nested containers.*a value that contains itself"):
            checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"value": value})
