"""Let TE's FusedAdam step on the local tensors of DTensors.

FusedAdam reads ``.data`` of each parameter and gradient. Of a DTensor that is an operation, which DTensor answers in
Python: some 70 calls for each parameter and step. Its kernel takes local memory alone. So for the time of a step the
local tensors stand in the groups, with the local gradients and states:

    group["params"]     parameter or main weight (a DTensor)    ->  its local tensor
    optimizer.state     {parameter: states (DTensors)}          ->  and {local tensor: local states}

FusedAdam writes to all of these in place, so that nothing has to be copied back. What has no state yet (before the
first step) or no gradient stays as it is, as do quantized weights, and everything with ``capturable=True``, whose step
may ask a gradient scaler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.upstream import te as _te
from te_fsdp.upstream.torch_autograd import without_subclasses
from te_fsdp.upstream.torch_dtensor import local_of_dtensor

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Replaced(NamedTuple):
    """A member of a group that its local tensor stands in for."""

    members: list[torch.Tensor]  #: ``group["params"]``
    place: int  #: Its index there
    parameter: torch.Tensor
    local: torch.Tensor


def put_locals_in(optimizer: Any) -> list[Replaced]:
    """Put local tensors into the groups of a FusedAdam, before its step. Local operation; nothing for others."""
    found: list[Replaced] = []
    if not _te.is_stock_fused_adam(optimizer) or optimizer.capturable:
        return found
    decoupled, states, scales = optimizer.use_decoupled_grad, optimizer.state, _scales_of(optimizer)
    with without_subclasses():
        for group in optimizer.param_groups:
            members = group["params"]
            for place, parameter in enumerate(members):
                gradient = getattr(parameter, "decoupled_grad", None) if decoupled else parameter.grad
                if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                    continue
                local, own, state = (
                    local_of_dtensor(parameter),
                    local_of_dtensor(gradient),
                    states.get(parameter),
                )
                if not state or type(local) is not torch.Tensor or type(own) is not torch.Tensor:
                    continue
                states[local] = values = {}
                for name, value in state.items():
                    values[name] = local_of_dtensor(value) if isinstance(value, DTensor) else value
                if parameter in scales:
                    scales[local] = scales[parameter]
                if decoupled:
                    local.decoupled_grad = own  # type: ignore[missing-attribute]
                else:
                    if own.dtype is not local.dtype:
                        local.grad_dtype = own.dtype
                    local.grad = own
                members[place] = local
                found.append(Replaced(members, place, parameter, local))
    return found


def take_locals_out(optimizer: Optimizer, replaced: list[Replaced]) -> None:
    """Undo :func:`put_locals_in`. Local operation."""
    scales = _scales_of(optimizer)
    for members, place, parameter, local in replaced:
        if place < len(members) and members[place] is local:
            members[place] = parameter
        optimizer.state.pop(local, None)
        scales.pop(local, None)
        local.grad = None
        local.__dict__.pop("decoupled_grad", None)
    replaced.clear()


def _scales_of(optimizer: Any) -> dict[Any, Any]:
    """FusedAdam's scales of low-precision states, by parameter (``_scales``, TE 2.18 to 2.20)."""
    return getattr(optimizer, "_scales", {})
