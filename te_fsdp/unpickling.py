"""Read pickles without running code in them: a pickle may only use the names in a table."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch


def check_numbers(data: bytes) -> None:
    """Raise UnpicklingError for an object number above the pickle's size, which is the length of Python's memo."""
    for code, number, _ in pickletools.genops(data):
        if code.name in ("PUT", "LONG_BINPUT") and number > len(data):  # type: ignore[operator]
            raise pickle.UnpicklingError(f"object number {number:,} in a pickle of {len(data):,} bytes")


# [Note: enums in pickles] Python 3.11.0 to 3.11.4 pickle the member of an enum by name, as ``getattr(class, "NAME")``.
# All other releases of 3.10 to 3.14 pickle it by value, as ``class(value)``. Torch pickles DCP's metadata with these
# defaults. Readers here accept both forms for the enums in their tables, and refuse ``getattr`` of anything else.
def get_member_of_class(enum: Any, name: Any) -> Enum:
    """Return a member of an enum, in place of ``builtins.getattr`` in pickles; raise UnpicklingError otherwise."""
    is_enum = isinstance(enum, type) and issubclass(enum, Enum) and isinstance(name, str)
    if not is_enum or name not in enum.__members__:
        raise pickle.UnpicklingError(f"getattr of {name!r}, which is not a member of an enum")
    return enum.__members__[name]


class TableUnpickler(pickle.Unpickler):
    """Unpickle with the objects of a table, by full name, and torch's dtypes. Errors call the pickle ``what``.

    ``None`` in the table stands for the object of that name. Other names, attributes that the pickle sets on classes,
    and :func:`check_numbers` raise UnpicklingError. Damaged data may raise any exception.
    """

    def __init__(self, data: bytes, allowed: Mapping[str, Any], label: str) -> None:
        check_numbers(data)
        super().__init__(io.BytesIO(data))
        self.allowed, self.what = allowed, label
        self.named: dict[type, dict[str, Any]] = {}  #: Attributes of the named classes

    def find_class(self, module: str, name: str) -> Any:
        """Return the table's object for a name; raise UnpicklingError if the table has none."""
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if full == "builtins.getattr":
            return partial(get_member_of_class)
        if full in self.allowed:
            entry = self.allowed[full]
            entry = super().find_class(module, name) if entry is None else entry
        elif module != "torch" or not isinstance(entry := getattr(torch, name, None), torch.dtype):
            raise pickle.UnpicklingError(f"{full} is not allowed in {self.what}")
        if isinstance(entry, type):
            self.named.setdefault(entry, dict(vars(entry)))
        elif isinstance(entry, FunctionType):
            entry = partial(entry)  # a pickle then sets attributes on this object
        return entry

    def load(self) -> Any:
        """Return the unpickled object; undo attributes that the pickle has set on classes, then raise."""
        changed, nothing = [], object()
        try:
            result = super().load()
        finally:  # a pickle may set attributes on the classes that it names
            for cls, before in self.named.items():
                for name in [n for n, value in vars(cls).items() if before.get(n, nothing) is not value]:
                    changed.append(f"{cls.__name__}.{name}")
                    if name in before:
                        setattr(cls, name, before[name])
                    else:
                        delattr(cls, name)
        if changed:
            raise pickle.UnpicklingError(
                f"it sets attributes {', '.join(changed)}, which {self.what} never contains"
            )
        return result
