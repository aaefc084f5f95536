"""torch's optimizers: what DTensor can run of them, what hangs on them, which are copies.

Private names, checked on torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def has_rule(operator: str) -> bool:
    """Whether DTensor can run an operator of aten, such as ``_fused_sgd_.tensor_lr`` (``ShardingPropagator``)."""
    tables = vars(DTensor._op_dispatcher.sharding_propagator).values()  # one for each kind of rule
    name, overload = operator.split(".")
    wanted = getattr(getattr(torch.ops.aten, name), overload)
    return any(wanted in table for table in tables if isinstance(table, dict))


def is_copy(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer came from copy or pickle: its constructor, which they leave out, sets one attribute more.

    (``_warned_capturable_if_run_uncaptured``, which ``Optimizer.__getstate__`` does not give.)
    """
    return "_warned_capturable_if_run_uncaptured" not in optimizer.__dict__


def muon_arithmetic() -> tuple[Callable[..., torch.Tensor], Callable[..., float]]:
    """Muon's orthogonalisation of one matrix, and its learning rate for a shape (of ``torch.optim._muon``, torch 2.11).

    ``torch.optim.Muon`` offers them for whole parameters alone.
    """
    from torch.optim import _muon

    return _muon._zeropower_via_newtonschulz, _muon._adjust_lr


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What runs before and after an optimizer's steps: hooks of its own (``_optimizer_step_pre_hooks``), and of all."""
    tables: list[dict[Any, Callable[..., Any]]] = [
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    return [hook for table in tables for hook in table.values()]
