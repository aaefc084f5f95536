"""``ShardingState``: what ``fully_shard`` leaves on a model for training: strategies, and what a step has to do.

Found from the model by :func:`sharding_state`, and from one of its parameters by :func:`state_of`: optimizer hooks
see parameters alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from te_fsdp.binding import STATE

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from te_fsdp.mesh import Meshes
    from te_fsdp.sharding.strategies import Strategy

__all__ = ["Replicated", "ShardingState", "mark", "sharding_state", "state_of"]

#: Key in the root model's ``__dict__``.
KEY = "_te_fsdp_sharding"


class Replicated(Protocol):
    """What the schedule asks of the parameters that FSDP2 does not manage (strategy ``no_shard``)."""

    @property
    def pending(self) -> Collection[str]:
        """Names of the parameters whose gradients have been added to but not reduced."""
        ...

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the backwards to come reduce gradients when they end."""
        ...

    def reduce(self) -> None:
        """Reduce what is pending, now. Collective over data parallel."""
        ...

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget all gradients, pending ones included."""
        ...


@dataclass(eq=False)
class ShardingState:
    """What training needs to know about a sharded model.

    Attributes:
        model: The root model.
        meshes: The job's meshes.
        units: Name -> strategy of each unit; ``""`` is the root with what its units have left.
        outer: Strategy over ``dp_replicate``: ``"no_shard"`` or ``"optim"``.
        precision: The precision policy, or ``None``.
        replicated: The machinery of parameters that FSDP2 does not manage, or ``None``.
        modules: Name -> module of the units that FSDP2 manages, inner before outer.
        outer_optimizer: What shards main weights and optimizer state over further axes, or ``None``.
        precision_plan: What ``precision`` means for each parameter, or ``None``.
        before_step: Called with the optimizer before each step, when all gradients are reduced over ``dp_shard``;
            the copies over tp are made equal afterwards, and ``precision_plan.before_step`` comes last.
        after_step: Called with the optimizer after each step, when ``precision_plan.after_step`` has run and before
            kept weights are released.
    """

    model: nn.Module
    meshes: Meshes
    units: dict[str, Strategy]
    outer: str = "no_shard"
    precision: Any = None
    precision_plan: Any = None
    modules: dict[str, nn.Module] = field(default_factory=dict)
    replicated: Replicated | None = None
    outer_optimizer: Any = None
    before_step: list[Callable[[Optimizer], None]] = field(default_factory=list)
    after_step: list[Callable[[Optimizer], None]] = field(default_factory=list)


class _Reference:
    """Weak reference to a state, as an attribute of parameters: copies and pickles of a parameter leave it behind."""

    def __init__(self, state: ShardingState | None = None) -> None:
        self.state = weakref.ref(state) if state is not None else lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Reference:
        return _Reference()

    def __reduce__(self) -> tuple[type[_Reference], tuple[()]]:
        return (_Reference, ())


def sharding_state(model: nn.Module) -> ShardingState | None:
    """The state of a model that ``fully_shard`` was called on; ``None`` for any other module."""
    return model.__dict__.get(KEY)


def state_of(parameter: torch.Tensor) -> ShardingState | None:
    """The state of the model that a parameter belongs to, ``None`` if it has none."""
    reference = parameter.__dict__.get(STATE)
    return reference.state() if reference is not None else None


def mark(state: ShardingState) -> None:
    """Let :func:`state_of` find ``state`` from each parameter that the model has now. Local operation."""
    reference = _Reference(state)
    for parameter in state.model.parameters():
        setattr(parameter, STATE, reference)
