"""``HostPace``: measure once how long the GPU waits for the host in a training step.

    steps 1 to 4      not measured: compilation, allocations, checks of the first steps
    steps 5 to 7      an event and the host's time at each mark: units' forwards and backwards, optimizer
    step 8            each part between two marks is issued while the device sleeps: its time without the host

Step 8 takes about twice as long as the others. The host never waits for the device.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.component import Component
from te_fsdp.lifecycle import runs_if
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.upstream import fsdp2_containers as _fsdp2_containers, fsdp2_units, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

#: Steps before the first measured one, and measured steps.
SKIPPED, MEASURED = 4, 3
#: Milliseconds of sleep in a step from which it is not measured: evaluations and saves between steps are host time,
#: and collectives of other ranks wait for this device.
LONGEST = 60_000.0
#: Fraction of a step, and milliseconds, from which a wait is reported.
SHARE, LEAST = 0.1, 1.0


class CudaClock:
    """Clock that times the device by CUDA events. Tests replace it."""

    def event(self) -> Any:
        """Record a timed CUDA event on the current stream, and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def sleep(self, milliseconds: float) -> None:
        """Block the current stream for some milliseconds. The host does not wait."""
        _torch.device_sleep(milliseconds)

    def now(self) -> float:
        """Return the host's time in milliseconds."""
        return 1e3 * time.perf_counter()


class _Mark(NamedTuple):
    """Host time and CUDA events of one point in a step."""

    host: float  #: Host time
    before: Any  #: Event before a sleep; the same event without one
    event: Any
    is_behind: bool  #: Whether the device had not reached the previous mark


class Pace(NamedTuple):
    """Measured duration of a step, in milliseconds."""

    step: float
    wait: float  #: Part of it in which the device waits for the host

    def __str__(self) -> str:
        return (
            f"the host sets the pace: the GPU waits {self.wait:.1f} ms of each step of {self.step:.1f} ms; "
            f"te_fsdp.graphed_step would save about {self.wait:.0f} ms (docs/fast.md)"
        )


# [Note: how long the device waits] In a part that the host issues more slowly than the device computes, the device
# waits for the difference. It does not wait if it is more than one part behind the host. There is one sleep for each
# part, because a device stores about a thousand launches only. If the steps differ in their marks, or are very long,
# nothing is reported.
class HostPace(Component):
    """Measures the steps of one model, then reports the result."""

    def __init__(self, state: ShardedModel, clock: CudaClock) -> None:
        self._units = {n: unit for n, unit in state.modules.items() if not fsdp2_units.inner_units(unit)}
        self._clock = clock
        self._steps: Iterator[None] | None = (
            self._measure()
        )  # the next item of each step; ``None`` at the end
        self._marks: list[_Mark] = []
        self._sleeps: list[float] = []
        self._handles: list[Any] = []
        self._result: Pace | None = None

    def report_line(self) -> str:
        """Return the result; empty before it is known, and if the device does not wait."""
        return "" if self._result is None else str(self._result)

    def prepare_step(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
        """Mark the beginning of the optimizer's step."""
        if self._handles:
            self._mark()

    def finish_step(self) -> None:
        """Mark the end of a step, and begin the next one."""
        if self._steps is not None and (is_capturing() or next(self._steps, True)):
            self._unwatch()
            self._steps = None

    def _measure(self) -> Iterator[None]:
        """Run between the steps, until there is a result or nothing can be measured."""
        yield from itertools.repeat(None, SKIPPED - 1)
        # Hooks of compiled modules would be compiled with them.
        modules = [module for unit in self._units.values() for module in unit.modules()]
        if not modules or any(
            getattr(module, "_compiled_call_impl", None) is not None
            or type(module).__name__ == "OptimizedModule"
            for module in modules
        ):
            return
        for unit in self._units.values():
            self._handles.append(unit.register_forward_pre_hook(_torch.disable_compile(self._before)))
            self._handles.append(unit.register_forward_hook(_torch.disable_compile(self._after)))
        measured, hosts = list[list[_Mark]](), list[float]()
        while len(measured) <= MEASURED:
            yield
            self._mark()
            measured.append(self._marks)
            self._marks = []
            if len({len(marks) for marks in measured}) > 1:
                return  # not every step is the same
            if len(measured) == MEASURED:
                parts = [[b.host - a.host for a, b in itertools.pairwise(marks)] for marks in measured]
                hosts = [statistics.median(times) for times in zip(*parts, strict=True)]
                # Each sleep lasts longer than the host needs for the part, so that the device has all work of the next
                # step in time and does not wait for the host in it.
                self._sleeps = [1.5 * part + 0.2 for part in hosts]
                if sum(self._sleeps) > LONGEST:
                    return
        self._unwatch()
        slept = measured.pop()
        yield
        while not slept[-1].event.query():
            yield
        flags = zip(*[[mark.is_behind for mark in marks] for marks in measured], strict=True)
        behind = [statistics.median(of_mark) for of_mark in flags]
        device = [a.event.elapsed_time(b.before) for a, b in itertools.pairwise(slept)]
        parts = zip(hosts, device, behind[1:], strict=True)
        wait = sum(max(0.0, host - alone) for host, alone, is_behind in parts if not is_behind)
        step = statistics.median([marks[0].event.elapsed_time(marks[-1].event) for marks in measured])
        if wait >= max(SHARE * step, LEAST):
            self._result = Pace(step, min(wait, step))
            if rank() == 0:
                _log.warning("%s", self._result)

    # ------------------------------------------------------------------------------------------------------------ marks

    def _unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._sleeps = []

    def _before(self, unit: nn.Module, args: Any) -> None:
        if not _torch.in_backward() and torch.is_grad_enabled():
            self._mark()

    def _after(self, unit: nn.Module, args: Any, output: Any) -> None:
        if _torch.in_backward() or not torch.is_grad_enabled():
            return
        trained = (tensor for tensor in _fsdp2_containers.tensors_in(output) if tensor.requires_grad)
        first = next(trained, None)
        if first is not None:
            first.register_hook(lambda gradient: self._mark())

    def _mark(self) -> None:
        clock, index = self._clock, len(self._marks)
        if not self._handles or is_capturing():
            return
        before = event = clock.event()
        behind = bool(self._marks) and not self._marks[-1].event.query()
        if index < len(self._sleeps):
            clock.sleep(self._sleeps[index])
            event = clock.event()
        self._marks.append(_Mark(clock.now(), before, event, behind))


@runs_if("is_timed")
def measure_host_pace(setup: Setup) -> None:
    """Measure once whether the host sets the pace of training, on GPUs and unless checks are off. Local operation."""
    setup.state.components.attach(HostPace(setup.state, CudaClock()))
