"""Functions in words, which files can hold and which can be compared: ``partial(gelu, approximate='tanh')``."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch

#: Begins a text that does not tell all.
_UNTOLD = "<"
#: Parts of parts, and items, that a text has at most.
_DEEPEST, _MOST = 3, 16


def describe_function(function: Any, depth: int = 0) -> str:
    """A function in words: ``relu``, ``partial(gelu, approximate='tanh')``, ``Scaled(factor=2.0)``. Local operation.

    A lambda, as every function that closes over values, has a digest of its bytecode and constants
    (``<lambda 5d41402a>``), which another Python may give otherwise. Of another object that can be called, class and
    public attributes are told. ``depth``: of how many texts it is a part.
    """
    if depth > _DEEPEST:
        return "<...>"
    if isinstance(function, functools.partial):
        arguments = [_shown(one, depth) for one in function.args]
        parts = [describe_function(function.func, depth + 1), *arguments, *_named(function.keywords, depth)]
        text = f"partial({', '.join(parts)})"
    elif inspect.ismethod(function) or _is_apply(function):
        owner = function.__self__
        told = owner.__name__ if isinstance(owner, type) else _object(owner, depth)
        text = f"{told}.{function.__name__}"
    elif inspect.isroutine(function) or isinstance(function, type):
        has_code, closure = hasattr(function, "__code__"), getattr(function, "__closure__", None)
        # Defaults of a function in a function are values, too, as in ``def act(x, k=k)``.
        is_local = "<locals>" in getattr(function, "__qualname__", "")
        bound = closure or (is_local and getattr(function, "__defaults__", None))
        if not has_code or (function.__name__ != "<lambda>" and not bound):
            return function.__name__
        return f"<{function.__name__.strip('<>')} {_digest(function, depth)}>"
    else:
        text = _object(function, depth)
    return f"{_UNTOLD}{text}>" if _UNTOLD in text else text


def _is_apply(function: Any) -> bool:
    """Whether it is ``apply`` of an autograd function, which all have under one name; no method from torch 2.14 on."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _object(value: Any, depth: int) -> str:
    """Class and public attributes, and the name that scripted functions and torch's operators have."""
    if hasattr(value, "named_modules"):  # a module's own settings tell
        return type(value).__name__
    told = _named({k: v for k, v in getattr(value, "__dict__", {}).items() if not k.startswith("_")}, depth)
    names = [name for key in ("name", "__name__") if isinstance(name := getattr(value, key, None), str)]
    if names:
        told = [names[0], *(text for text in told if _UNTOLD not in text)]
    return f"{type(value).__name__}({', '.join(told)})"


def is_fully_described(text: Any) -> bool:
    """Whether a value is all there is to know: no text of :func:`describe_function` that has a digest, or nothing."""
    return not (isinstance(text, str) and text.startswith(_UNTOLD))


def _named(values: Mapping[str, Any], depth: int) -> list[str]:
    return [f"{name}={_shown(values[name], depth)}" for name in sorted(values)]


def _shown(value: Any, depth: int) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)) and len(value) <= _MOST and depth < _DEEPEST:
        return f"[{', '.join(_shown(one, depth + 1) for one in value)}]"
    # A module's own settings tell what it computes.
    is_function = callable(value) and not hasattr(value, "named_modules")
    return describe_function(value, depth + 1) if is_function else f"<{type(value).__name__}>"


def _digest(function: Any, depth: int) -> str:
    """Of bytecode, constants, defaults and what it closes over."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    told = _constants(function.__code__), [_shown(one, depth) for one in held]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:8]


def _constants(value: Any) -> Any:
    """Code, or a constant, in what has the same text in every process: sets are printed in any order."""
    if isinstance(value, types.CodeType):
        return value.co_code, _constants(value.co_consts), value.co_names
    if isinstance(value, tuple):
        return [_constants(one) for one in value]
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value
