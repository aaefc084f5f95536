"""Test unusual values in ``extra``."""

from __future__ import annotations

import collections
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError


def test_nested_tensors_in_extra_round_trip_or_raise(tmp_path: Path) -> None:
    """Nested tensors have no sizes. Bug class: torch's internal error, which does not name the value."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)])
    if not _is_read_weights_only(nested):  # torch 2.15
        with pytest.raises(CheckpointError, match="extra/nested: cannot be stored"):
            checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"nested": nested})
        return
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"nested": nested})
    result = checkpoint.load(tmp_path / "a", nn.Linear(2, 2))["nested"]
    assert all(torch.equal(*pair) for pair in zip(result.unbind(), nested.unbind(), strict=True))


def _is_read_weights_only(value: Any) -> bool:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def test_extra_rejects_recursive_containers(tmp_path: Path) -> None:
    """Bug class: RecursionError that does not name the value."""
    own: list[Any] = []
    own.append(own)
    deep: Any = 1
    for _ in range(5000):
        deep = {1: deep}
    for value in (own, deep):
        with pytest.raises(CheckpointError, match="extra: nested containers.*a value that contains itself"):
            checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra={"value": value})


def test_defaultdicts_keep_their_factory(tmp_path: Path) -> None:
    """Defaultdicts keep their factory. Factories that cannot be stored by name raise."""
    losses = collections.defaultdict(list, {"a": [1.0, torch.ones(2)], 3: [2]})
    counts = collections.defaultdict(int, {"b": collections.defaultdict(None, {"c": {1, 2}})})
    extra = {"losses": losses, "counts": counts, "rank": checkpoint.PerRank(collections.defaultdict(set))}
    checkpoint.save(tmp_path / "a", nn.Linear(2, 2), extra=extra)
    loaded = checkpoint.load(tmp_path / "a", nn.Linear(2, 2))
    assert repr(dict(loaded)) == repr({**extra, "rank": collections.defaultdict(set)})
    loaded["losses"]["new"].append(1)
    loaded["counts"]["new"] += 1

    class Of(dict[str, int]):
        """A class of the user."""

    for factory in (lambda: 0, Of, torch.zeros):
        text = (
            "extra/value: a defaultdict: expected one of the factories None, bool, .*, got .*Fix: store dict"
        )
        with pytest.raises(CheckpointError, match=text):
            value = collections.defaultdict(factory)  # type: ignore[arg-type]
            checkpoint.save(tmp_path / "b", nn.Linear(2, 2), extra={"value": value})
