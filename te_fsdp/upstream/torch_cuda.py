"""Private names of ``torch.cuda``; torch 2.11 to 2.15."""

from __future__ import annotations

import torch


def device_sleep(milliseconds: float) -> None:
    """Let the current stream of the GPU wait (``torch.cuda._sleep``), at about 2 million cycles per millisecond."""
    torch.cuda._sleep(int(2e6 * milliseconds))
