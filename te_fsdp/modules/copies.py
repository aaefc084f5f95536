"""Parameters that every tensor-parallel rank holds whole, kept equal to the bit.

Without sequence parallelism each tp rank computes the whole gradient of norms, row-parallel biases and foreign
modules from the same numbers. On a GPU the results are not always the same: some kernels add in whatever order their
blocks finish (measured on an H200: torch's embedding backward in fp32 gave 200 results in 200 runs; row-parallel
biases of TE drifted apart within two steps). The difference is rounding, but the copies never meet again, and a
checkpoint could hold one of them only.

Before every optimizer step the ranks therefore take over the gradients of the first tp rank: one broadcast of all
small ones together, after FSDP2 has reduced and cut them. Optimizers work element by element, so that parameters and
states stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _torch
from te_fsdp.move.start import broadcast
from te_fsdp.parameters import KEY

if TYPE_CHECKING:
    import torch.distributed as dist

    from te_fsdp.step_hooks import Step

__all__ = ["sync_tp_replicas", "take_over_gradients"]


def sync_tp_replicas(step: Step) -> None:
    """Replace gradients of parameters that each tp rank holds whole by the first tp rank's.

    Collective over tp as :func:`take_over_gradients`. Parameters whose optimizer state is cut over further axes are
    left to the optimizer's own hook: they are averaged there before.
    """
    take_over_gradients([p for p, facts in step.held if facts.tp_replica and facts.stand_ins is None])


@torch.no_grad()
def take_over_gradients(
    parameters: Iterable[torch.Tensor], stand_ins: Mapping[int, torch.Tensor] | None = None
) -> None:
    """Replace the gradients of tp-replicated parameters by those of the first tp rank, in place.

    Collective over tp where there are such gradients: one broadcast per dtype, and one for each large tensor.
    Looks only at parameters that te_fsdp has bound; shapes are those of this rank's shards.

    Args:
        parameters: In the same order, and with gradients for the same ones, on all tp ranks.
        stand_ins: ``id`` of a parameter -> the tensor that has its gradient, if not itself.
    """
    found: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for parameter in parameters:
        facts = parameter.__dict__.get(KEY)
        if not facts or not facts.tp_replica or not isinstance(parameter, DTensor):
            continue
        holder: Any = stand_ins[id(parameter)] if stand_ins is not None else parameter
        mesh = holder.device_mesh
        for gradient in (holder.grad, getattr(holder, "decoupled_grad", None)):
            if gradient is not None and mesh.size(mesh.ndim - 1) > 1:
                # FSDP2 puts its axes before the one that was there.
                found.setdefault(mesh.get_group(mesh.ndim - 1), []).append(_torch.local_of(gradient))
    for group, gradients in found.items():
        broadcast(gradients, group)
