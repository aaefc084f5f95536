"""The text of a failed run: ranks that failed, died or hang."""

from __future__ import annotations

from typing import Any

Answers = dict[int, tuple[str, Any]]


class BodyFailed(AssertionError):
    """A body failed on at least one rank.

    Attributes:
        answers: by rank, ("error", {"type", "message", "traceback"}), ("stuck", (waited, stacks)),
            ("died", exit code) or ("ok", ...).
    """

    def __init__(self, message: str, answers: Answers) -> None:
        super().__init__(message)
        self.answers = answers


def describe(body: str, world_size: int, answers: Answers, expected_error: bool = False) -> str:
    """Write one text about all ranks; ranks with equal reports share a paragraph."""
    kinds = {kind: sorted(rank for rank in answers if answers[rank][0] == kind) for kind in ("ok", "error")}
    if expected_error:
        head = (
            f"{body} must raise on all {world_size} ranks; it raised on {_ranks(kinds['error'])}"
            f" and returned normally on {_ranks(kinds['ok'])}"
        )
    else:
        head = f"{body} failed on {len(answers)} of {world_size} ranks"
    paragraphs: dict[str, list[int]] = {}
    for rank in sorted(answers):
        text = _paragraph(*answers[rank])
        if text:
            paragraphs.setdefault(text, []).append(rank)
    parts = [f"--- {_ranks(ranks)}: {text}" for text, ranks in paragraphs.items()]
    return "\n".join([head, *parts])


def _paragraph(kind: str, value: Any) -> str:
    if kind == "error":
        return f"{value['type']}: {value['message']}\n{value['traceback'].rstrip()}"
    if kind == "stuck":
        waited, stacks = value
        return f"stuck (no answer within {waited}), at\n{stacks}"
    if kind == "died":
        return f"the process died (exit code {value}; negative: a signal)"
    return ""


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
