"""Which reductions begin while a backward still runs, and in which order: the same on all ranks.

    first backward    nothing begins early; which units backward leaves, in which order, is seen and agreed on
    later ones        a unit's buckets begin when it has all its gradients and all units before it have begun
    their end         what has not begun begins, in the same order; then all are waited for, in that order

So every rank calls the same collectives in the same order, whatever it has used: a unit that it has not used, or not
whole, and those after it, begin at the end. Nothing is waited for in between: a rank that would wait for a unit that
another one begins at its end might keep that one from getting there.

A unit has all its gradients when each of its parameters had one in this backward. Autograd adds up all uses of a
parameter in one graph before that; but checkpoints with ``use_reentrant=True`` run backwards in the backward, and a
parameter used in several of them gets several gradients. A unit that has seen this in the first backward never
begins early.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.agree import maximum

if TYPE_CHECKING:
    from te_fsdp.mesh import Meshes
    from te_fsdp.sharding.comm import GradComm
    from te_fsdp.sharding.no_shard_bucket import Bucket, Travelling

__all__ = ["Reduction", "UnitOrder"]


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
        self._complete: list[str] = []
        self._again: set[str] = set()

    def begin(self, expected: Iterable[str]) -> None:
        """A backward begins.

        Args:
            expected: For each parameter that is trained, its unit.
        """
        self._missing = Counter(expected)
        self._complete.clear()
        self._again.clear()

    def arrived(self, unit: str, *, again: bool) -> None:
        """A parameter of a unit gets a gradient; for the first time in this backward, or again."""
        if again:
            self._again.add(unit)
            return
        self._missing[unit] -= 1
        if self._missing[unit] == 0:
            self._complete.append(unit)

    def is_complete(self, unit: str) -> bool:
        """Whether all of a unit's parameters had a gradient in this backward."""
        return unit in self._complete

    def agree(self, meshes: Meshes) -> None:
        """Settle the order at the end of a first backward. Units that a rank has not used come last.

        Collective over all ranks that hold this model: one all-reduce of two integers for each unit and axis.

        Args:
            meshes: The job's meshes; not the world, in which other stages of a pipeline have other units.
        """
        never = len(self._units)
        told = [
            (unit in self._again, self._complete.index(unit) if unit in self._complete else never)
            for unit in self._units
        ]
        seen = torch.tensor(told, dtype=torch.int64, device=meshes.device)
        maximum(seen, meshes.device_mesh)
        left = [(place, at) for at, (again, place) in enumerate(seen.tolist()) if not again]
        self.agreed = tuple(self._units[at] for _, at in sorted(left))


@dataclass(eq=False)
class Reduction:
    """One reduction of all gradients.

    Attributes:
        early: Buckets that may begin during backward, each with its unit.
        rest: Those that are reduced at the end, one after the other.
        comm: How gradients travel.
        take: Key of a part -> its local gradient, which is given away.
    """

    early: Sequence[tuple[str, Bucket]]
    rest: Sequence[Bucket]
    comm: GradComm | None
    take: Callable[[Any], torch.Tensor | None]

    def __post_init__(self) -> None:
        self._travelling: deque[Travelling] = deque()
        # In a wider dtype than they add up in, gradients would take more memory on their way than before it.
        dtypes, comm = {bucket.parts[0].dtype for _, bucket in self.early}, self.comm
        self._is_wide = comm is not None and any(comm.wire(d).itemsize > d.itemsize for d in dtypes)

    @property
    def may_begin_early(self) -> bool:
        """Whether buckets begin during backward, so that an exception in it finds some under way."""
        return bool(self.early) and not self._is_wide

    def start(self, is_complete: Callable[[str], bool]) -> None:
        """Begin the early buckets, in order, as far as their units are complete. Collective; nothing is waited for."""
        while not self._is_wide and len(self._travelling) < len(self.early):
            unit, bucket = self.early[len(self._travelling)]
            if not is_complete(unit):
                return
            with torch.profiler.record_function(f"te_fsdp::reduce_no_shard {unit}"):
                self._travelling.append(bucket.start(self.comm, self.take))

    def finish(self) -> Iterator[tuple[Any, torch.Tensor]]:
        """Begin what has not begun, and wait. Collective over data parallel.

        Yields:
            Key and reduced local gradient of each parameter that had a gradient on any of the ranks.
        """
        self.start(lambda unit: True)
        while self._travelling:
            yield from self._travelling.popleft().finish()
        late = [bucket for _, bucket in self.early] if self._is_wide else []
        for bucket in (*late, *self.rest):
            with torch.profiler.record_function("te_fsdp::reduce_no_shard"):
                yield from bucket.start(self.comm, self.take).finish()

    def abandon(self) -> None:
        """After an exception in backward: begin what has not begun, wait, and drop the results.

        Ranks may have begun different buckets, so that all complete the set, with NaN: a rank that has seen no
        exception must not take what it gets for gradients. Collective over data parallel; only where
        :attr:`may_begin_early`.
        """
        quiet = None if self.comm is None else replace(self.comm, look=None)
        for _, bucket in self.early[len(self._travelling) :]:
            self._travelling.append(bucket.start_spoilt(quiet))
        while self._travelling:
            deque(self._travelling.popleft().finish(), maxlen=0)
        for bucket in self.rest:
            deque(bucket.start_spoilt(quiet).finish(), maxlen=0)
