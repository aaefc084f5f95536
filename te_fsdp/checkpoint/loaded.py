"""What a load gives back: the user's extra, and an account of what was taken, converted and left."""

from __future__ import annotations

from typing import Any

__all__ = ["Loaded"]


class Loaded(dict[str, Any]):
    """What ``save`` was given as ``extra``, and what the load did.

    Attributes:
        left: Name of a tensor, module or optimizer state that was not loaded -> why.
        converted: Name -> from what to what, and where the values came from.
        notes: Other things that came from elsewhere than usual, in words.
    """

    def __init__(
        self,
        extra: dict[str, Any] | None = None,
        *,
        left: dict[str, str] | None = None,
        converted: dict[str, str] | None = None,
        notes: list[str] | None = None,
    ) -> None:
        super().__init__(extra or {})
        self.left: dict[str, str] = dict(left or {})
        self.converted: dict[str, str] = dict(converted or {})
        self.notes: list[str] = list(notes or [])

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left."""
        return not self.left
