"""The points at which the core runs checks.

A check compares ranks, or refuses a use that would train wrong. ``fully_shard(..., checks=...)`` sets the level of the
checks that run. Arguments are validated where they are used, at every level. The table of all checks is
``te_fsdp.checks.CHECKS``. The core calls checks by point only and imports none: this module loads the table by name
for the first model with a level above "off". So the core works without that package.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from te_fsdp.errors import PlacementError, require_flags, suggest

#: Levels, in ascending order. Each includes the checks of all levels before it.
LEVELS = ("off", "setup", "first_steps", "full")
DEFAULT = "first_steps"
#: Words of other libraries.
_SYNONYMS = {
    "none": "off",
    "false": "off",
    "disabled": "off",
    "init": "setup",
    "true": "first_steps",
    "default": "first_steps",
    "first": "first_steps",
    "all": "full",
    "always": "full",
    "debug": "full",
}

Functions: TypeAlias = tuple[Callable[..., Any], ...]


@dataclass(frozen=True)
class CheckPoints:
    """Functions of the checks of one level, by the point at which the core calls them. Empty at level "off"."""

    level: str = "off"
    #: Axes of the checks of some axes only. At the point ``sharded`` one of them must have several ranks.
    axes: Mapping[Callable[..., Any], list[str]] = field(default_factory=dict, hash=False)
    plan: Functions = ()  #: ``(plan)`` before ``fully_shard`` changes anything
    sharded: Functions = ()  #: ``(state)`` when the model is sharded, before its own hooks of forward
    draw: Functions = ()  #: ``(mesh, label, device)`` before initial values are drawn on all ranks of a mesh
    renewed: Functions = ()  #: ``(parameters, meshes)`` when unsharded parameters were materialized or converted
    binding: Functions = ()  #: ``(planned, tp_mesh, ep_mesh)`` before ``set_device_mesh`` changes anything
    bound: Functions = ()  #: ``(model, tp_mesh)`` at the end of ``set_device_mesh``; ``tp_mesh=None`` removes checks
    batch: Functions = ()  #: ``(batch, meshes)`` before ``context_parallel_shard`` shards a batch
    first: Functions = ()  #: ``(state, run)`` before a forward; calls ``run()``, the functions of ``initialized``
    initialized: Functions = ()  #: ``(state)`` before the first forward after parameters were on meta
    forward: Functions = ()  #: ``(state)`` before a forward of the model
    inputs: Functions = ()  #: ``(model, args, kwargs, method)`` before a method that all-gathers as forward does
    unit: Functions = ()  #: ``(state, name, unit, started)`` before a forward of a unit
    ended: Functions = ()  #: ``(state)`` after a forward of the model that has returned an output
    trained: Functions = ()  #: ``(state, trained)`` after a forward of the model, with outputs that need gradients
    output: Functions = ()  #: ``(name, unit, output)`` after a forward whose output has objects of unknown classes
    backward: Functions = ()  #: ``(state)`` at the first gradient of a parameter that is not sharded
    clipping: Functions = ()  #: ``(state, max_norm, norm_type)`` before gradients are clipped
    bound_step: Functions = ()  #: ``(step)`` before a step of an optimizer without sharded models
    step: Functions = ()  #: ``(step)`` before a step, when reductions have finished
    states: Functions = ()  #: ``(optimizer, parameter, name)`` in a load of a state that FusedAdam does not have
    closure: Functions = ()  #: ``(step, loss)`` after each call of a step's closure

    def call(self, name: str) -> str:
        """Return the name of a collective call at this level.

        Ranks with different levels would run different collectives. Under different names they raise instead.
        """
        return name if self.level == DEFAULT else f"{name} with checks={self.level!r}"


#: The checks of level "off".
NONE = CheckPoints()


def check_points(level: str = DEFAULT, *, inputs: bool = True) -> CheckPoints:
    """Return the checks of a level. Local operation; level "off" does not import ``te_fsdp.checks``.

    Without ``inputs``, inputs and gradients are not compared over tp and cp.
    """
    return NONE if level == "off" else importlib.import_module("te_fsdp.checks").bind(level, inputs)


def require_level(where: str, checks: object) -> str:
    """Return the level that a call requests, by default :data:`DEFAULT`; raise PlacementError for other words."""
    level = DEFAULT if checks is None else checks
    if isinstance(level, str) and level in LEVELS:
        return level
    guess = suggest(level, LEVELS, _SYNONYMS)
    raise PlacementError(
        f"{where}: checks",
        expected=f"one of {LEVELS}",
        got=repr(level),
        fix=f"checks={guess or DEFAULT!r}" + (", if that is meant" if guess else ""),
    )


def requested_checks(checks: object, check_inputs: object) -> CheckPoints:
    """Return the checks that a call of ``fully_shard`` requests by ``checks``, or by the deprecated ``check_inputs``.

    ``check_inputs=False`` keeps its meaning: the default level without comparisons of inputs and gradients.
    """
    if check_inputs is None:
        return check_points(require_level("fully_shard", checks))
    require_flags("fully_shard", check_inputs=check_inputs)
    if checks is not None:
        raise PlacementError(
            "fully_shard: check_inputs and checks",
            expected="only one of them",
            got=f"check_inputs={check_inputs}, checks={checks!r}",
            fix="omit check_inputs",
        )
    instead = DEFAULT if check_inputs else "setup"
    # Scripts written for earlier versions pass check_inputs, which had two levels.
    text = f"fully_shard: check_inputs is deprecated: use checks={instead!r}"
    warnings.warn(text, FutureWarning, stacklevel=3)
    return check_points(inputs=bool(check_inputs))
