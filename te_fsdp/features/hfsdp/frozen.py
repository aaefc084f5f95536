"""Frozen parameters with a gradient, which optimizers step like all others."""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_fsdp.collectives.agreement import maximum
from te_fsdp.collectives.rendezvous import is_capturing
from te_fsdp.errors import OrderError
from te_fsdp.features.hfsdp.optimizer_shards import MainParameter, group_by_key
from te_fsdp.lifecycle import gradient_of
from te_fsdp.records import label_of
from te_fsdp.upstream import torch_dtensor as _torch


# [Note: frozen parameters with a gradient] An optimizer of torch steps each parameter that has a gradient. Its
# ``requires_grad`` does not matter, also if it was set after the backward. Replicas average the gradients of the
# same parameters, but one of them alone may have a gradient. So they compare once after a parameter was frozen, and
# again after it was trained in a forward. Other steps send nothing for frozen parameters.
class FrozenGradients:
    """Which frozen parameters of one optimizer have a gradient on any replica. ``sharded`` returns its parameters."""

    def __init__(self, sharded: Callable[[], list[MainParameter]]) -> None:
        self._sharded = sharded
        #: Frozen parameters -> whether any replica has a gradient. Identical on all replicas.
        self._has_gradient: dict[MainParameter, bool] = {}

    def averaged(self) -> list[MainParameter]:
        """Return the parameters whose gradients are averaged, in the same order on all replicas. Local operation."""
        has_gradient = self._has_gradient
        return [
            pair
            for pair in self._sharded()
            if pair.parameter.requires_grad or (has_gradient and has_gradient.get(pair))
        ]

    def before_forward(self) -> None:
        """Forget what is known of parameters that are trained again. Local operation."""
        for pair in [pair for pair in self._has_gradient if pair.parameter.requires_grad]:
            del self._has_gradient[pair]

    def compare(self) -> None:
        """Determine which parameters that were frozen since the previous call have a gradient on any replica.

        Collective over the replicas if there are such parameters: one all-reduce of an integer per parameter. Raises
        OrderError for other frozen parameters with a gradient.
        """
        self.before_forward()
        new: list[MainParameter] = []
        for pair in self._sharded():
            if pair.parameter.requires_grad:
                continue
            known = self._has_gradient.get(pair)
            if known is None:
                new.append(pair)
            elif not known and gradient_of(pair.parameter) is not None:
                raise OrderError(
                    f"{label_of(pair.parameter)}: frozen, with a gradient that no backward has computed",
                    expected="a gradient from a backward after a forward in which it was trained",
                    got="a gradient that was assigned",
                    why="Replicas without this gradient would not average it",
                    fix="set requires_grad before the forward or before the step",
                )
        groups = group_by_key(new, [pair.shard.ranks for pair in new])
        # Sorted, so that all ranks run the collectives of their groups in the same order.
        for pairs in sorted(groups, key=lambda group: group[0].shard.ranks):
            found = [gradient_of(pair.parameter) is not None for pair in pairs]
            if not is_capturing():  # a recorded step clears gradients first, on all ranks
                device = _torch.local_of(pairs[0].parameter).device
                flags = torch.tensor(found, dtype=torch.int32, device=device)
                maximum(flags, pairs[0].shard.group)
                found = list(map(bool, flags.tolist()))
            self._has_gradient.update(zip(pairs, found, strict=True))

    def unused(self, pair: MainParameter) -> None:
        """Record that no replica has a gradient of a parameter. Local operation."""
        if pair in self._has_gradient:
            self._has_gradient[pair] = False
