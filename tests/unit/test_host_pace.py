"""Test detection of a slow host from events of a few steps, with a simulated device."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from te_fsdp.features import host_pace
from te_fsdp.features.host_pace import MEASURED, SKIPPED, HostPace


class Event(NamedTuple):
    """A point of a device's time."""

    of: Device
    time: float

    def query(self) -> bool:
        return self.time <= self.of.host

    def elapsed_time(self, later: Event) -> float:
        return later.time - self.time


class Device:
    """A device that runs work in order, and a host that issues it. Times are in milliseconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.slept = 0

    def issue(self, host: float, device: float) -> None:
        """Issue a kernel: the host needs ``host`` for it, the device ``device``."""
        self.host += host
        self.device = max(self.device, self.host) + device

    def event(self) -> Event:
        self.device = max(self.device, self.host)
        return Event(self, self.device)

    def sleep(self, milliseconds: float) -> None:
        self.slept += 1
        self.device = max(self.device, self.host) + milliseconds

    def now(self) -> float:
        return self.host


class Unit(nn.Module):
    """Kernels of a forward and of a backward."""

    def __init__(self, device: Device, host: float, work: float) -> None:
        super().__init__()
        self.device, self.host, self.work = device, host, work
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            self.device.issue(self.host / 4, self.work / 4)
        return x * self.weight


def train(host: Any, work: Any, steps: int, irregular: bool = False) -> Any:
    """Train units with one time for each, or two units with the same. Return the component and the device."""
    hosts, works = (v if isinstance(v, list) else [v, v] for v in (host, work))
    device = Device()
    model = nn.Sequential(*(Unit(device, *times) for times in zip(hosts, works, strict=True)))
    state: Any = SimpleNamespace(modules={str(n): unit for n, unit in enumerate(model)})
    pace = HostPace(state, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(steps):
        x = torch.ones(1)
        loss = model(x).sum()
        if irregular and step == SKIPPED + 1:
            loss = loss + model[0](x).sum()
        loss.backward()
        pace.prepare_step(optimizer, [])
        device.issue(0.5, 0.5)
        pace.finish_step()
    return pace, device


def test_slow_host_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """The wait is the host's time minus the device's in both forwards, where only the host is slow."""
    with caplog.at_level(logging.WARNING, "te_fsdp"):
        pace, device = train(host=8.0, work=2.0, steps=20)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == pace.report_line()
    assert line.startswith("the host sets the pace: the GPU waits 12.0 ms of each step of 16.5 ms")
    assert "te_fsdp.graphed_step would save about 12 ms" in line
    assert device.slept > 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in pace._units.values())


@pytest.mark.parametrize(("host", "work"), [(2.0, 8.0), (2.0, 2.1)], ids=["device", "level"])
def test_slow_device_is_not_reported(caplog: pytest.LogCaptureFixture, host: float, work: float) -> None:
    with caplog.at_level(logging.WARNING, "te_fsdp"):
        pace, _ = train(host, work, steps=20)
    assert not caplog.records and pace.report_line() == ""


def test_device_that_lags_behind_is_not_counted_as_waiting() -> None:
    """A slow launch costs nothing while the device still executes earlier work."""
    # The host issues 9 ms in each step, the device needs 33 ms: 20 steps would end before the device has measured.
    pace, _ = train(host=[0.5, 8.0], work=[30.0, 2.0], steps=60)
    assert pace._steps is None and pace.report_line() == ""


def test_irregular_steps_are_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    pace, device = train(host=8.0, work=2.0, steps=20, irregular=True)
    assert not caplog.records and pace.report_line() == "" and device.slept == 0


@pytest.mark.parametrize("kind", ["no units", "compiled"])
def test_model_without_usable_hooks_is_not_measured(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Bug class: a measurement breaks training that it cannot measure."""
    if kind == "no units":
        monkeypatch.setattr(host_pace.fsdp2_units, "inner_units", lambda unit: ["inner"])
    else:
        monkeypatch.setattr(Unit, "_compiled_call_impl", object(), raising=False)
        monkeypatch.setattr(Unit, "__call__", lambda self, x: self.forward(x))
    pace, device = train(8.0, 2.0, steps=20)
    assert pace.report_line() == "" and device.slept == 0


def test_only_one_step_is_delayed() -> None:
    """Steps before the measured ones, and after the delayed one, are not delayed."""
    _, early = train(8.0, 2.0, steps=SKIPPED + MEASURED)
    _, once = train(8.0, 2.0, steps=SKIPPED + MEASURED + 1)
    _, late = train(8.0, 2.0, steps=30)
    assert early.slept == 0 and once.slept == late.slept > 0


def test_measurement_does_not_delay_the_device_for_minutes():
    """A long evaluation in each measured step would delay the device and other ranks' collectives."""
    pace, device = train(host=20_000.0, work=1.0, steps=SKIPPED + MEASURED + 4)
    assert device.slept == 0 and pace.report_line() == ""
    pace, device = train(host=2_000.0, work=1.0, steps=SKIPPED + MEASURED + 4)  # negative control
    assert device.slept > 0 and "the host sets the pace" in pace.report_line()
