"""Which moves begin while a backward still runs, and in which order: the same on all ranks.

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

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp.agree import maximum

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.mesh import Meshes

__all__ = ["UnitOrder", "own_group"]


def own_group(root: DeviceMesh, axis: str, backend: str | None = None) -> dist.ProcessGroup:
    """A process group of the ranks of one axis, for these moves alone.

    Two that ranks may begin in different orders must not share one: FSDP2's own and these, when ranks use different
    units. Collective over the world: makes process groups.

    Args:
        root: The mesh of the job.
        axis: Name of its axis.
        backend: ``None``: the default one of the job.
    """
    at = (root.mesh_dim_names or ()).index(axis)
    rows = root.mesh.movedim(at, -1).reshape(-1, root.size(at)).tolist()
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
        """A backward begins.

        Args:
            expected: For each gradient that completes a unit, the unit.
        """
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
