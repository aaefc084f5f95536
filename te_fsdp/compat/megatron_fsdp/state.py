"""Optimizer state that is there before the first step, for scripts that load into ``optimizer.state_dict()``.

DCP fills the state dict that it is given. That of an optimizer which has not stepped yet has no state, so that
nothing of it would be loaded, in silence. Megatron-FSDP takes a step beforehand, which counts as one (0.6.1: and moves
the weights). Here state is made when ``state_dict()`` is called before the first step, and is that of no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _torch
from te_fsdp.errors import OrderError, message
from te_fsdp.sharding.outer_gradients import zero_gradient

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["allocate_before_state_dict"]

#: What a step of no effect has: neither moves nor shrinks weights.
_STILL = {"lr": 0.0, "weight_decay": 0.0}
#: Whose state after such a step, with "step" put back, is that of no step at all.
_PLAIN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)


def allocate_before_state_dict(optimizer: Optimizer) -> None:
    """Let ``optimizer.state_dict()`` allocate state where there is none. Local operation.

    ``state_dict()`` before the first step is then collective where a step is, and raises ``OrderError`` for an
    optimizer whose state cannot be made without a step that counts (over quantized weights: all but FusedAdam).
    """
    optimizer.register_state_dict_pre_hook(_allocate)


def _allocate(optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    stepped = any(set(state) - {"master_param"} for state in optimizer.state.values())
    if stepped or any(p.grad is not None for p in parameters):
        return
    if _te.is_fused_adam(optimizer):
        fused: Any = optimizer
        for parameter in parameters:
            remainders = parameter.dtype == torch.bfloat16 and fused.store_param_remainders
            fused.initialize_state(parameter, remainders)
        return
    dampened = any(group.get("dampening") for group in optimizer.param_groups)
    quantized = any(_te.is_quantized(_torch.local_of(p)) for p in parameters)
    if type(optimizer) not in _PLAIN or dampened or quantized:
        raise OrderError(
            message(
                f"{type(optimizer).__name__}.state_dict() before the first step",
                expected="state to load into",
                got="none, and it is not made without a step that counts",
                fix="load with te_fsdp.checkpoint.load, which allocates it",
            )
        )
    _still_step(optimizer, parameters)


def _still_step(optimizer: Optimizer, parameters: list[torch.Tensor]) -> None:
    """A step that leaves the weights as they are, and state as if there had been none."""
    before: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        before.append({key: group[key] for key in _STILL if key in group})
        group.update({key: value for key, value in _STILL.items() if key in group})
    for parameter in parameters:
        zero_gradient(parameter)
    try:
        type(optimizer).step(optimizer)
    finally:
        for group, options in zip(optimizer.param_groups, before, strict=True):
            group.update(options)
        for parameter in parameters:
            parameter.grad = None
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
