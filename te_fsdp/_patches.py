"""What a row of the tables of patches says: :mod:`te_fsdp._te_patches` and :mod:`te_fsdp._fsdp2_patches`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Patch", "markdown"]


@dataclass(frozen=True)
class Patch:
    """An attribute of another library's class or object that te_fsdp replaces.

    Attributes:
        owner: Whose attribute.
        attribute: Its name.
        why: What te_fsdp's own does besides, or instead.
        shown_by: Test that tells whether it is still needed: that shows the fault on the stock library, or that fails
            without the patch; file and name.
        upstream: How the passage on the fault begins in ``docs/upstream.md``; empty where there is no fault, only no
            public way.
        versions: Versions that need it, of those that te_fsdp supports.
    """

    owner: str
    attribute: str
    why: str
    shown_by: str
    upstream: str = ""
    versions: str = "all"


def markdown(patches: Iterable[Patch]) -> str:
    """A table of patches as ``docs/upstream.md`` has it."""
    lines = ["| whose | attribute | what for | needed by | shown by |", "| --- | --- | --- | --- | --- |"]
    for patch in patches:
        lines.append(
            f"| {patch.owner} | `{patch.attribute}` | {patch.why} | {patch.versions} | `{patch.shown_by}` |"
        )
    return "\n".join(lines)
