"""Checks that compare ranks or refuse a use that would train wrong.

The core calls the functions of a level at its points (:mod:`te_fsdp.check_points`). A new check is a function in this
package and a row of :data:`CHECKS`. docs/checks.md prints the table, and the cost of each level.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_fsdp.check_points import LEVELS, CheckPoints
from te_fsdp.checks import (
    backward,
    forward,
    gradients,
    inputs,
    model,
    optimizer,
    progress,
    unit_order,
    weights,
)
from te_fsdp.errors import (
    CheckpointError,
    CollectiveError,
    GradientError,
    InitError,
    InputError,
    MeshError,
    OrderError,
    PlacementError,
    PrecisionError,
    TeFsdpError,
)

__all__ = ["CHECKS", "Check", "bind"]


@dataclass(frozen=True)
class Check:
    """A check, and the point at which it runs."""

    name: str  #: Name in docs/checks.md
    when: str  #: The point: a field of :class:`CheckPoints`
    mesh: str  #: Ranks that communicate: axes, "model" (all ranks of the model's mesh), or "" for a local operation
    value: Callable[..., Any]  #: Compares the values of the ranks, or inspects this rank's; raises ``error``
    error: type[TeFsdpError] | None  #: Class of its (main) error; ``None`` if it logs a warning
    level: str = "first_steps"  #: Lowest level at which it runs


#: All checks. Those of one point run in this order.
CHECKS: tuple[Check, ...] = (
    # fully_shard
    Check("models and arguments", "plan", "model", model.compare_models, MeshError, "setup"),
    Check("initial values", "plan", "model", model.compare_initial_values, InitError, "setup"),
    Check("random states", "draw", "model", weights.compare_random_states, InitError, "setup"),
    Check(
        "values of unsharded parameters", "renewed", "model", model.compare_renewed_values, InitError, "setup"
    ),
    Check("copies, removed weights, second derivatives", "sharded", "", model.watch_model, OrderError),
    Check(
        "lists of sharded and plain gradients",
        "sharded",
        "",
        gradients.watch_mixed_lists,
        PlacementError,
        "setup",
    ),
    Check("inputs", "sharded", "tp, cp", inputs.watch_model_inputs, InputError),
    Check("one batch on all ranks", "sharded", "dp_shard", inputs.watch_for_copies, None),
    Check("partial gradients", "sharded", "tp, ep", gradients.compare_gradients, GradientError),
    Check("losses of a part of the logits", "sharded", "tp", gradients.watch_head_gradients, GradientError),
    Check("shared memory", "sharded", "", model.refuse_shared_memory, OrderError),
    Check("states of a different optimizer", "sharded", "", optimizer.explain_failed_loads, CheckpointError),
    Check("split backward", "sharded", "", backward.refuse_split_backward, OrderError),
    Check("steps of all ranks", "sharded", "model", progress.watch_progress, OrderError),
    Check("writes in forward", "sharded", "", model.refuse_writes_in_forward, OrderError),
    Check(
        "setters of FSDP2",
        "sharded",
        "dp_shard, dp_replicate, tp",
        unit_order.watch_setters,
        CollectiveError,
    ),
    # set_device_mesh and context_parallel_shard
    Check("shards of a bound model", "binding", "tp, ep", weights.compare_shards, InitError, "setup"),
    Check("inputs of a bound model", "bound", "tp", inputs.watch_bound_inputs, InputError),
    Check("gradients of a bound model", "bound", "tp", gradients.schedule_gradient_checks, GradientError),
    Check(
        "losses of a part of the logits",
        "bound",
        "tp",
        gradients.watch_head_gradients_of_bound,
        GradientError,
    ),
    Check("batches over cp", "batch", "cp", inputs.check_same_batch, InputError),
    # forward
    Check("errors of one rank", "first", "dp_shard, tp", forward.raise_together, OrderError),
    Check("removed parameters", "initialized", "", model.refuse_removed_parameters, OrderError),
    Check("function transforms", "initialized", "", model.refuse_functional_values, OrderError),
    Check("parameters on meta", "initialized", "", model.require_initialized, OrderError),
    Check("changed parameters", "initialized", "", model.refuse_changed_parameters, OrderError),
    Check("uninitialized memory", "initialized", "", model.refuse_uninitialized, InitError),
    Check("removed parameters", "forward", "", model.refuse_removed_parameters, OrderError),
    Check("changed parameters", "forward", "", model.refuse_new_parameters, OrderError),
    Check("assigned .data", "forward", "", model.refuse_assigned_data, OrderError),
    Check("function transforms", "forward", "", forward.refuse_function_transforms, OrderError),
    Check("inference mode", "forward", "", forward.refuse_inference_mode, OrderError),
    Check(
        "mode, recipe, trained parameters", "forward", "model", forward.compare_computation, PrecisionError
    ),
    Check("inputs of methods", "inputs", "tp, cp", inputs.check_inputs, InputError),
    Check("recipe of a unit", "unit", "dp_shard, tp", forward.compare_recipe, PrecisionError),
    Check(
        "units of all ranks", "unit", "dp_shard, tp", unit_order.require_same_unit, CollectiveError, "full"
    ),
    Check(
        "order of units",
        "unit",
        "dp_shard, dp_replicate, tp",
        unit_order.follow_unit_order,
        CollectiveError,
    ),
    Check("stale weights", "unit", "", forward.refuse_stale_weights, OrderError),
    Check("opaque outputs", "output", "", forward.refuse_opaque_output, PlacementError),
    Check(
        "order of units",
        "ended",
        "dp_shard, dp_replicate, tp",
        unit_order.compare_unit_order,
        CollectiveError,
    ),
    # backward
    Check("start of backward", "trained", "", backward.check_backward_start, OrderError),
    Check("second derivatives of TE", "backward", "", backward.refuse_second_derivatives_of_te, OrderError),
    # step
    Check("arguments of clipping", "clipping", "model", progress.record_clipping, MeshError),
    Check("replaced parameters", "bound_step", "", optimizer.refuse_replaced, OrderError),
    Check("gathered parameters", "bound_step", "", optimizer.refuse_gathered_by_torch, OrderError),
    Check("main weights", "bound_step", "", optimizer.require_main_weights, PrecisionError),
    Check("replicated gradients", "bound_step", "tp", gradients.compare_replicated_gradients, GradientError),
    Check("replaced parameters", "step", "", optimizer.refuse_replaced, OrderError),
    Check("main weights", "step", "", optimizer.require_main_weights, PrecisionError),
    Check("gathered parameters", "step", "", optimizer.refuse_gathered, OrderError),
    Check("closures", "step", "", optimizer.refuse_closure, OrderError),
    Check("first step of an optimizer", "step", "model", optimizer.check_first_step, MeshError),
    Check("averages of HFSDP", "step", "", optimizer.require_outer_averages, OrderError),
    Check("complete gradients", "step", "", gradients.require_complete_gradients, OrderError),
    Check("steps of all ranks", "step", "model", progress.compare_progress, OrderError),
    Check("replicated gradients", "step", "tp", gradients.compare_replicated_gradients, GradientError),
    Check("gradients over ep", "step", "ep", gradients.compare_gradients_over_ep, GradientError),
    Check("optimizer options", "step", "model", optimizer.compare_options, MeshError, "full"),
    Check("gradient shapes", "step", "model", gradients.compare_gradient_shapes, MeshError, "full"),
    Check(
        "equal copies",
        "step",
        "dp_shard, dp_replicate, tp",
        weights.compare_copies_of_step,
        InitError,
        "full",
    ),
    Check("states of a different optimizer", "states", "", optimizer.refuse_unknown_state, CheckpointError),
    Check("closures", "closure", "model", weights.check_closure, MeshError),
)
#: Checks that ``check_inputs=False`` disables.
_OF_INPUTS = (
    inputs.watch_model_inputs,
    inputs.watch_for_copies,
    inputs.check_inputs,
    gradients.compare_gradients,
    gradients.watch_head_gradients,
)


@functools.cache
def bind(level: str, of_inputs: bool = True) -> CheckPoints:
    """Return the functions of a level by point. ``of_inputs`` includes comparisons of inputs and gradients."""
    functions: dict[str, tuple[Callable[..., Any], ...]] = {}
    for check in CHECKS:
        is_included = LEVELS.index(check.level) <= LEVELS.index(level)
        if is_included and (of_inputs or check.value not in _OF_INPUTS):
            functions[check.when] = (*functions.get(check.when, ()), check.value)
    axes = {check.value: check.mesh.split(", ") for check in CHECKS if check.mesh not in ("", "model")}
    return CheckPoints(level, axes, **functions)
