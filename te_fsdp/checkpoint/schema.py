"""What a manifest may say: the kind of every value in it, checked once, when it is read and before it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["SCHEMA", "InvalidError", "check_manifest"]

#: Raises :class:`InvalidError` unless a value is of its kind; told the value and where it is.
Rule = Callable[[Any, str], None]
#: Levels of nested values in ``extra``; Python's own limit on recursion is not far above.
_DEEPEST = 200


class InvalidError(ValueError):
    """A value of another kind than a manifest has there; the text names the place."""


def _refuse(where: str, expected: str, value: Any) -> InvalidError:
    text = ascii(value)
    return InvalidError(f"{where}: expected {expected}, got {text if len(text) < 80 else text[:77] + '...'}")


def _is(kind: type | tuple[type, ...], what: str) -> Rule:
    kinds = kind if isinstance(kind, tuple) else (kind,)

    def check(value: Any, where: str) -> None:
        if type(value) not in kinds:  # exactly: True is no number
            raise _refuse(where, what, value)

    return check


def _text(value: Any, where: str) -> None:
    if type(value) is not str or (not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value)):
        raise _refuse(where, "text", value)


def _whole(low: int = 0, high: int = 2**63 - 1) -> Rule:
    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _refuse(where, f"a whole number from {low}", value)

    return check


def _one_of(*words: Any) -> Rule:
    def check(value: Any, where: str) -> None:
        if type(value) is not str or value not in words:
            raise _refuse(where, f"one of {', '.join(words)}", value)

    return check


def _or_null(rule: Rule) -> Rule:
    return lambda value, where: None if value is None else rule(value, where)


def _list(rule: Rule, least: int = 0) -> Rule:
    def check(value: Any, where: str) -> None:
        if type(value) is not list or len(value) < least:
            raise _refuse(where, f"a list of at least {least}" if least else "a list", value)
        for index, item in enumerate(value):
            rule(item, f"{where}[{index}]")

    return check


def _map(rule: Rule, key: Rule = _text) -> Rule:
    def check(value: Any, where: str) -> None:
        if type(value) is not dict:
            raise _refuse(where, "an object", value)
        for name, item in value.items():
            key(name, f"a name in {where}")
            rule(item, f"{where}.{name}")

    return check


def _record(required: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None) -> Rule:
    rules = {**required, **(optional or {})}

    def check(value: Any, where: str) -> None:
        if type(value) is not dict:
            raise _refuse(where, "an object", value)
        if not required.keys() <= value.keys() <= rules.keys():
            raise _refuse(where, f"the keys {', '.join(required)}", sorted(value))
        for name, item in value.items():
            rules[name](item, f"{where}.{name}")

    return check


def _dtype(value: Any, where: str) -> None:
    if type(value) is not str or not isinstance(getattr(torch, value, None), torch.dtype):
        raise _refuse(where, "the name of a dtype", value)


def _file_name(value: Any, where: str) -> None:
    _text(value, where)
    if value in ("", ".", "..") or "/" in value or "\0" in value:
        raise _refuse(where, "the name of a file", value)


def _file(value: Any, where: str) -> None:
    _list(_whole(), 2)(value, where)
    if len(value) > 3 or value[1] >= 2**32 or value[2:] > value[:1]:
        raise _refuse(where, "bytes, CRC-32 and perhaps where the table begins", value)


def _parameter(value: Any, where: str) -> None:
    quantized = type(value) is dict and value.get("format") is not None
    (_QUANTIZED if quantized else _PLAIN)(value, where)


def _state(value: Any, where: str) -> None:
    plain = type(value) is dict and "value" in value
    (_STATE_VALUE if plain else _STATE_TENSOR)(value, where)


def _encoded(value: Any, where: str, depth: int = 0) -> None:
    """A value of ``extra`` or an option of an optimizer, see :mod:`te_fsdp.checkpoint.extra`."""
    if depth > _DEEPEST:
        raise _refuse(where[:80], f"at most {_DEEPEST} levels", "more")
    if type(value) is list:
        items = [(f"{where}/{index}", item) for index, item in enumerate(value)]
    elif type(value) is dict:
        marked = next((key for key in value if key in _MARKED), None)
        (_ANY_NAMES if marked is None else _record({marked: _MARKED[marked]}))(value, where)
        items = [(f"{where}/{key}", item) for key, item in value.items() if marked != "te_fsdp.tensor"]
    else:
        items = []
        if value is not None:
            (_text if type(value) is str else _is((bool, int, float), "a plain value"))(value, where)
    for at, item in items:
        _encoded(item, at, depth + 1)


def _semantics(value: Any, where: str) -> None:
    _record({"kinds": _list(_record(_KIND)), "modules": _map(_whole())}, {"recipes": _list(_text)})(
        value, where
    )
    _map(_whole(0, len(value["kinds"]) - 1))(value["modules"], f"{where}.modules")


_ANY_NAMES = _map(lambda value, where: None)
_SHAPE = _list(_whole())
_TENSOR = {"shape": _SHAPE, "dtype": _dtype}
_EXPERTS = {"experts": _list(_whole()), "scalar": _is(bool, "true or false")}
_WEIGHT = {**_TENSOR, "layout": _or_null(_text)}
_PLAIN = _record({**_WEIGHT, "format": _is(type(None), "null")})
_QUANTIZED = _record({**_WEIGHT, "format": _text, "components": _list(_text, 1)})
_STATE_VALUE = _record({"value": _encoded}, _EXPERTS)
_STATE_TENSOR = _record(_TENSOR, _EXPERTS)
_STORED = {"key": _text, "shape": _SHAPE, "dtype": lambda v, w: _dtype(str(v).removeprefix("torch."), w)}
_MARKED = {
    "te_fsdp.tuple": _is(list, "a list"),
    "te_fsdp.per_rank": _is(list, "a list"),
    "te_fsdp.tensor": _record(_STORED),
}
_DELAYED = {
    "num_gemms": _whole(1),
    "margin": _is((int, float), "a number"),
    "fp8_format": _one_of("E4M3", "E5M2", "HYBRID"),
    "amax_history_len": _whole(1),
    "amax_compute_algo": _one_of("max", "most_recent"),
    "reduce_amax": _is(bool, "true or false"),
}
_KIND = {"kind": _text, "library": _text, "settings": _map(_encoded)}
_GROUP = {"parameters": _list(_text), "options": _map(_encoded)}
_OPTIMIZER = {"class": _text, "groups": _list(_record(_GROUP)), "state": _map(_map(_state))}

#: By field of the manifest.
SCHEMA: dict[str, Rule] = {
    "versions": _map(_text),
    "mesh": _map(_whole(1)),
    "saved_at": _whole(),
    "parameters": _map(_parameter),
    "buffers": _map(_record(_TENSOR)),
    "delayed": _map(_record(_DELAYED)),
    "optimizer": _or_null(_record(_OPTIMIZER)),
    "extra": _map(_encoded),
    "files": _map(_file, _file_name),
    "extra_states": _list(_text),
    "tied": _map(_text),
    "format_version": _whole(1),
    "save_id": _text,
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
        SCHEMA[name](value, name)
