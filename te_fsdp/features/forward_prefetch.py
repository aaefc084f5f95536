"""``ForwardPrefetch``: start the all-gather of a forward's next unit before the current unit computes.

FSDP2 starts a unit's all-gather when its forward is called. That hides the all-gather behind the computation of the
unit before only if the host is ahead of the device. With quantized weights, tp and experts it is not:

===============================  ======================================================================
first forward with gradients     records the order of the units
each later one                   a unit's all-gather starts when the one before it is unsharded
===============================  ======================================================================

As many units are unsharded at a time as before. A unit whose order has changed is released unused, and the next forward
records again. Units that stay unsharded between microbatches, and evaluations, all-gather as FSDP2 does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from te_fsdp.apply_fully_shard import Setup
from te_fsdp.component import Component
from te_fsdp.lifecycle import runs_if
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch


class ForwardPrefetch(Component):
    """The order of a model's units in forward, and the all-gathers that have started."""

    def __init__(self, units: dict[str, nn.Module]) -> None:
        self._units = units
        self._order: list[str] = []
        #: Unit -> the following one; ``None`` while the order is recorded
        self._next: dict[str, str] | None = None
        self._started: dict[str, list[int]] = {}  #: Started all-gathers: the versions of the unit's shards

    def before_unit(self, name: str) -> None:
        """Let FSDP2 all-gather a unit again if its shards were written since its all-gather started."""
        versions = self._started.pop(name, None)
        if versions is not None and versions != _fsdp2.versions_of_shards(self._units[name]):
            _fsdp2.drop_gather(self._units[name])

    def gather_next(self, name: str, unit: nn.Module, args: Any) -> None:
        """Start the all-gather of the unit after ``name``, which FSDP2 has unsharded. Collective over ``dp_shard``."""
        if not torch.is_grad_enabled() or not _fsdp2.is_in_root_forward(unit):
            return
        if self._next is None:
            self._order.append(name)
            return
        following = self._next.get(name)
        if following is not None and _fsdp2.start_gather(self._units[following]):
            self._started[following] = _fsdp2.versions_of_shards(self._units[following])

    def after_forward(self, trained: Sequence[torch.Tensor]) -> None:
        """Learn the order of the forward that ends; release units that it has not run."""
        if self._next is None:
            # Units with several successors in one forward have none.
            pairs = set(pairwise(self._order))
            counts = Counter(name for name, _ in pairs)
            self._next = {name: after for name, after in pairs if counts[name] == 1 and name != after}
            if any(map(_fsdp2.has_forward_prefetch, self._units.values())):
                self._next = {}  # the user has chosen
        elif self._started:
            for name in self._started:
                _fsdp2.drop_gather(self._units[name])
            self._next = None
        self._order.clear()
        self._started.clear()

    def recover(self) -> bool:
        """Forget all-gathers that started before an exception: FSDP2's reset has dropped them."""
        self._started.clear()
        self._order.clear()
        return False


@runs_if("prefetched")
def prefetch_in_forward(setup: Setup) -> None:
    """Start all-gathers of a forward one unit ahead, in units that are all-gathered in each pass. Local operation."""
    prefetch = ForwardPrefetch(setup.prefetched)
    setup.state.components.attach(prefetch)
    for name, unit in setup.prefetched.items():
        # After FSDP2's hook, which unshards the unit.
        hook = _torch.disable_compile(functools.partial(prefetch.gather_next, name))
        unit.register_forward_pre_hook(hook)
