"""Test waits between streams while copies run on a side stream, with fakes that write a log."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_fsdp.collectives import async_work
from te_fsdp.collectives.async_work import Pending, SideStream

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream by name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.events = name, log, 0
        self.device = DEVICE

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> Event:
        self.events += 1
        return Event(f"{self.name} {self.events}", self.log)


class Event:
    """An event by name."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log


class Device:
    """The module of a device with streams."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.now = log, Stream("current", log)

    def Stream(self, device: torch.device) -> Stream:
        return Stream("aside", self.log)

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Any:
        before, self.now = self.now, stream
        yield
        self.now = before


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    result = Device([])
    monkeypatch.setattr(async_work.torch, "get_device_module", lambda kind: result)
    return result


def test_side_stream_waits_for_earlier_work_and_keeps_memory(device: Device) -> None:
    """Work starts after earlier work, ends before its event, keeps its memory, and is waited for by its reader."""
    log, side = device.log, SideStream()

    def begin() -> Pending[None]:
        log.append(f"begins on {device.now.name}")
        return Pending(lambda: log.append(f"ends on {device.now.name}"))

    touched: Any = SimpleNamespace(record_stream=lambda stream: log.append(f"kept for {stream.name}"))
    with side.after_current(DEVICE, [None, Event("another", log)]):
        first, _ = (side.start(begin, [touched, None]) for _ in range(2))
    once = ["begins on aside", "ends on aside", "kept for aside"]
    assert log == ["aside waits for current", "aside waits for another", *once, *once]
    first.wait()
    assert log[8:] == ["current waits for aside 1"]
