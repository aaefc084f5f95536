"""What waits for what while new weights arrive on a stream; devices and streams are stand-ins that write a log."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_fsdp import _fsdp2
from te_fsdp.move import pending
from te_fsdp.move.pending import Pending, PendingGathers, UnitGather

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

    def synchronize(self) -> None:
        self.log.append(f"the host waits for {self.name}")


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
    found = Device([])
    monkeypatch.setattr(pending.torch, "get_device_module", lambda kind: found)
    return found


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, device: Device) -> list[Stream]:
    """Those that FSDP2 has; a test may take them away."""
    found = [Stream("copy-in", device.log), Stream("all-gather", device.log)]
    monkeypatch.setattr(_fsdp2, "gathering_streams", lambda unit: found)
    monkeypatch.setattr(_fsdp2, "gathers_ahead", lambda unit: unit == "ahead")
    return found


def begin(device: Device, *names: str) -> PendingGathers:
    """Units on their way."""
    found = PendingGathers()

    log = device.log

    def start(name: str, touched: list[Any]) -> Any:
        touched.append(
            SimpleNamespace(record_stream=lambda s: log.append(f"memory of {name} is kept for {s.name}"))
        )
        log.append(f"{name} begins on {device.now.name}")
        return Pending(lambda: log.append(f"{name} ends on {device.now.name}"))

    units = []
    for name in names:
        touched: list[Any] = []
        units.append(UnitGather(name, name, functools.partial(start, name, touched), touched))
    found.begin(units, DEVICE)
    return found


def test_a_stream_aside(device: Device, streams: list[Stream]) -> None:
    """After all that was there; all work of a unit before its event; memory is kept."""
    begin(device, "a", "b")
    unit = ["{} begins on aside", "{} ends on aside", "memory of {} is kept for aside"]
    assert device.log == [
        "aside waits for current",
        *(line.format(name) for name in ("a", "b") for line in unit),
    ]


def test_a_forward_waits_for_its_unit(device: Device, streams: list[Stream]) -> None:
    """With FSDP2's streams, once."""
    found = begin(device, "a", "b")
    device.log.clear()
    found.before_forward("b", "b")
    assert device.log == [f"{name} waits for aside 2" for name in ("current", "copy-in", "all-gather")]
    found.before_forward("b", "b")
    assert len(device.log) == 3
    found.before_forward("other", "ahead")
    assert device.log[3:] == [f"{name} waits for aside 1" for name in ("current", "copy-in", "all-gather")]


def test_before_the_first_forward(device: Device, streams: list[Stream]) -> None:
    """FSDP2's streams, which are yet to be made, cannot wait: the host does."""
    found = begin(device, "a")
    streams.clear()
    device.log.clear()
    found.wait()
    assert device.log == ["current waits for aside 1", "the host waits for aside 1"]
