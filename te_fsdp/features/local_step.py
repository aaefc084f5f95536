"""Steps of TE's FusedAdam on the local tensors of DTensors. These replace the DTensors during a step.

    group["params"]     parameter or main weight (a DTensor)    ->  its local tensor
    optimizer.state     {parameter: states (DTensors)}          ->  {local tensor: local states}

Local tensors of gradients replace the gradients, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp.upstream import te as _te
from te_fsdp.upstream.torch_autograd import without_subclasses
from te_fsdp.upstream.torch_dtensor import local_of_dtensor


# FusedAdam reads ``.data`` of each parameter and gradient. For a DTensor this is an operation in Python: about 70 calls
# per parameter and step. Its kernel only needs local memory.
#
# FusedAdam updates all of them in place, so nothing is copied back. Parameters without state (before the
# first step) or gradient are not replaced. Neither are quantized weights, nor any parameter with
# ``capturable=True``, because that step may read a gradient scaler.
def install_local_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Replace parameters in the groups of a FusedAdam, and return their local tensors, which replace them. Local."""
    replaced: list[torch.Tensor] = []
    if not _te.is_stock_fused_adam(optimizer) or optimizer.capturable:
        return replaced
    decoupled, states = optimizer.use_decoupled_grad, optimizer.state
    scales = getattr(optimizer, "_scales", {})  # of low-precision states, by parameter (TE 2.18 to 2.20)
    with without_subclasses():
        for group in optimizer.param_groups:
            members = group["params"]
            for index, parameter in enumerate(members):
                gradient = getattr(parameter, "decoupled_grad", None) if decoupled else parameter.grad
                if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                    continue
                local, local_gradient = local_of_dtensor(parameter), local_of_dtensor(gradient)
                state = states.get(parameter)
                if not state or type(local) is not torch.Tensor or type(local_gradient) is not torch.Tensor:
                    continue
                states[local] = values = {}
                for name, value in state.items():
                    values[name] = local_of_dtensor(value) if isinstance(value, DTensor) else value
                if scales and parameter in scales:
                    scales[local] = scales[parameter]
                if decoupled:
                    local.decoupled_grad = local_gradient  # type: ignore[missing-attribute]
                else:
                    if local_gradient.dtype is not local.dtype:
                        local.grad_dtype = local_gradient.dtype
                    local.grad = local_gradient
                members[index] = local
                replaced.append(local)
    return replaced


def remove_local_tensors(optimizer: Optimizer, replaced: list[torch.Tensor]) -> None:
    """Remove local tensors from the state. The caller restores the groups. Local operation."""
    scales = getattr(optimizer, "_scales", {})
    for local in replaced:
        optimizer.state.pop(local, None)
        if scales:
            scales.pop(local, None)
        local.grad = None
        local.__dict__.pop("decoupled_grad", None)
    replaced.clear()
