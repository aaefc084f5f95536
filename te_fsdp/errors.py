"""The exceptions of te_fsdp: one root, one subclass per kind of mistake.

Every message follows one template, built by :func:`message` from what an exception is given: what is wrong and in
which module or parameter, what was expected, what was found, and the fix. The subclasses also derive from the built-in
exception a Python user would catch (``ValueError`` for arguments, ``RuntimeError`` for order and state).
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
    "meant",
    "message",
    "require_flag_fields",
    "require_flags",
    "require_number",
    "shorten",
]


class TeFsdpError(Exception):
    """Root of everything that te_fsdp raises on purpose: of what :func:`message` takes, or of a whole text."""

    def __init__(
        self, what: str = "", *, expected: object = None, got: object = None, why: str = "", fix: str = ""
    ) -> None:
        if expected is not None or got is not None or why or fix:
            what = message(what, expected=expected, got=got, why=why, fix=fix)
        super().__init__(what)  # the text alone: errors travel to other ranks as pickles


class MeshError(TeFsdpError, ValueError):
    """A mesh has the wrong size, number of axes, axis names or ranks."""


class PlacementError(TeFsdpError, ValueError):
    """A parameter has no placement rule, or its shape contradicts the rule."""


class OrderError(TeFsdpError, RuntimeError):
    """Calls came in an order that would lose weights, updates or gradients."""


class InitError(TeFsdpError, RuntimeError):
    """A parameter or buffer was left uninitialised, or ranks initialised it differently."""


class InputError(TeFsdpError, ValueError):
    """Ranks that compute one forward together were given different inputs, or the same where each has its part."""


class CheckpointError(TeFsdpError, RuntimeError):
    """A checkpoint is missing, damaged, foreign, or cannot be loaded right onto this model and mesh."""


class CollectiveError(TeFsdpError, RuntimeError):
    """A call that all ranks must make was made by some of them alone, or ranks made different ones."""


class GradientError(TeFsdpError, ArithmeticError):
    """Gradients hold NaN or infinity, or differ over ranks that each hold the whole parameter."""


class PrecisionError(TeFsdpError, ValueError):
    """A dtype, recipe or quantization format cannot be used as asked."""


def message(what: str, *, expected: object = None, got: object = None, why: str = "", fix: str = "") -> str:
    """Build an error text in one shape: ``"layers.0.mlp: wrong tp_mesh: expected size 2, got size 4. Fix: ..."``.

    Args:
        what: The problem, with the name of the module or parameter.
        expected: What was expected; left out when ``None``.
        got: What was found; left out when ``None``.
        why: One clause on why it matters.
        fix: The call or setting that cures it.
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


def meant(word: object, options: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str | None:
    """The option that a word probably stands for, to be named in an error; never taken without asking.

    Args:
        word: What was given: a word in any case, with hyphens or underscores, or a member of an enum.
        options: The words there are.
        synonyms: Other libraries' words, in lower case without separators, and what each is here.

    Returns:
        An option, or what ``synonyms`` has; ``None`` if nothing is near.
    """
    text = str(getattr(word, "name", word)).lower()
    plain = "".join(c for c in text if c.isalnum())
    if synonyms and plain in synonyms:
        return synonyms[plain]
    known = {"".join(c for c in option.lower() if c.isalnum()): option for option in options}
    # A ratio of 0.75 lets one or two letters of these short words be wrong, and no more.
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.75)
    return known[near[0]] if near else None


def require_flags(where: str, kind: type[TeFsdpError] = PlacementError, **given: object) -> None:
    """Raise unless arguments are True or False (numpy's too): ``"false"``, ``"0"`` and 2 would count as true. Local.

    Raises:
        TeFsdpError: Of the class ``kind``; it names the call and the first argument that is neither.
    """
    for name, value in given.items():
        if isinstance(value, bool) or (type(value).__module__ == "numpy" and str(value) in ("True", "False")):
            continue
        raise kind(
            f"{where}: {name}",
            expected="True or False",
            got=f"{value!r} ({type(value).__name__})",
            why="Python takes whatever is not empty for true, the word 'false' too" if value else "",
            fix=f"{name}=True or {name}=False; of a word, such as one of a configuration file, compare it first",
        )


def require_number(where: str, name: str, value: object, *, least: float, fix: str) -> None:
    """Raise unless an argument is a number of at least ``least``: a Python or NumPy number, or a scalar tensor. Local.

    Raises:
        PlacementError: It names the call, the argument and what was passed.
    """
    is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    if isinstance(value, bool) or not is_number or math.isnan(float(value)) or float(value) < least:  # type: ignore[bad-argument-type]
        kind = "" if isinstance(value, numbers.Real) else f" ({type(value).__name__})"
        raise PlacementError(
            f"{where}: {name} must be a number of at least {least}", got=f"{value!r}{kind}", fix=fix
        )


def require_flag_fields(given: Any, where: str) -> None:
    """:func:`require_flags` of the fields of a dataclass that are flags."""
    flags = {
        one.name: getattr(given, one.name) for one in dataclasses.fields(given) if one.type in ("bool", bool)
    }
    require_flags(where, **flags)


def shorten(names: list[str], most: int = 5, between: str = ", ") -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
