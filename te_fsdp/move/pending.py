"""Moves that have begun and are waited for later: one, those on a stream of their own, and those of a model's units.

What begins while a backward still runs does so in one order on all ranks (:class:`UnitOrder`):

    first backward    nothing begins early; which units backward leaves, in which order, is seen and agreed on
    later ones        what belongs to a unit begins when the unit is complete and all units before it have begun
    their end         what has not begun begins, in the same order

So every rank calls the same collectives in the same order, whatever it has used: a unit that it has not used, or not
whole, and those after it, begin at the end. Nothing is waited for in between: a rank that would wait for a unit that
another one begins at its end might keep that one from getting there.

A unit is complete when each of its parameters (with FSDP2: of its parameter groups) had a gradient in this backward.
Autograd adds up all uses of a parameter in one graph before that; but checkpoints with ``use_reentrant=True`` run
backwards in the backward, and a parameter used in several of them gets several gradients. A unit that has seen this in
the first backward never begins early.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from te_fsdp import _fsdp2, _torch
from te_fsdp.agree import maximum

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes

T = TypeVar("T")
U = TypeVar("U")


@dataclass(eq=False)
class Pending(Generic[T]):
    """A move that has begun.

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


def all_of(moves: Sequence[Pending[Any]]) -> Pending[None]:
    """Several that are waited for together, in this order."""

    def finish() -> None:
        for move in moves:
            move.wait()

    return Pending(finish)


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
        self, begin: Callable[[], Pending[T]], touched: Iterable[torch.Tensor | None] = ()
    ) -> Pending[T]:
        """Begin something within :meth:`after_current`. Collective as that.

        ``touched`` are other streams' tensors that it reads and writes: their memory is not given away before.
        """
        pending = begin()
        if self._stream is None:
            return pending
        result = pending.wait()
        for tensor in touched:
            if tensor is not None:
                tensor.record_stream(self._stream)
        return Pending(lambda: result, stream=self._stream, event=self._stream.record_event())


class UnitGather(NamedTuple):
    """How the gather of a unit's new weights begins; ``begin`` may add to ``touched``, what it reads and writes."""

    name: str
    unit: nn.Module
    begin: Callable[[], Pending[None]]
    touched: list[torch.Tensor]


class PendingGathers:
    """New weights of a model's units that are on their way when an optimizer step ends, and who waits for them.

        the step            begins all of them, one unit after the other, on a stream of their own
        a unit's forward    waits for the unit's: on the current stream, and on FSDP2's, which read shards
        all else            that reads or writes parameters waits for all

    Waiting is a local operation: ranks may use other units, or wait in another order.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[tuple[nn.Module, Pending[None]]]] = {}
        self._side = SideStream()

    def begin(self, gathers: Iterable[UnitGather], device: torch.device) -> None:
        """Begin with new weights, in this order, each in a range of the profiler. Collective as what is begun."""
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
        """Let the current stream, and FSDP2's, wait for some units, or all; without streams, complete them. Local."""
        for name in (names or tuple(self._pending)) if self._pending else ():
            for unit, pending in self._pending.pop(name, ()):
                streams = _fsdp2.gathering_streams(unit) if pending.event is not None else []
                pending.wait(*streams)
                if pending.event is not None and not streams:
                    # Those that the first forward will make need not wait for the current one.
                    pending.event.synchronize()


def own_group(root: DeviceMesh, axis: str, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of the ranks of one axis, for these moves alone.

    Two that ranks may begin in different orders must not share one: FSDP2's own and these, when ranks use different
    units. Collective over the world: makes process groups, those of all stages of a pipeline on each rank, since torch
    names groups by counting them.

    Args:
        root: The mesh of the job, or of this rank's stage.
        axis: Of that mesh.
        backend: ``None``: the default one of the job.
    """
    at = (root.mesh_dim_names or ()).index(axis)
    stages = _torch.root_mesh(root).mesh.reshape(-1, *root.shape)
    rows = stages.movedim(at + 1, -1).reshape(-1, root.size(at)).tolist()
    group, _ = dist.new_subgroups_by_enumeration(rows, backend=backend)
    assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
    return group


class UnitOrder:
    """The order in which backwards leave units, as long as the same parameters are trained.

    Args:
        units: Their names, in the order that decides between units which backward leaves at once.

    Attributes:
        agreed: The units that may begin early, in order; ``None`` before the ranks have agreed.
    """

    def __init__(self, units: Sequence[str]) -> None:
        self._units = tuple(units)
        self.agreed: tuple[str, ...] | None = None if self._units else ()
        self._missing: Counter[str] = Counter()
        self._seen: set[Hashable] = set()
        self._complete: list[str] = []
        self._again: set[str] = set()

    def begin(self, expected: Iterable[str]) -> None:
        """A backward begins; ``expected`` are, for each gradient that completes a unit, the unit."""
        self._missing = Counter(expected)
        self._seen.clear()
        self._complete.clear()
        self._again.clear()

    def arrived(self, unit: str, key: Hashable) -> None:
        """A gradient of a unit arrives; ``key`` tells it from the unit's others, and is known if it comes again."""
        if key in self._seen:
            self._again.add(unit)
            return
        self._seen.add(key)
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            self._complete.append(unit)

    def is_complete(self, unit: str) -> bool:
        """Whether all gradients of a unit have arrived in this backward."""
        return unit in self._complete

    def next(self, begun: int) -> str | None:
        """The unit that may begin now, where so many have begun; ``None`` if none may."""
        agreed = self.agreed or ()
        return agreed[begun] if begun < len(agreed) and self.is_complete(agreed[begun]) else None

    def agree(self, meshes: Meshes) -> None:
        """Settle the order at the end of a first backward. Units that a rank has not used come last.

        Collective over all ranks that hold this model (not the world, in which other stages of a pipeline have other
        units): one all-reduce of two integers for each unit and axis.
        """
        never = len(self._units)
        mine = [
            (unit in self._again, self._complete.index(unit) if unit in self._complete else never)
            for unit in self._units
        ]
        seen = torch.tensor(mine, dtype=torch.int64, device=meshes.device)
        maximum(seen, meshes.device_mesh)
        left = [(place, at) for at, (again, place) in enumerate(seen.tolist()) if not again]
        self.agreed = tuple(self._units[at] for _, at in sorted(left))
