"""Exceptions of te_fsdp: classes, the template of their text, checks of arguments.

All exceptions share one root class, with one subclass per kind of mistake. :func:`message` builds every error text
from one template: the problem with its module or parameter, the expected value, the actual value, and the fix.
Each subclass also derives from the matching built-in exception: ``ValueError`` for arguments, ``RuntimeError`` for
call order and state.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "CheckpointError",
    "CollectiveError",
    "GradientError",
    "InitError",
    "InputError",
    "MeshError",
    "OrderError",
    "PlacementError",
    "PrecisionError",
    "TeFsdpError",
    "message",
    "require_flag_fields",
    "require_flags",
    "require_integer",
    "require_kind",
    "require_number",
    "shorten",
    "suggest",
]


class TeFsdpError(Exception):
    """Root class of the errors that te_fsdp raises. Takes the arguments of :func:`message`, or a complete text."""

    def __init__(
        self, what: str = "", *, expected: object = None, got: object = None, why: str = "", fix: str = ""
    ) -> None:
        if expected is not None or got is not None or why or fix:
            what = message(what, expected=expected, got=got, why=why, fix=fix)
        # The text is the only argument, so that the error can be pickled for other ranks.
        super().__init__(what)


class MeshError(TeFsdpError, ValueError):
    """A mesh has the wrong size, number of axes, axis names or ranks."""


class PlacementError(TeFsdpError, ValueError):
    """A parameter has no placement rule, or its shape contradicts the rule."""


class OrderError(TeFsdpError, RuntimeError):
    """Calls were made in an order that would lose weights, updates or gradients."""


class InitError(TeFsdpError, RuntimeError):
    """A parameter or buffer is uninitialized, or ranks initialized it differently."""


class InputError(TeFsdpError, ValueError):
    """Ranks of one forward received different inputs, or identical inputs where they must differ."""


class CheckpointError(TeFsdpError, RuntimeError):
    """A checkpoint is missing, damaged or foreign, or cannot be loaded correctly onto this model and mesh."""


class CollectiveError(TeFsdpError, RuntimeError):
    """Only some ranks made a collective call, or ranks made different collective calls."""

    has_ended: bool = False  #: Whether a rank's process has ended, which each rank detects itself


class GradientError(TeFsdpError, ArithmeticError):
    """Gradients contain NaN or infinity, or differ between ranks that replicate the parameter."""


class PrecisionError(TeFsdpError, ValueError):
    """A dtype, recipe or quantization format cannot be used as requested."""


def message(what: str, *, expected: object = None, got: object = None, why: str = "", fix: str = "") -> str:
    """Build an error text from the template ``"layers.0.mlp: wrong tp_mesh: expected size 2, got size 4. Fix: ..."``.

    Args:
        what: The problem, with the name of the module or parameter.
        expected: The expected value. Omitted when ``None``.
        got: The actual value. Omitted when ``None``.
        why: One clause that says why it matters.
        fix: The call or setting that solves the problem.
    """
    text = what
    if expected is not None:
        text += f": expected {expected}"
    if got is not None:
        text += f"{',' if expected is not None else ':'} got {got}"
    text = text.rstrip(".") + "."
    if why:
        text += f" {why.rstrip('.')}."
    if fix:
        text += f" Fix: {fix}" if fix.endswith("...") else f" Fix: {fix.rstrip('.')}."
    return text


def suggest(word: object, options: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """Return the option that a misspelled value probably means, for an error message, never as the value.

    Args:
        word: The given value: a word in any case, with hyphens or underscores, or an enum member.
        options: The valid words.
        synonyms: Names used by other libraries, in lower case without separators, mapped to the option.

    Returns:
        An option, or the value from ``synonyms``. ``None`` if no option is close.
    """
    text = str(getattr(word, "name", word)).lower()
    plain = "".join(c for c in text if c.isalnum())
    if synonyms and plain in synonyms:
        return synonyms[plain]
    by_spelling = {"".join(c for c in option.lower() if c.isalnum()): option for option in options}
    # The options are short words: a ratio of 0.75 accepts one or two wrong letters.
    close = difflib.get_close_matches(plain, by_spelling, n=1, cutoff=0.75)
    return by_spelling[close[0]] if close else None


def require_flags(where: str, kind: type[TeFsdpError] = PlacementError, **arguments: object) -> None:
    """Raise unless arguments are bools (or NumPy bools): ``"false"``, ``"0"`` and 2 would count as true. Local.

    Raises:
        TeFsdpError: The class is ``kind``. The text names the call and the first argument that is not a bool.
    """
    for name, value in arguments.items():
        if isinstance(value, bool) or (type(value).__module__ == "numpy" and str(value) in ("True", "False")):
            continue
        raise kind(
            f"{where}: {name}",
            expected="True or False",
            got=f"{value!r} ({type(value).__name__})",
            why="Python treats any non-empty value as true, including the word 'false'"
            if type(value).__module__ == "builtins" and value
            else "",
            fix=f"{name}=True or {name}=False; if the value comes from a configuration file, convert it to bool first",
        )


def require_number(where: str, name: str, value: object, *, least: float, fix: str) -> None:
    """Raise unless an argument is a Python number, NumPy number or scalar tensor of at least ``least``. Local.

    Raises:
        PlacementError: The text names the call, the argument and the value.
    """
    is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    if isinstance(value, bool) or not is_number or math.isnan(float(value)) or float(value) < least:  # type: ignore[bad-argument-type]
        kind = "" if isinstance(value, numbers.Real) else f" ({type(value).__name__})"
        raise PlacementError(
            f"{where}: {name} must be a number of at least {least}", got=f"{value!r}{kind}", fix=fix
        )


def require_integer(where: str, name: str, value: object, *, least: int, most: int | None = None) -> None:
    """Raise unless an argument is an integer of Python or NumPy between two limits. Local operation.

    Raises:
        PlacementError: The text names the call, the argument and the value.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or int(value) < least or (most is not None and int(value) > most):  # type: ignore[bad-argument-type]
        raise PlacementError(
            f"{where}: {name}",
            expected=f"an integer of at least {least}" + ("" if most is None else f" and at most {most}"),
            got=f"{value!r:.80} ({type(value).__name__})",
            fix=f"{name}=int({name}) if the value comes from a configuration file",
        )


def require_kind(
    where: str,
    name: str,
    value: object,
    kinds: type | tuple[type, ...],
    *,
    expected: str,
    fix: str = "",
    error: type[TeFsdpError] = PlacementError,
) -> None:
    """Raise unless an argument is an instance of one of the classes. Local operation.

    Raises:
        TeFsdpError: The class is ``error``. The text names the call, the argument and its class.
    """
    if not isinstance(value, kinds):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise error(f"{where}: {name}", expected=expected, got=got, fix=fix)


def require_flag_fields(config: Any, where: str) -> None:
    """Call :func:`require_flags` on the bool fields of a dataclass."""
    flags = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.type in ("bool", bool)}
    require_flags(where, **flags)


def shorten(names: list[str], most: int = 5, between: str = ", ") -> str:
    """Join the first names, followed by the number of omitted names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
