"""Text descriptions of functions, for files and comparisons: ``partial(gelu, approximate='tanh')``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch

#: First character of an incomplete description.
_INCOMPLETE = "<"
#: Maximum nesting depth and number of items of a description.
_DEEPEST, _MOST = 3, 16


def describe_function(function: Any, depth: int = 0) -> str:
    """Return a description: ``relu``, ``partial(gelu, approximate='tanh')``, ``Scaled(factor=2.0)``. Local operation.

    A lambda or a closure is described by a digest of its bytecode and constants (``<lambda 5d41402a>``), which
    may differ between Python versions. Other callable objects are described by class and public attributes.
    ``depth`` is the nesting depth of the description.
    """
    if depth > _DEEPEST:
        return "<...>"
    if isinstance(function, functools.partial):
        arguments = [_shown(one, depth) for one in function.args]
        parts = [describe_function(function.func, depth + 1), *arguments, *_named(function.keywords, depth)]
        text = f"partial({', '.join(parts)})"
    elif inspect.ismethod(function) or _is_apply(function):
        owner = function.__self__
        parts = owner.__name__ if isinstance(owner, type) else _object(owner, depth)
        text = f"{parts}.{function.__name__}"
    elif inspect.isroutine(function) or isinstance(function, type):
        has_code, closure = hasattr(function, "__code__"), getattr(function, "__closure__", None)
        # Defaults of a nested function are captured values too, as in ``def act(x, k=k)``.
        is_local = "<locals>" in getattr(function, "__qualname__", "")
        bound = closure or (is_local and getattr(function, "__defaults__", None))
        if not has_code or (function.__name__ != "<lambda>" and not bound):
            return function.__name__
        return f"<{function.__name__.strip('<>')} {_digest(function, depth)}>"
    else:
        text = _object(function, depth)
    return f"{_INCOMPLETE}{text}>" if _INCOMPLETE in text else text


def _is_apply(function: Any) -> bool:
    """Return whether it is ``apply`` of an autograd function (a method until torch 2.13, the same name for all)."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _object(value: Any, depth: int) -> str:
    """Describe an object by class and public attributes, or by the name of a scripted function or torch operator."""
    if hasattr(value, "named_modules"):  # the module has settings of its own
        return type(value).__name__
    parts = _named({k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}, depth)
    names = [name for key in ("name", "__name__") if isinstance(name := getattr(value, key, None), str)]
    if names:
        parts = [names[0], *(text for text in parts if _INCOMPLETE not in text)]
    return f"{type(value).__name__}({', '.join(parts)})"


def is_fully_described(text: Any) -> bool:
    """Return whether a description is complete, without a digest."""
    return not (isinstance(text, str) and text.startswith(_INCOMPLETE))


def _named(values: Mapping[str, Any], depth: int) -> list[str]:
    return [f"{name}={_shown(values[name], depth)}" for name in sorted(values)]


def _shown(value: Any, depth: int) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)) and len(value) <= _MOST and depth < _DEEPEST:
        return f"[{', '.join(_shown(one, depth + 1) for one in value)}]"
    # A module is described by its own settings.
    is_function = callable(value) and not hasattr(value, "named_modules")
    return describe_function(value, depth + 1) if is_function else f"<{type(value).__name__}>"


def _digest(function: Any, depth: int) -> str:
    """Return a digest of a function's bytecode, constants, defaults and captured values."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    parts = _constants(function.__code__), [_shown(one, depth) for one in held]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def _constants(value: Any) -> Any:
    """Convert code or a constant to a form with a deterministic text. Sets print in arbitrary order."""
    if isinstance(value, types.CodeType):
        return value.co_code, _constants(value.co_consts), value.co_names
    if isinstance(value, tuple):
        return [_constants(one) for one in value]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value
