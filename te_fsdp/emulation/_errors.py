"""Exception type of the emulation."""

from __future__ import annotations


class EmulationError(RuntimeError):
    """Raised for unsupported use: a wrong order of installation, or an operand that no kernel supports.

    Calls of extension functions that are not emulated raise ``NotImplementedError`` with the function's name instead.
    """


__all__ = ["EmulationError"]
