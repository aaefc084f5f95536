"""Ids of parametrized cases whose parameters pytest would only number (``axes0``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Longer values keep pytest's number.
MAX_LENGTH = 60


def pytest_make_parametrize_id(val: Any, argname: str) -> str | None:
    """Return a readable id for a dtype, a mapping or a sequence, or ``None`` for pytest's own id."""
    if type(val).__name__ not in ("dtype", "mappingproxy", "dict", "tuple", "list", "set", "frozenset"):
        return None
    text = _text(val) if not hasattr(val, "__len__") or len(val) else f"no {argname}"
    return text if len(text) <= MAX_LENGTH else None


def _text(value: Any) -> str:
    """Return a short text: ``tp=2,cp=2`` for a mapping, ``2x3`` for integers, ``float32`` for a dtype."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_text(entry)}" for key, entry in value.items())
    if isinstance(value, (set, frozenset)):
        return ",".join(sorted(map(_text, value)))
    if isinstance(value, (tuple, list)):
        joint = "x" if all(type(entry) is int and entry >= 0 for entry in value) else ","
        nested = (
            f"({_text(entry)})" if isinstance(entry, (tuple, list)) else _text(entry) for entry in value
        )
        return joint.join(nested)
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.")
