"""Text of ``te-fsdp ckpt inspect``: module settings, values of ``extra``, counts."""

from __future__ import annotations

import fnmatch
from typing import Any

from te_fsdp.modules.semantics import fold_names


def semantics_lines(recorded: dict[str, Any], pattern: str) -> list[str]:
    """Format the recorded module settings, one line per distinct combination."""
    modules: dict[int, list[str]] = {}
    for name, index in recorded["modules"].items():
        if recorded["kinds"][index]["settings"] and fnmatch.fnmatch(name, pattern):
            modules.setdefault(index, []).append(name)
    lines = [f"settings of {counted(sum(map(len, modules.values())), 'module')}:"] if modules else []
    for index, names in modules.items():
        kind = recorded["kinds"][index]
        lines.append(f"  {kind['library']}.{kind['kind']} ({fold_names(names)}): {pairs(kind['settings'])}")
    return lines


def pairs(values: dict[str, Any]) -> str:
    """Format names and values: ``"a=1, b=2"``."""
    return ", ".join(f"{key}={value}" for key, value in values.items())


def counted(count: int, noun: str) -> str:
    """Format a number with its noun: ``"1 module"``, ``"2 modules"``."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def short(value: Any) -> str:
    """Format a value of ``extra`` in at most 100 characters."""
    text = _readable(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _readable(value: Any) -> str:
    """Format a value of ``extra`` from its JSON form in the manifest, in Python's notation."""
    if isinstance(value, list):
        return f"[{', '.join(map(_readable, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    match value if len(value) == 1 else {}:
        case {"te_fsdp.tuple": items}:
            return f"({', '.join(map(_readable, items))})"
        case {"te_fsdp.tensor": {"shape": shape, "dtype": dtype}}:
            return f"tensor ({' x '.join(map(str, shape)) or 'scalar'}, {dtype.removeprefix('torch.')})"
        case {"te_fsdp.per_rank": values}:
            return f"{counted(len(values), 'value')}, one per rank"
        case {"te_fsdp.value": [kind, *content]}:
            return f"{kind}({', '.join(map(_readable, content))})"
    return f"{{{', '.join(f'{name}: {_readable(item)}' for name, item in value.items())}}}"
