"""Bytes on the wire, by kind of collective and dtype."""

from __future__ import annotations

import collections
from collections.abc import Iterable

import torch
from harness.collectives import Collective


def travelled(calls: Iterable[Collective]) -> collections.Counter[tuple[str, str]]:
    """Bytes by (kind, dtype): of the gathered, the scattered, or the reduced whole."""
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    for call in calls:
        if call.kind != "broadcast":  # copies over tp, which no policy is about
            seen[call.kind, call.dtype] += call.bytes
    return seen


def padded(model: torch.nn.Module, unit: str, ranks: int) -> int:
    """Elements of a unit's parameters as FSDP2 sends them: rows filled up to a multiple of the ranks."""
    total = 0
    for parameter in model.get_submodule(unit).parameters():
        rows, rest = parameter.shape[0], parameter.shape[1:].numel()
        total += -(-rows // ranks) * ranks * rest
    return total
