"""Streams of torch.accelerator, which do not wait for events of torch.cuda. te_fsdp uses `event.wait`."""

from __future__ import annotations

import pytest
import torch
from quantization import stream_events


@pytest.mark.gpu
@pytest.mark.ranks(1)
def test_event_wait_orders_streams(pool):
    """If the first is 1.0, torch has mended it: remove the line of docs/upstream.md and the rule of test_house.py."""
    assert torch.cuda.is_available()
    for stream_waits, event_waits, none_waits in pool.run(stream_events.values_read, 1):
        assert (stream_waits, event_waits, none_waits) == (0.0, 1.0, 0.0)
