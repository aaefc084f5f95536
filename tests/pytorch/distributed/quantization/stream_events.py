"""A write on one stream. A read on another stream may wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: About a quarter of a second on an H100.
CYCLES = 500_000_000


def values_read() -> tuple[float, float, float]:
    """Return the values that a second stream reads while the first one is about to write 1.0.

    The second one waits by `torch.accelerator.current_stream().wait_event`, by the event's own `wait`, or not at all.
    """
    return (
        _read(lambda event: torch.accelerator.current_stream().wait_event(event)),
        _read(lambda event: event.wait()),
        _read(lambda event: None),
    )


def _read(wait: Callable[[Any], Any]) -> float:
    value = torch.zeros(1, device="cuda")
    writes, reads = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writes):
        torch.cuda._sleep(CYCLES)
        value.fill_(1)
        event = writes.record_event()
    with torch.cuda.stream(reads):
        wait(event)
        result = value.clone()
    torch.cuda.synchronize()
    return result.item()
