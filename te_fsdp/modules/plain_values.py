"""Values of module settings as plain JSON."""

from __future__ import annotations

import enum
import inspect
import math
from typing import Any

import numpy as np
import torch

UNKNOWN = object()


def plain_value(value: Any) -> Any:
    """Return a value as JSON reads it back, with functions described."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        items = [plain_value(item) for item in value]
        return UNKNOWN if UNKNOWN in items else items
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    # The name of a function, method or class. Lambdas, closures and partials have none that identifies them.
    owner = getattr(value, "__self__", None)
    if inspect.ismethod(value) or (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{value.__name__}"
    if not (inspect.isroutine(value) or isinstance(value, type)):
        return UNKNOWN
    # The defaults of a local function are captured values too, as in ``def act(x, k=k)``.
    is_local = "<locals>" in getattr(value, "__qualname__", "")
    values = getattr(value, "__closure__", None) or (is_local and getattr(value, "__defaults__", None))
    name = getattr(value, "__name__", "<lambda>")  # partials are routines from Python 3.14 on
    return UNKNOWN if values or name == "<lambda>" else name
