"""Which experts a rank holds, and what their parameters are called everywhere.

TE counts the experts of a ``GroupedLinear`` from 0 on every rank. Under expert parallelism ``weight0`` would then be
another expert's on each rank, and whatever goes by names (state dicts, DCP, optimizers' states) would take one for the
other. So parameters are registered under global indices:

    4 experts, ep = 2          rank 0 of ep             rank 1 of ep
    TE's names                 weight0  weight1         weight0  weight1
    registered names           weight0  weight1         weight2  weight3

Ranks follow each other as ``torch.chunk`` cuts. A rank's own range therefore begins at or behind the number of its
experts, unless it is the first: no name of TE's is a registered name of another expert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from te_fsdp.errors import MeshError

__all__ = ["ExpertRange", "expert_index", "expert_ranges"]

_NAME = re.compile(r"(weight|bias)(0|[1-9]\d*)")


@dataclass(frozen=True)
class ExpertRange:
    """The experts that one rank holds.

    Attributes:
        first: Global index of its first expert.
        count: How many it holds: TE's ``num_gemms``.
        total: How many there are over all ranks of ``ep``.
        most: How many the first rank holds, and all others but the last; 0 for as many as this one.
    """

    first: int
    count: int
    total: int
    most: int = 0

    def counts(self) -> tuple[int, int]:
        """How many experts the first rank of ``ep`` holds, and how many the last: the same on every rank."""
        most = self.most or self.count
        return most, self.total - (math.ceil(self.total / most) - 1) * most

    def registered_name(self, name: str) -> str:
        """The name under which a parameter that TE calls ``name`` is registered; other names as they are."""
        found = _NAME.fullmatch(name)
        if found is None or int(found[2]) >= self.count:
            return name
        return f"{found[1]}{int(found[2]) + self.first}"

    def is_elsewhere(self, name: str) -> bool:
        """Whether ``name`` is the registered name of an expert's parameter that another rank holds."""
        index = expert_index(name)
        return index is not None and index < self.total and not self.first <= index < self.first + self.count


def expert_index(name: str) -> int | None:
    """The number in an expert's parameter name (``weight12``), ``None`` for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[2])


def expert_ranges(counts: Sequence[int], label: str) -> list[ExpertRange]:
    """The range of each rank along ``ep``, from how many experts each holds.

    Args:
        counts: ``num_gemms`` of each rank.
        label: Name of the module, for messages.

    Raises:
        MeshError: Not the numbers that ``torch.chunk`` gives, or a rank without experts.
    """
    total, ranks = sum(counts), len(counts)
    step = -(-total // ranks)
    fitting = [max(0, min(step, total - rank * step)) for rank in range(ranks)]
    if list(counts) != fitting or 0 in counts:
        even = "choose an ep size that divides the number of experts"
        raise MeshError(
            f"{label}: experts over ep={ranks}",
            expected=f"{total} experts dealt out as {fitting}, at least one on each rank",
            got=f"num_gemms of the ranks {list(counts)}",
            why="Which expert a weight belongs to follows from how many the ranks before hold",
            fix="build it with num_gemms=len(meshes.experts(total))" if 0 not in fitting else even,
        )
    firsts = [sum(counts[:rank]) for rank in range(ranks)]
    return [ExpertRange(first, count, total, step) for first, count in zip(firsts, counts, strict=True)]
