"""The one exception type of the emulation backend."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """Something that the emulation refuses: a wrong order of installation, an operand no kernel takes.

    Calls of extension functions that are not emulated raise ``NotImplementedError`` with the function's name
    instead.
    """


__all__ = ["EmulationError"]
