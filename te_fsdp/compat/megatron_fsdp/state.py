"""Optimizer state that is there before the first step, for scripts that load into ``optimizer.state_dict()``.

DCP fills the state dict that it is given. That of an optimizer which has not stepped yet has no state, so that
nothing of it would be loaded, in silence. Megatron-FSDP takes a step beforehand, which counts as one (0.6.1: and moves
the weights). Here state is made when ``state_dict()`` is called, for each parameter that has none yet, and is that of
no step:

    torch's optimizers   as the optimizer itself makes it: another one of its kind steps on zeros of the same layout,
                         and its count of steps goes back to 0
    TE's FusedAdam       by its ``initialize_state``, and ``step`` of each group, which is not among the state
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.errors import CheckpointError, OrderError
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharding.main_weights import initialize_fused_adam
from te_fsdp.sharding.outer_optimizer import chunk_in
from te_fsdp.sharding.outer_state import MAIN

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["allocate_before_state_dict"]

#: Whose state after a step on zeros, with "step" put back, is that of no step at all.
_PLAIN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop)


def allocate_before_state_dict(optimizer: Optimizer) -> None:
    """Let ``optimizer.state_dict()`` allocate state where there is none. Local operation.

    Gradients and weights stay as they are. ``state_dict()`` before the first step raises ``OrderError`` for an
    optimizer whose state cannot be made without a step that counts, and ``load_state_dict()`` raises
    ``CheckpointError`` for a state dict without state, such as one that was asked for before this call, of an
    optimizer that keeps some.
    """
    # Around the methods, not as hooks: those run when main weights stand in for the parameters already.
    save, load = _saving(optimizer.state_dict), _loading(optimizer.load_state_dict)
    optimizer.state_dict = MethodType(save, optimizer)  # type: ignore[method-assign]
    optimizer.load_state_dict = MethodType(load, optimizer)  # type: ignore[method-assign]


def _saving(stock: Callable[[], dict[str, Any]]) -> Callable[[Optimizer], dict[str, Any]]:
    def state_dict(optimizer: Optimizer) -> dict[str, Any]:
        _allocate(optimizer)
        return stock()

    return state_dict


def _loading(stock: Callable[[dict[str, Any]], None]) -> Callable[[Optimizer, dict[str, Any]], None]:
    def load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not state_dict["state"]:
            _allocate(optimizer)
            _refuse_empty(optimizer)
        stock(state_dict)

    return load_state_dict


def _refuse_empty(optimizer: Optimizer) -> None:
    kept = sum(bool(state) for state in optimizer.state.values())
    if kept:
        raise CheckpointError(
            f"{type(optimizer).__name__}.load_state_dict",
            expected=f"state of {kept} parameters",
            got="a state dict without any",
            why="DCP fills the state dict of an optimizer as it is: what is missing there is not loaded",
            fix="ask for optimizer.state_dict() after fully_shard_optimizer(optimizer), and load into that",
        )


@torch.no_grad()
def _allocate(optimizer: Optimizer) -> None:
    """Give every trained parameter without state its state before the first step. Local operation.

    Raises:
        OrderError: No parameter has state, and that of this optimizer is not made without a step.
    """
    fused = _te.is_fused_adam(optimizer)
    stepped = any(set(state) - {MAIN} for state in optimizer.state.values())
    if not fused and not _is_plain(optimizer):
        if not stepped:
            raise OrderError(
                f"{type(optimizer).__name__}.state_dict() before the first step",
                expected="state to load into",
                got="none, and it is not made without a step that counts",
                fix="load with te_fsdp.checkpoint.load, which allocates it",
            )
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if set(optimizer.state.get(parameter, {})) - {MAIN}:
                continue
            if fused and (parameter.requires_grad or chunk_in(optimizer, parameter) is None):
                initialize_fused_adam(optimizer, parameter)  # its steps give frozen parameters state as well
            elif parameter.requires_grad:
                _initialize(optimizer, group, parameter)
        if fused and "step" not in group:
            group["step"] = _no_steps(optimizer, group)


def _is_plain(optimizer: Optimizer) -> bool:
    # The first step with dampening does not dampen, which it tells by the absence of state.
    dampened = any(group.get("momentum") and group.get("dampening") for group in optimizer.param_groups)
    return type(optimizer) in _PLAIN and not dampened


def _initialize(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> None:
    """What a torch optimizer keeps for a parameter before its first step."""
    stand_ins = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    main = None if stand_ins is None else stand_ins.make(optimizer, parameter)
    blank = torch.zeros_like(parameter if main is None else main)
    blank.grad = torch.zeros_like(blank)
    other = type(optimizer)([{**group, "params": [blank]}])  # type: ignore[call-arg]
    other.step()
    state = other.state.get(blank, {})
    if "step" in state:
        state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0
    if state:
        optimizer.state[parameter].update(state)


def _no_steps(optimizer: Any, group: dict[str, Any]) -> int | torch.Tensor:
    """FusedAdam's count of steps before the first one, of the type that it gives it."""
    if not optimizer.capturable:
        return 0
    device = group["params"][0].device if group["params"] else None
    return torch.zeros(1, dtype=torch.int, device=device)
