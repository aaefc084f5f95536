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

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_fsdp import _torch
from te_fsdp.move.start import broadcast
from te_fsdp.parameters import KEY

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.optim import Optimizer

__all__ = ["take_over_gradients", "watch_copies"]


@functools.cache
def watch_copies() -> None:
    """Take over gradients before every optimizer step from now on; later calls do nothing."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    # What is cut further is averaged after this, and taken over then; models of fully_shard have an order of their own.
    take_over_gradients(
        [p for p in held if (f := p.__dict__.get(KEY)) and f.stand_ins is None and f.state is None]
    )


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
