"""The distributed tests in several processes of pytest, with `-n` of pytest-xdist: each has its own pool.

Ranks wait for each other for a third of a run, which the ranks of a second pool can use. `conftest` imports the hooks
of this file.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from .devices import device_type
from .pool import Timing

MOST = 2
"""Pools that `-n auto` starts at most. Eight ranks take 3 GB."""
_TIMINGS = "te_fsdp_timings"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of pools for `-n auto`: one if ranks use GPUs."""
    return 0 if device_type() == "cuda" else min(MOST, os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute the tests of a file together, in the order of collection: they share saved files."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by default xdist begins with the file that has the most tests
    return LoadFileScheduling(config, log)


def send_timings(config: pytest.Config, timings: list[Timing]) -> None:
    """Send, from a process that `-n` has started, the durations in its pool to the first process."""
    if hasattr(config, "workeroutput"):
        config.workeroutput[_TIMINGS] = [dataclasses.astuple(timing) for timing in timings]


def received_timings(node: Any) -> list[Timing]:
    """Return, in the first process, the data that an ending process has sent."""
    return [Timing(*values) for values in getattr(node, "workeroutput", {}).get(_TIMINGS, [])]
