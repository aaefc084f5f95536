"""Read pickles without running anything in them: each name that a pickle may use is in a table."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch


class UnknownNameError(pickle.UnpicklingError):
    """A pickle that wants something of no known name; the text is the name."""


def check_numbers(data: bytes) -> None:
    """UnpicklingError for a number of an object beyond the pickle's bytes: of that length Python makes its table."""
    for code, number, _ in pickletools.genops(data):
        if code.name in ("PUT", "LONG_BINPUT") and number > len(data):  # type: ignore[operator]
            raise pickle.UnpicklingError(f"object number {number:,} in a pickle of {len(data):,} bytes")


# [Note: enums in pickles] Python 3.11.0 to 3.11.4 pickle the member of an enum by name, as ``getattr(class, "NAME")``.
# All other releases of 3.10 to 3.12 pickle it by value, as ``class(value)``. Torch pickles DCP's metadata with these
# defaults. Readers here accept both forms for the enums in their tables, and refuse ``getattr`` of anything else.
class EnumNames:
    """Stand for an enum in a table of names. See [Note: enums in pickles]."""

    def __init__(self, by_value: Callable[[Any], Any], members: Mapping[str, Any]) -> None:
        self._by_value, self._members = by_value, members

    def __call__(self, value: Any) -> Any:
        """Return the member of this value."""
        return self._by_value(value)

    def member(self, name: Any) -> Any:
        """Return the member of this name; raise UnpicklingError if the enum has none."""
        if not isinstance(name, str) or name not in self._members:
            raise pickle.UnpicklingError(f"getattr of {name!r}, which is not a member of an enum")
        return self._members[name]


def get_enum_member(enum: Any, name: Any) -> Any:
    """Replace ``builtins.getattr`` in pickles: return the member of a known enum, and nothing else."""
    if not isinstance(enum, EnumNames):
        raise pickle.UnpicklingError("getattr of an object that is not an enum")
    return enum.member(name)


def get_member_of_class(enum: Any, name: Any) -> Enum:
    """Replace ``builtins.getattr`` in pickles that name enums themselves: return a member, and nothing else."""
    known = isinstance(enum, type) and issubclass(enum, Enum) and isinstance(name, str)
    if not known or name not in enum.__members__:
        raise pickle.UnpicklingError(f"getattr of {name!r}, which is not a member of an enum")
    return enum.__members__[name]


class TableUnpickler(pickle.Unpickler):
    """Unpickle with the names of a table. UnpicklingError: see :func:`check_numbers`."""

    def __init__(self, data: bytes, known: Mapping[str, Any]) -> None:
        check_numbers(data)
        super().__init__(io.BytesIO(data))
        self.known = known

    def find_class(self, module: str, name: str) -> Any:
        """Return the table's object for a name; raise UnknownNameError if the table has none."""
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if full == "builtins.getattr":
            return partial(get_enum_member)
        if full in self.known:
            found = self.known[full]
            # A pickle may set attributes of what it names: of a new object each time, not of one of ours.
            if isinstance(found, type) and found.__module__.startswith("te_fsdp."):
                return type(name, (found,), {})
            if isinstance(found, EnumNames):
                return copy.copy(found)
            return partial(found) if isinstance(found, FunctionType | partial) else found
        if module in ("torch", "torch.storage"):
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype):
                return value
        raise UnknownNameError(full)
