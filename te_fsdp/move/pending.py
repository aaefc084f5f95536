"""Moves that have begun and are waited for later: one, and those on a stream of their own.

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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.agree import maximum

if TYPE_CHECKING:
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
    def wait(self) -> T:
        """The result. The current stream waits for it (without streams: the caller).

        Local operation, but for :attr:`finish`.
        """
        if self.work is not None:
            self.work.wait()
        now: Any = None if self.stream is None else current_stream(self.stream.device)
        if self.event is not None:
            now.wait_event(self.event)
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
