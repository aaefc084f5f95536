"""What te_fsdp does around ``optimizer.step()``: one hook before every step and one after it, each running a list.

    bound models      ``BEFORE_STEP`` and ``AFTER_STEP`` of ``modules/apply.py``
    sharded models    those of ``sharding/steps.py``, which have the same and more

torch calls hooks in the order in which they were registered: in which a process first needed them. These lists have one
order, which docs/internals.md prints. Their functions look at the parameters that te_fsdp has marked
(:class:`te_fsdp.parameters.Facts`), so that optimizers of other models in the process see no change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_fsdp.parameters import KEY, Facts

if TYPE_CHECKING:
    import torch
    from torch.optim import Optimizer

__all__ = ["Step", "StepFunctions", "held_by", "run_around_steps"]


def held_by(optimizer: Optimizer) -> list[tuple[torch.Tensor, Facts]]:
    """The parameters of an optimizer that te_fsdp has marked, each with its record. Local operation."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts = parameter.__dict__.get(KEY)
            if facts:
                found.append((parameter, facts))
    return found


class Step:
    """A step of an optimizer, before or after it, as the functions of the lists see it.

    Attributes:
        optimizer: Whose step it is.
        where: ``"AdamW.step"``, for messages.
        has_closure: Whether it was given one, whose forward and backward run within the step.
    """

    def __init__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.optimizer = optimizer
        self.where = f"{type(optimizer).__name__}.step"
        self.has_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))

    @functools.cached_property
    def held(self) -> list[tuple[torch.Tensor, Facts]]:
        """:func:`held_by` the optimizer, from the first look on."""
        return held_by(self.optimizer)

    @functools.cached_property
    def models(self) -> list[tuple[Any, list[torch.Tensor]]]:
        """State of each sharded model that the optimizer works on (``ShardingState``), and its parameters here."""
        found: dict[int, tuple[Any, list[torch.Tensor]]] = {}
        for parameter, facts in self.held:
            state = facts.state() if facts.state is not None else None
            if state is not None:
                found.setdefault(id(state), (state, []))[1].append(parameter)
        return list(found.values())


StepFunctions: TypeAlias = tuple[Callable[[Step], None], ...]


class _Lists:
    """The two lists of this process."""

    before: StepFunctions = ()
    after: StepFunctions = ()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook before every step."""
        step = Step(optimizer, args, kwargs)
        for function in self.before:
            function(step)

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook after every step."""
        step = Step(optimizer, args, kwargs)
        for function in self.after:
            function(step)


@functools.cache
def _lists() -> _Lists:
    """Registered when the first model is bound; hooks of all optimizers belong to the process, and so do the lists."""
    lists = _Lists()
    register_optimizer_step_pre_hook(lists.before_step)
    register_optimizer_step_post_hook(lists.after_step)
    return lists


def run_around_steps(before: StepFunctions, after: StepFunctions) -> None:
    """Run these around every optimizer step from now on. Of lists that hold one another the longer stays.

    Args:
        before: Run before each step, in this order.
        after: Run after each step, in this order.
    """
    lists = _lists()
    if len(before) + len(after) > len(lists.before) + len(lists.after):
        lists.before, lists.after = before, after
