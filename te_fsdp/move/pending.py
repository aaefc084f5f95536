"""Moves that have begun and are waited for later: one, those on a stream of their own, and those of a model's units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch

from te_fsdp import _fsdp2

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Pending", "PendingGathers", "SideStream", "UnitGather", "current_stream"]

T = TypeVar("T")
U = TypeVar("U")


@dataclass(eq=False)
class Pending(Generic[T]):
    """A move that has begun, and what is left to do to have its result.

    Attributes:
        finish: Gives the result, once what it is made of has come: casts, divides, unpacks. It issues no collective,
            but for fp32 sums of an all-reduce (an all-gather).
        work: The transport's handle; ``None``: the stream that it was started on waits already.
        stream: What the result's memory belongs to; ``None`` where the device has no streams.
        event: After which the result is there; ``None``: when ``work`` says so.
    """

    finish: Callable[[], T]
    work: Any = None
    stream: Any = None
    event: Any = None

    @torch.no_grad()
    def wait(self, *streams: Any) -> T:
        """The result. The current stream waits for it (without streams: the caller), and those given do.

        Local operation, but for :attr:`finish`.
        """
        if self.work is not None:
            self.work.wait()
        now: Any = None if self.stream is None else current_stream(self.stream.device)
        if self.event is not None:
            for stream in (now, *streams):
                stream.wait_event(self.event)
        result = self.finish()
        if now != self.stream and isinstance(result, torch.Tensor):
            result.record_stream(now)
        return result

    def then(self, finish: Callable[[T], U]) -> Pending[U]:
        """The same move, with more to do in the end."""
        return Pending(lambda: finish(self.wait()))


def current_stream(device: torch.device) -> torch.Stream | None:
    """The stream that work on ``device`` goes to now; ``None`` for the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device.type).current_stream(device)


class SideStream:
    """A stream beside the one that computes, on which whole moves run, with what is packed and unpacked for them.

    On the CPU there are no streams: transports work in the background, and what they bring is unpacked by the wait.
    """

    def __init__(self) -> None:
        self._stream: Any = None

    @contextlib.contextmanager
    def after_current(self, device: torch.device, events: Iterable[Any] = ()) -> Iterator[None]:
        """Work on it, after all that the current stream has been given, and after events that are not ``None``."""
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

    def begun(
        self, begin: Callable[[bool], Pending[T]], touched: Iterable[torch.Tensor | None] = ()
    ) -> Pending[T]:
        """Begin something within :meth:`after_current`. Collective as that.

        Args:
            begin: Begins it; gets whether to let nothing wait.
            touched: Other streams' tensors that it reads and writes: their memory is not given away before.
        """
        pending = begin(self._stream is None)
        if self._stream is None:
            return pending
        result = pending.wait()
        for tensor in touched:
            if tensor is not None:
                tensor.record_stream(self._stream)
        return Pending(lambda: result, stream=self._stream, event=self._stream.record_event())


class UnitGather(NamedTuple):
    """How new weights of a unit begin to travel.

    Attributes:
        name: The unit's.
        unit: The unit.
        begin: Begins it; gets whether to let nothing wait.
        touched: The tensors that it reads and writes; ``begin`` may add some.
    """

    name: str
    unit: nn.Module
    begin: Callable[[bool], Pending[None]]
    touched: list[torch.Tensor]


class PendingGathers:
    """New weights of a model's units that are on their way when an optimizer step ends, and who waits for them.

        the step            begins all of them, one unit after the other, on a stream of their own
        a unit's forward    waits for the unit's: on the current stream, and on FSDP2's, which read shards
        all else            that reads or writes parameters waits for all

    Waiting is a local operation: ranks may use other units, or wait in another order.

    Attributes:
        watched: Whether the model's state dicts wait for them.
    """

    def __init__(self) -> None:
        self.watched = False
        self._pending: dict[str, list[tuple[nn.Module, Pending[None]]]] = {}
        self._side = SideStream()

    def begin(self, gathers: Iterable[UnitGather], device: torch.device) -> None:
        """Begin with new weights, in this order. Collective as what is begun.

        Each unit is a range of the profiler, ``te_fsdp::gather`` with its name.

        Args:
            gathers: Of the units.
            device: Where the model is.
        """
        with self._side.after_current(device):
            for name, unit, begin, touched in gathers:
                with torch.profiler.record_function(f"te_fsdp::gather {name}"):
                    pending = self._side.begun(begin, touched)
                self._pending.setdefault(name, []).append((unit, pending))

    def before_forward(self, name: str, unit: nn.Module) -> None:
        """Wait for a unit that is about to run forward, and for what it makes FSDP2 gather. Local operation."""
        if self._pending:
            self.wait(*(() if _fsdp2.gathers_ahead(unit) else (name,)))

    @torch.no_grad()
    def wait(self, *names: str) -> None:
        """Let the current stream, and FSDP2's, wait for units; without streams, complete them. Local operation.

        Args:
            *names: Of units; none: all.
        """
        for name in (names or tuple(self._pending)) if self._pending else ():
            for unit, pending in self._pending.pop(name, ()):
                streams = _fsdp2.gathering_streams(unit) if pending.event is not None else []
                pending.wait(*streams)
                if pending.event is not None and not streams:
                    # Those that the first forward will make need not wait for the current one.
                    pending.event.synchronize()
