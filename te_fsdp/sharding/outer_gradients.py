"""Gradients of parameters whose optimizer state is cut over their holders: where they are, and what they are worth.

``parameter.grad`` is this rank's own gradient, which the holders have not averaged. The average exists in rows, on the
stand-in that the optimizer will update, once somebody has asked for it: a step, or a norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from te_fsdp import _torch
from te_fsdp.errors import OrderError
from te_fsdp.parameters import facts_of, label_of
from te_fsdp.quantized.optimizer_steps import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharding.outer_chunks import copies_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.sharding.outer_state import StandIns

__all__ = [
    "averaged",
    "check_step",
    "current",
    "finish_averages",
    "forget_average",
    "gather_averages",
    "give_gradient",
    "gradient_of",
    "zero_gradient",
]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's own gradient: the decoupled one of another dtype where there is one, else ``grad``."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return decoupled if decoupled is not None else parameter.grad


def give_gradient(main: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set the gradient of a stand-in under both names that optimizers read."""
    main.grad = main.decoupled_grad = gradient  # type: ignore[missing-attribute]


def zero_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Give a parameter without gradient one of zeros. Local operation."""
    local = _torch.local_of(parameter)
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    zeros = _torch.placed_like(torch.zeros(local.shape, dtype=dtype, device=local.device), parameter)
    parameter.grad = zeros
    return zeros


def averaged(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose ``grad`` is the model's gradient: stand-ins of cut parameters, all others themselves.

    Averages what has not been averaged. Collective over the holders of cut parameters, once per optimizer; in the same
    order on all ranks.

    Raises:
        OrderError: A parameter of ``outer_strategy="optim"`` whose optimizer was not sharded, or gradients that have
            changed since they were averaged.
    """
    found, seen = [], set()
    for parameter in parameters:
        stand_ins = _stand_ins(parameter)
        if stand_ins is None:
            if parameter.requires_grad:
                check_sharded(parameter, "clip_grad_norm_ or grad_norm before shard_optimizer")
            found.append(parameter)
            continue
        if id(stand_ins) not in seen:
            seen.add(id(stand_ins))
            stand_ins.reduce()
        found.append(stand_ins.ready[id(parameter)][0] if id(parameter) in stand_ins.ready else parameter)
    return found


def current(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a step now would use as far as it is there: averaged rows, else the parameter's own.

    For changes that are the same on all ranks and linear, such as scaling. Local operation.
    """
    stand_ins = _stand_ins(parameter)
    known = None if stand_ins is None else stand_ins.ready.get(id(parameter))
    own = gradient_of(parameter)
    if known is None or own is None or known[1]() is not own:
        return own
    return known[0].grad


def forget_average(parameter: torch.Tensor) -> None:
    """Forget what was averaged of a parameter's gradient, which is about to be cleared. Local operation."""
    stand_ins = _stand_ins(parameter)
    if stand_ins is not None:
        stand_ins.ready.pop(id(parameter), None)
        stand_ins.early.forget()


def finish_averages(parameters: Iterable[torch.Tensor]) -> None:
    """Complete the averages that have begun during backward. Collective over the holders where there may be some.

    Raises:
        OrderError: Gradients have changed since they were averaged.
    """
    found = {id(stand_ins): stand_ins for stand_ins in map(_stand_ins, parameters) if stand_ins is not None}
    for stand_ins in found.values():
        if stand_ins.early.expected:
            stand_ins.reduce()


def gather_averages(parameters: Iterable[torch.Tensor]) -> None:
    """Make ``.grad`` of cut parameters the average over their holders, whole.

    Collective over the holders: the averages, unless that is done, and an all-gather of their rows.

    Raises:
        OrderError: A parameter of ``outer_strategy="optim"`` whose optimizer was not sharded, or gradients that have
            changed since they were averaged.
    """
    found: dict[int, StandIns] = {}
    for parameter in parameters:
        stand_ins = _stand_ins(parameter)
        if stand_ins is not None:
            found[id(stand_ins)] = stand_ins
        elif parameter.requires_grad:
            check_sharded(parameter, "finish_grad_reduce(outer=True) before shard_optimizer")
    for stand_ins in found.values():
        stand_ins.gather_averages()


def check_step(optimizer: Optimizer) -> None:
    """Raise before a step on gradients that nobody would average over the outer axis. Local operation.

    Raises:
        OrderError: The optimizer was not given to ``shard_optimizer``.
    """
    keeper = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if keeper is not None and keeper.cuts:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if gradient_of(parameter) is not None:
                check_sharded(parameter, f"{type(optimizer).__name__}.step()")


def check_sharded(parameter: torch.Tensor, what: str) -> None:
    """Raise for a parameter whose gradients wait for an optimizer that averages them."""
    copies = copies_of(parameter)
    if copies is None or copies.reduced:
        return
    name = label_of(parameter)
    raise OrderError(
        f"{what}: {name} of a model with outer_strategy='optim'",
        expected="an optimizer that averages gradients over dp_replicate",
        got="one that updates with those of this rank's dp_shard group",
        why="The copies of the model would train apart",
        fix="call te_fsdp.shard_optimizer(optimizer) once, right after it was built",
    )


def _stand_ins(parameter: torch.Tensor) -> StandIns | None:
    """The stand-ins of the living optimizer that cuts a parameter's state."""
    facts = facts_of(parameter)
    return facts.stand_ins() if facts is not None and facts.stand_ins is not None else None
