"""``Arrivals``: new weights of units that are on their way when an optimizer step ends, and who waits for them.

    the step            begins all of them, one unit after the other, on a stream of their own
    a unit's forward    waits for the unit's: on the current stream, and on FSDP2's, which read shards
    all else            that reads or writes parameters waits for all

Waiting is a local operation: ranks may use other units, or wait in another order. On the CPU there are no streams:
collectives run in the background, and what they bring is written when it is waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fsdp import _fsdp2

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Arrivals", "Departure"]


class Departure(NamedTuple):
    """How new weights of a unit begin to travel.

    Attributes:
        name: The unit's.
        unit: The unit.
        start: Enqueues it. Its argument says whether to wait for nothing; returns what is left to do then, and the
            tensors that are read and written.
    """

    name: str
    unit: nn.Module
    start: Callable[[bool], tuple[Callable[[], None], Iterable[torch.Tensor]]]


class _Arrival(NamedTuple):
    """Weights of a unit that are under way: with streams until an event, without until ``finish`` was called."""

    unit: nn.Module
    device: torch.device
    event: Any
    finish: Callable[[], None] | None


class Arrivals:
    """The new weights of one model that are under way.

    Attributes:
        watched: Whether the model's state dicts wait for them.
    """

    def __init__(self) -> None:
        self.watched = False
        self._under_way: dict[str, list[_Arrival]] = {}
        self._stream: Any = None

    def begin(self, departures: Sequence[Departure], device: torch.device) -> None:
        """Begin with new weights, in this order. Collective as what is begun.

        Each unit is a range of the profiler, ``te_fsdp::gather`` with its name.

        Args:
            departures: The units.
            device: Where the model is.
        """
        with self._aside(device):
            for name, unit, start in departures:
                with torch.profiler.record_function(f"te_fsdp::gather {name}"):
                    arrival = self._begun(unit, device, start)
                self._under_way.setdefault(name, []).append(arrival)

    def _begun(self, unit: nn.Module, device: torch.device, start: Callable[[bool], Any]) -> _Arrival:
        finish, touched = start(self._stream is None)
        if self._stream is None:
            return _Arrival(unit, device, None, finish)
        finish()
        for tensor in touched:
            tensor.record_stream(self._stream)  # its memory is not given away before
        return _Arrival(unit, device, self._stream.record_event(), None)

    @contextlib.contextmanager
    def _aside(self, device: torch.device) -> Iterator[None]:
        """Work on a stream of its own, after all that the current stream has been given. On the CPU nothing changes."""
        if device.type == "cpu":
            yield
            return
        module = torch.get_device_module(device.type)
        if self._stream is None:
            self._stream = module.Stream(device)
        self._stream.wait_stream(module.current_stream(device))
        with module.stream(self._stream):
            yield

    def before_forward(self, name: str, unit: nn.Module) -> None:
        """Wait for a unit that is about to run forward, and for what it makes FSDP2 gather. Local operation."""
        if self._under_way:
            self.wait(*(() if _fsdp2.gathers_ahead(unit) else (name,)))

    @torch.no_grad()
    def wait(self, *names: str) -> None:
        """Let the current stream, and FSDP2's, wait for units; without streams, complete them. Local operation.

        Args:
            *names: Of units; none: all.
        """
        if not self._under_way:
            return
        for name in names or tuple(self._under_way):
            for arrival in self._under_way.pop(name, ()):
                _wait(arrival)


def _wait(arrival: _Arrival) -> None:
    if arrival.finish is not None:
        arrival.finish()
        return
    device = arrival.device
    torch.get_device_module(device.type).current_stream(device).wait_event(arrival.event)
    streams = _fsdp2.gathering_streams(arrival.unit)
    for stream in streams:
        stream.wait_event(arrival.event)
    if not streams:  # those that the first forward will make need not wait for the current one
        arrival.event.synchronize()
