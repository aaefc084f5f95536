"""Asynchronous operations that overlap with compute: collectives, including their packing.

Operations that start during a backward start in the same order on all ranks (:class:`UnitOrder`):

    first backward    nothing starts early; the ranks agree on the order in which backward completes units
    later backwards   a unit's operations start when it is complete and those of all units before it have started
    end of backward   the remaining operations start in the same order
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.agreement import maximum

T = TypeVar("T")
U = TypeVar("U")


@dataclass(eq=False)
class Pending(Generic[T]):
    """An operation that has started."""

    #: Returns the result from the received data: casts, divides, unpacks. It issues no collective, except for the
    #: all-gather of an fp32-summed all-reduce.
    finish: Callable[[], T]
    #: The transport's handle. ``None`` if the stream that started the operation already waits.
    work: Any = None
    stream: Any = None  #: The stream that owns the result's memory. ``None`` if the device has no streams.
    event: Any = None  #: Recorded after the result is available. ``None`` if ``work`` reports completion.

    @torch.no_grad()
    def wait(self) -> T:
        """Return the result. The current stream waits for it (without streams: the caller).

        Local operation, except for :attr:`finish`.
        """
        if self.work is not None:
            self.work.wait()
        current: Any = None if self.stream is None else current_stream(self.stream.device)
        if self.event is not None:
            current.wait_event(self.event)
        result = self.finish()
        if current != self.stream and isinstance(result, torch.Tensor):
            # Otherwise the allocator could reuse the memory for the stream that made it, while this stream
            # still reads it.
            result.record_stream(current)
        return result

    def then(self, finish: Callable[[T], U]) -> Pending[U]:
        """Return the same operation with ``finish`` applied to its result."""
        return Pending(lambda: finish(self.wait()))


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the current stream on ``device``; ``None`` for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device.type).current_stream(device)


class SideStream:
    """A stream next to the compute stream that runs complete operations, including packing and unpacking.

    The CPU has no streams: transports work in the background, and the wait unpacks the received data.
    """

    def __init__(self) -> None:
        self._stream: Any = None

    @contextlib.contextmanager
    def after_current(self, device: torch.device, events: Iterable[Any] = ()) -> Iterator[None]:
        """Run on the side stream after all work on the current stream, and after the events that are not ``None``."""
        # gloo runs in its own threads, so a stream is not needed for overlap.
        if device.type == "cpu":
            yield
            return
        module = torch.get_device_module(device.type)
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_stream(module.current_stream(device))
        for event in filter(None, events):
            self._stream.wait_event(event)
        with module.stream(self._stream):
            yield

    def start(
        self, begin: Callable[[], Pending[T]], touched: Iterable[torch.Tensor | None] = ()
    ) -> Pending[T]:
        """Start an operation within :meth:`after_current`. Collective if the operation is.

        ``touched`` are tensors of other streams that the operation uses: their memory is not reused before it ends.
        """
        pending = begin()
        if self._stream is None:
            return pending
        # This wait is on the side stream: the host continues, and so does the compute stream.
        result = pending.wait()
        for tensor in touched:
            if tensor is not None:
                tensor.record_stream(self._stream)
        return Pending(lambda: result, stream=self._stream, event=self._stream.record_event())


# [Note: complete units] A unit is complete when each of its parameters (with FSDP2: each parameter group) has received
# a gradient in this backward. Autograd first accumulates all uses of a parameter in one graph. However, activation
# checkpoints with ``use_reentrant=True`` run nested backwards: a parameter used in several of them receives several
# gradients. A unit for which this happens in the first backward never starts early.
#
# [Note: same order on all ranks] Every rank issues the same collectives in the same order, whatever units it has
# used. If a rank has not used a unit, or only a part of it, this unit and the later ones start at the end of the
# backward. No rank waits for an operation before the end. Otherwise a rank could wait for a unit that a different
# rank starts at its end, and keep that rank from reaching it.
class UnitOrder:
    """The order in which backwards complete units, for a constant set of trained parameters.

    The order of ``units`` decides between units that are completed at the same time.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self._units = tuple(units)
        #: The units that may start early, in order. ``None`` before the ranks have agreed.
        self.agreed: tuple[str, ...] | None = None if self._units else ()
        self._missing: Counter[str] = Counter()
        self._seen: set[Hashable] = set()
        self._complete: list[str] = []
        self._repeated: set[str] = set()

    def begin(self, expected: Iterable[str]) -> None:
        """Start a backward. ``expected`` contains the unit of each gradient that is needed to complete a unit."""
        self._missing = Counter(expected)
        self._seen.clear()
        self._complete.clear()
        self._repeated.clear()

    def arrived(self, unit: str, key: Hashable) -> None:
        """Record a gradient of a unit. ``key`` identifies the gradient, so that a repeated one is detected."""
        if key in self._seen:
            self._repeated.add(unit)
            return
        self._seen.add(key)
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            self._complete.append(unit)

    def is_complete(self, unit: str) -> bool:
        """Return whether all gradients of a unit have arrived in this backward."""
        return unit in self._complete

    def next(self, started: int) -> str | None:
        """Return the next unit that may start, given the number of started units. ``None`` if no unit may start."""
        agreed = self.agreed or ()
        return agreed[started] if started < len(agreed) and self.is_complete(agreed[started]) else None

    def agree(self, mesh: DeviceMesh, device: torch.device) -> None:
        """Fix the order at the end of a first backward. Units that a rank has not used come last.

        Collective over ``mesh``, all ranks of this model: one all-reduce of two integers for each unit and axis.
        It is not the world, because other pipeline stages have different units.
        """
        # A unit that a rank has not used sorts last on every rank, because the maximum over the ranks counts.
        never = len(self._units)
        positions = [
            (unit in self._repeated, self._complete.index(unit) if unit in self._complete else never)
            for unit in self._units
        ]
        order = torch.tensor(positions, dtype=torch.int64, device=device)
        maximum(order, mesh)
        # Positions can be equal (maxima of different ranks), so the order of the units decides.
        once = [
            (position, index) for index, (repeated, position) in enumerate(order.tolist()) if not repeated
        ]
        self.agreed = tuple(self._units[index] for _, index in sorted(once))
