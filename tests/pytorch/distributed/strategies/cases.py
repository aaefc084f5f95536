"""Combinations of a strategy with other choices. Imports neither torch nor TE."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from matrix.covering import all_cases, covering

#: dp_replicate x dp_shard.
MESHES = {"dp1": (1, 1), "dp2": (1, 2), "dp4": (1, 4), "2x2": (2, 2)}
FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer": ("none", "hsdp", "hfsdp"),
    "microbatches": (1, 3),
    "loop": ("plain", "microbatch", "no_sync"),
    "mesh": ("dp1", "dp2", "dp4", "2x2"),
    "optimizer": ("SGD", "AdamW", "FusedAdam"),
    "tp": (1, 2),
}


@dataclass(frozen=True)
class Case:
    """One combination."""

    strategy: str
    outer: str
    microbatches: int
    loop: str
    mesh: str
    optimizer: str
    tp: int

    @property
    def ranks(self) -> int:
        """Return the number of processes that it takes."""
        replicate, shard = MESHES[self.mesh]
        return replicate * shard * self.tp

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the fields, for the worker."""
        return asdict(self)

    def __str__(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


def allowed(case: dict[str, Any]) -> bool:
    """Return whether a combination means anything.

    An outer strategy needs an outer axis. Without microbatches there is nothing to delay. Nothing is cut under
    no_shard, so that its optimizer cannot be cut over the outer axis alone.
    """
    if (case["outer"] == "none") == (case["mesh"] == "2x2"):
        return False
    if case["outer"] == "hfsdp" and case["strategy"] == "no_shard":
        return False
    return case["microbatches"] > 1 or case["loop"] != "no_sync"


def ranks_of(case: dict[str, Any]) -> int:
    """Return the number of processes that a combination takes."""
    return Case(**case).ranks


def chosen(how: str) -> list[Case]:
    """Return the combinations to run: ``"full"`` all, else every pair of values that 4 ranks can run."""
    if how == "full":
        return [Case(**case) for case in all_cases(FACTORS, allowed)]
    result = covering(FACTORS, lambda case: allowed(case) and ranks_of(case) <= 4, ranks_of)
    return [Case(**case) for case in result]
