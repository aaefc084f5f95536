"""What a manifest may say: the kind of every value in it, checked when it is read and before it is written.

A rule is a :class:`Kind`; ``[rule]``, a list; ``{...: rule}``, an object of any names; ``{"a": rule, "b?": rule}``, an
object of these names, of which ``b`` may be absent; or a function that is given the value and returns its rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["SCHEMA", "InvalidError", "check_manifest"]

#: Nested levels. Python's own limit on recursion is not far above.
_DEEPEST = 200


class InvalidError(ValueError):
    """A value of another kind than a manifest has there; the text names the place."""


class Kind(NamedTuple):
    """Values without parts.

    Attributes:
        expected: In words.
        fits: Whether a value is one.
    """

    expected: str
    fits: Callable[[Any], bool]


def _check(value: Any, rule: Any, where: str, depth: int = 0) -> None:
    if isinstance(rule, Kind):
        if not rule.fits(value):
            raise _refuse(where, rule.expected, value)
    elif callable(rule):
        _check(value, rule(value), where, depth)
    elif depth > _DEEPEST:
        raise _refuse(where[:80], f"at most {_DEEPEST} levels", "more")
    elif isinstance(rule, list):
        if type(value) is not list:
            raise _refuse(where, "a list", value)
        for index, item in enumerate(value):
            _check(item, rule[0], f"{where}[{index}]", depth + 1)
    else:
        if type(value) is not dict:
            raise _refuse(where, "an object", value)
        rules = {str(name).rstrip("?"): one for name, one in rule.items()}
        required = [name for name in rule if name is not ... and not name.endswith("?")]
        if not value.keys() >= set(required) or (... not in rule and value.keys() - rules):
            raise _refuse(where, f"the keys {', '.join(required)}", sorted(value))
        for name, item in value.items():
            _check(name, _TEXT, f"a name in {where}")
            _check(item, rules[name] if ... not in rule else rule[...], f"{where}.{name}", depth + 1)


def _refuse(where: str, expected: str, value: Any) -> InvalidError:
    text = ascii(value)
    return InvalidError(f"{where}: expected {expected}, got {text if len(text) < 80 else text[:77] + '...'}")


def _encodes(value: Any) -> bool:
    return type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value)


def _whole(low: int = 0, high: int = 2**63 - 1) -> Kind:
    # type() and not isinstance(): True is no number.
    return Kind(f"a whole number from {low}", lambda value: type(value) is int and low <= value <= high)


def _one_of(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", lambda value: type(value) is str and value in words)


def _or_null(rule: Any) -> Callable[[Any], Any]:
    return lambda value: _NULL if value is None else rule


def _dtype(prefix: str = "") -> Kind:
    def fits(value: Any) -> bool:
        known = type(value) is str and value.startswith(prefix)
        return known and isinstance(getattr(torch, value.removeprefix(prefix), None), torch.dtype)

    return Kind("the name of a dtype", fits)


def _is_file(value: Any) -> bool:
    if type(value) is not list or len(value) not in (2, 3) or any(type(v) is not int or v < 0 for v in value):
        return False
    return value[1] < 2**32 and value[2:] <= value[:1] and value[0] < 2**63


def _files(value: Any) -> Any:
    names = value if type(value) is dict else ()
    bad = [name for name in names if name in ("", ".", "..") or {"/", "\0"} & set(name)]
    return Kind(f"names of files without {bad[0]!a}", lambda value: False) if bad else {...: _FILE}


def _encoded(value: Any) -> Any:
    """A value of ``extra`` or an option of an optimizer, see :mod:`te_fsdp.checkpoint.extra`."""
    if type(value) is list:
        return [_encoded]
    if type(value) is dict:
        marked = next((name for name in _MARKED if name in value), None)
        return {...: _encoded} if marked is None else {marked: _MARKED[marked]}
    return _PLAIN


def _semantics(value: Any) -> Any:
    kinds = value.get("kinds") if type(value) is dict else None
    most = len(kinds) - 1 if type(kinds) is list else 0
    return {"kinds": [_MODULE_KIND], "modules": {...: _whole(0, most)}, "recipes?": [_TEXT]}


_NULL = Kind("null", lambda value: value is None)
_TEXT = Kind("text", _encodes)
_FLAG = Kind("true or false", lambda value: type(value) is bool)
_PLAIN = Kind(
    "a plain value", lambda value: value is None or type(value) in (bool, int, float) or _encodes(value)
)
_FILE = Kind("bytes, CRC-32 and perhaps where the table begins", _is_file)
_TENSOR = {"shape": [_whole()], "dtype": _dtype()}
_WEIGHT = {**_TENSOR, "layout": _or_null(_TEXT)}
_QUANTIZED = {**_WEIGHT, "format": _TEXT, "components": [_TEXT]}
_EXPERTS = {"experts?": [_whole()], "scalar?": _FLAG}
_MODULE_KIND = {"kind": _TEXT, "library": _TEXT, "settings": {...: _encoded}}
_MARKED = {
    "te_fsdp.tuple": [_encoded],
    "te_fsdp.per_rank": [_encoded],
    "te_fsdp.tensor": {**_TENSOR, "key": _TEXT, "dtype": _dtype("torch.")},
}
_DELAYED = {
    "num_gemms": _whole(1),
    "margin": Kind("a number", lambda value: type(value) in (int, float)),
    "fp8_format": _one_of("E4M3", "E5M2", "HYBRID"),
    "amax_history_len": _whole(1),
    "amax_compute_algo": _one_of("max", "most_recent"),
    "reduce_amax": _FLAG,
}


def _parameter(value: Any) -> Any:
    quantized = type(value) is dict and value.get("format") is not None
    return _QUANTIZED if quantized else {**_WEIGHT, "format": _NULL}


def _state(value: Any) -> Any:
    plain = type(value) is dict and "value" in value
    return {**({"value": _encoded} if plain else _TENSOR), **_EXPERTS}


#: By field of the manifest.
SCHEMA: dict[str, Any] = {
    "versions": {...: _TEXT},
    "mesh": {...: _whole(1)},
    "saved_at": _whole(),
    "parameters": {...: _parameter},
    "buffers": {...: _TENSOR},
    "delayed": {...: _DELAYED},
    "number": _whole(),
    "optimizer": _or_null(
        {
            "class": _TEXT,
            "groups": [{"parameters": [_TEXT], "options": {...: _encoded}}],
            "state": {...: {...: _state}},
        }
    ),
    "extra": {...: _encoded},
    "files": _files,
    "extra_states": [_TEXT],
    "tied": {...: _TEXT},
    "format_version": _whole(1),
    "save_id": _TEXT,
    "semantics": _or_null(_semantics),
}


def check_manifest(body: dict[str, Any], required: set[str]) -> None:
    """Check the kind of every value.

    Args:
        body: By field.
        required: Fields that must be there.

    Raises:
        InvalidError: Names the first that is wrong.
    """
    unknown, absent = sorted(body.keys() - SCHEMA), sorted(required - body.keys())
    if unknown or absent:
        what = f"a field {unknown[0]!a} that no manifest has" if unknown else f"no field {absent[0]!r}"
        raise InvalidError(what)
    for name, value in body.items():
        _check(value, SCHEMA[name], name)
