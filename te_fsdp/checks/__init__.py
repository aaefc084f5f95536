"""Checks that compare ranks or refuse a use that would train wrong.

The core calls the functions of a level at its points (:mod:`te_fsdp.check_points`). A new check is a function in this
package and a row of :data:`CHECKS`. docs/checks.md prints the table, and what each level costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from te_fsdp.check_points import LEVELS, CheckPoints, When
from te_fsdp.checks import backward, forward, gradients, inputs, model, optimizer, weights
from te_fsdp.errors import (
    CheckpointError,
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
    when: When  #: Lowest level, and the point
    mesh: str  #: Ranks that communicate: axes, "model" (all ranks of the model's mesh), or "" for a local operation
    value: Callable[..., Any]  #: Compares the values of the ranks, or inspects this rank's; raises ``error``
    error: type[TeFsdpError] | None  #: Class of its (main) error; ``None`` if it logs a warning


#: All checks. Those of one point run in this order.
CHECKS: tuple[Check, ...] = (
    # fully_shard
    Check("models and arguments", When.PLAN, "model", model.compare_models, MeshError),
    Check("initial values", When.PLAN, "model", model.compare_initial_values, InitError),
    Check("random states", When.DRAW, "model", weights.compare_random_states, InitError),
    Check("values of unsharded parameters", When.RENEWED, "model", model.compare_renewed_values, InitError),
    Check("copies, removed weights, second derivatives", When.SHARDED, "", model.watch_model, OrderError),
    Check(
        "lists of sharded and plain gradients", When.LISTS, "", gradients.watch_mixed_lists, PlacementError
    ),
    Check("inputs", When.SHARDED, "tp, cp", inputs.watch_model_inputs, InputError),
    Check("one batch on all ranks", When.SHARDED, "dp_shard", inputs.watch_for_copies, None),
    Check("partial gradients", When.SHARDED, "tp", gradients.compare_gradients, GradientError),
    Check(
        "losses of a part of the logits", When.SHARDED, "tp", gradients.watch_head_gradients, GradientError
    ),
    Check("shared memory", When.SHARDED, "", model.refuse_shared_memory, OrderError),
    Check("states of another optimizer", When.SHARDED, "", optimizer.explain_failed_loads, CheckpointError),
    Check("split backward", When.SHARDED, "", backward.refuse_split_backward, OrderError),
    Check("writes in forward", When.SHARDED, "", model.refuse_writes_in_forward, OrderError),
    # set_device_mesh and context_parallel_shard
    Check("shards of a bound model", When.BINDING, "tp, ep", weights.compare_shards, InitError),
    Check("inputs of a bound model", When.BOUND, "tp", inputs.watch_bound_inputs, InputError),
    Check(
        "gradients of a bound model", When.BOUND, "tp", gradients.compare_gradients_of_bound, GradientError
    ),
    Check(
        "losses of a part of the logits",
        When.BOUND,
        "tp",
        gradients.watch_head_gradients_of_bound,
        GradientError,
    ),
    Check("batches over cp", When.BATCH, "cp", inputs.check_same_batch, InputError),
    # forward
    Check("errors of one rank", When.FIRST, "dp_shard, tp", forward.raise_together, OrderError),
    Check("removed parameters", When.INITIALIZED, "", model.refuse_removed_parameters, OrderError),
    Check("function transforms", When.INITIALIZED, "", model.refuse_functional_values, OrderError),
    Check("parameters on meta", When.INITIALIZED, "", model.require_initialized, OrderError),
    Check("changed parameters", When.INITIALIZED, "", model.refuse_changed_parameters, OrderError),
    Check("uninitialized memory", When.INITIALIZED, "", model.refuse_uninitialized, InitError),
    Check("removed parameters", When.FORWARD, "", model.refuse_removed_parameters, OrderError),
    Check("assigned .data", When.FORWARD, "", model.refuse_assigned_data, OrderError),
    Check("function transforms", When.FORWARD, "", forward.refuse_function_transforms, OrderError),
    Check("inference mode", When.FORWARD, "", forward.refuse_inference_mode, OrderError),
    Check(
        "mode, recipe, trained parameters", When.FORWARD, "model", forward.compare_computation, PrecisionError
    ),
    Check("inputs of methods", When.INPUTS, "tp, cp", inputs.check_inputs, InputError),
    Check("recipe of a unit", When.UNIT, "dp_shard, tp", forward.compare_recipe, PrecisionError),
    Check("stale weights", When.UNIT, "", forward.refuse_stale_weights, OrderError),
    Check("opaque outputs", When.OUTPUT, "", forward.refuse_opaque_output, PlacementError),
    # backward
    Check("start of backward", When.TRAINED, "", backward.check_backward_start, OrderError),
    Check("second derivatives", When.BACKWARD, "", backward.refuse_second_derivatives_of_te, OrderError),
    # step
    Check("replaced parameters", When.BOUND_STEP, "", optimizer.refuse_replaced, OrderError),
    Check("gathered parameters", When.BOUND_STEP, "", optimizer.refuse_gathered_by_torch, OrderError),
    Check("main weights", When.BOUND_STEP, "", optimizer.require_main_weights, PrecisionError),
    Check(
        "replicated gradients", When.BOUND_STEP, "tp", gradients.compare_replicated_gradients, GradientError
    ),
    Check("replaced parameters", When.STEP, "", optimizer.refuse_replaced, OrderError),
    Check("main weights", When.STEP, "", optimizer.require_main_weights, PrecisionError),
    Check("gathered parameters", When.STEP, "", optimizer.refuse_gathered, OrderError),
    Check("closures", When.STEP, "", weights.refuse_closure, OrderError),
    Check("first step of an optimizer", When.STEP, "model", optimizer.check_first_step, MeshError),
    Check("complete gradients", When.STEP, "", gradients.require_complete_gradients, OrderError),
    Check("averages of HFSDP", When.STEP, "", optimizer.require_outer_averages, OrderError),
    Check("replicated gradients", When.STEP, "tp", gradients.compare_replicated_gradients, GradientError),
    Check("gradients over ep", When.STEP, "ep", gradients.compare_gradients_over_ep, GradientError),
    Check("optimizer options", When.EVERY_STEP, "model", optimizer.compare_options, MeshError),
    Check("gradient shapes", When.EVERY_STEP, "model", gradients.compare_gradient_shapes, MeshError),
    Check(
        "equal copies",
        When.EVERY_STEP,
        "dp_shard, dp_replicate, tp",
        weights.compare_copies_of_step,
        InitError,
    ),
    Check("states of another optimizer", When.STATES, "", optimizer.refuse_unknown_state, CheckpointError),
    Check("closures", When.CLOSURE, "model", weights.check_closure, MeshError),
)
#: Checks that ``check_inputs=False`` leaves out.
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
        if LEVELS.index(check.when.level) > LEVELS.index(level):
            continue
        if of_inputs or check.value not in _OF_INPUTS:
            functions[check.when.point] = (*functions.get(check.when.point, ()), check.value)
    return CheckPoints(level, **functions)
