"""Sum the gradients of a unit that are partial over tp with one all-reduce per unit, before FSDP2 reduces them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_patches as _fsdp2_patches,
    torch_dtensor as _torch,
)

_SUM = Partial()


# [Note: partial gradients] Under sequence parallelism each rank of tp has a part of the gradients of norms and
# of some biases. FSDP2 would let DTensor sum each of them with its own all-reduce and some hundred calls of
# Python. Here they are copied into one buffer, which one all-reduce sums. FSDP2 then gets gradients that are
# equal on all ranks of tp.
#
# The sums have the same bits as DTensor's over two ranks. Over more ranks the backend may add in a different
# order, so that the last bit may differ.
def sum_at_once(group: Any) -> None:
    """Let FSDP2's parameter group sum partial gradients together in each reduction. Local operation."""
    _fsdp2_patches.add_reduction_listener(group, before=_sum)


def _sum(group: Any) -> None:
    """Sum the partial gradients of a group. Collective over tp: one all-reduce per dtype."""
    records = _fsdp2_gradients.replicated_records(group)
    groups: dict[tuple[int, torch.dtype], list[tuple[Any, DTensor]]] = {}
    for managed, gradient in _fsdp2_gradients.partial_gradients(records, _SUM) if records else ():
        groups.setdefault((id(_torch.spec_of(gradient).mesh), gradient.dtype), []).append((managed, gradient))
    for waiting in groups.values():
        mesh = _torch.spec_of(waiting[0][1]).mesh
        parts = [_torch.local_of_dtensor(gradient) for _, gradient in waiting]
        flat = (
            torch.cat([part.reshape(-1) for part in parts]) if len(parts) > 1 else parts[0].flatten().clone()
        )
        # One all-reduce for all norms of a unit: they are small, and DTensor would start one for each.
        dist.all_reduce(flat, group=mesh.get_group())
        sums = flat.split([part.numel() for part in parts])
        for (managed, _), part, total in zip(waiting, parts, sums, strict=True):
            _fsdp2_gradients.set_unsharded_gradient(managed, total.view(part.shape))


def place_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Redistribute gradients to the placements of their parameters, which have no stacked rows.

    Collective for each gradient whose placements differ. DTensor chooses the placements of an assigned gradient such as
    ``a + (a * b).sum() * b``. A rank may then have a part of the gradient of a parameter that is replicated over tp.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements and gradient.device_mesh == parameter.device_mesh:
            with torch.no_grad():
                parameter.grad = gradient.redistribute(placements=parameter.placements)
