"""Optimizers that hold parameters which binding, sharding or initialising has replaced: their steps would be lost.

    optimizer built before    holds                          the model has, and gradients go to
    set_device_mesh           plain parameters               DTensors on tp
    fully_shard               plain ones, or DTensors on tp  FSDP2's shards
    materialize               shards on meta                 shards on the device

Whatever replaces a parameter leaves a mark on the old object, which lives exactly as long as somebody still holds it.
Before each step of an optimizer :func:`refuse_replaced` looks for marks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from te_fsdp.errors import OrderError
from te_fsdp.parameters import KEY, Facts, facts_of, noted

if TYPE_CHECKING:
    from te_fsdp.step_hooks import Step

__all__ = ["note_replaced", "refuse_replaced", "registered_at", "replacing"]


@contextlib.contextmanager
def replacing(model: nn.Module, by: str, *, prefix: str = "") -> Iterator[None]:
    """Mark the parameters that ``model`` has before the context and no longer has after it. Local operation.

    Args:
        model: The root of what is changed.
        by: The call that replaces them, for the message.
        prefix: Name of ``model`` in the user's tree.
    """
    before = list(model.named_parameters(prefix=prefix))
    try:
        yield
    finally:
        now = {id(parameter) for parameter in model.parameters()}
        for name, parameter in before:
            if id(parameter) not in now:
                note_replaced(parameter, name, by)


def note_replaced(parameter: torch.Tensor, name: str, by: str) -> None:
    """Mark a parameter that a module has lost. Local operation."""
    # On a record of this object's own: a gathered parameter shares its shard's, which stays. Of calls within each other
    # the outermost, the user's own, marks last.
    parameter.__dict__[KEY] = dataclasses.replace(facts_of(parameter) or Facts(), replaced=(name, by))


def refuse_replaced(step: Step) -> None:
    """Raise for parameters that no module has any longer.

    Raises:
        OrderError: Names the first of them, and the call that replaced it.
    """
    marked = {id(parameter): parameter for parameter, facts in step.held if facts.replaced}
    if not marked:
        return
    # Another model may share a parameter with the one that lost it: a step for that model is right.
    for owner, name in registered_at(marked):
        noted(marked.pop(id(owner._parameters[name]))).replaced = None
    if not marked:
        return
    name, by = noted(next(iter(marked.values()))).replaced or ("", "")
    count = sum(len(group["params"]) for group in step.optimizer.param_groups)
    more = f", and {len(marked) - 1} more of its {count}" if len(marked) > 1 else ""
    raise OrderError(
        f"{step.where}: {name}{more}",
        expected="parameters that the model has now",
        got=f"one from before {by}, which has replaced it",
        why="Gradients go to the new parameter: the step would change nothing",
        fix="build the optimizer after te_fsdp.fully_shard and te_fsdp.materialize, from model.parameters()",
    )


def registered_at(parameters: Collection[int]) -> Iterator[tuple[nn.Module, str]]:
    """Every module of this process that has a parameter, and its name there: parameters do not know their owners.

    Local operation. Looks at all objects that the garbage collector knows: for setup and errors alone.

    Args:
        parameters: By ``id``; what is removed from it meanwhile is not looked for any longer.
    """
    for candidate in gc.get_objects():
        # By its type: proxies of all kinds answer isinstance with side effects.
        if issubclass(type(candidate), nn.Module):
            for name, parameter in candidate.__dict__.get("_parameters", {}).items():
                if id(parameter) in parameters:
                    yield candidate, name
