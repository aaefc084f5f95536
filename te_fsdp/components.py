"""The order of everything that te_fsdp attaches to a model or runs around its steps.

The core packages import no feature and no check. This file lists them: :func:`te_fsdp.fully_shard` runs :data:`SETUP`
and registers :data:`BEFORE_STEP` and :data:`AFTER_STEP` (:mod:`te_fsdp.lifecycle`). docs/internals.md prints all
tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from te_fsdp.apply_fully_shard import (
    Setup,
    attach_state,
    hook_forward,
    prepare_units,
    reduce_unused_parameters,
    start_checks,
)
from te_fsdp.component import Component
from te_fsdp.features.conversions import follow_conversions
from te_fsdp.features.forward_prefetch import ForwardPrefetch, prefetch_in_forward
from te_fsdp.features.gradient_dtypes import GradientDtypes, attach_gradient_dtypes
from te_fsdp.features.hfsdp.gradients import ShardedOptimizer, hide_unaveraged_grads
from te_fsdp.features.host_pace import HostPace, measure_host_pace
from te_fsdp.features.main_weights import use_fused_adam_master_weights
from te_fsdp.features.nan_report import NanReport
from te_fsdp.features.replicated_gradients import ReplicatedGradients, reduce_replicated_gradients
from te_fsdp.features.transports import UnitTransports, choose_communication
from te_fsdp.features.unreduced_gradients import UnreducedGradients, watch_unreduced_gradients
from te_fsdp.features.wgrad_fusion import fuse_wgrad
from te_fsdp.features.written_weights import record_weight_versions, update_written_main_weights
from te_fsdp.kept_weights import settle_kept_weights
from te_fsdp.lifecycle import StepFunctions, register_step_functions, run_checks, sync_tp_replicas
from te_fsdp.modules.torch_units import reshard_units
from te_fsdp.optimizer_step import (
    allow_mixed_parameters,
    check_gradients,
    finish_components,
    increment_versions,
    prepare_components,
    record_stepping_optimizer,
    release_weights,
    undo_preparations,
    wait_for_gradients,
    wrap_closure,
)
from te_fsdp.quantized.amax import refresh_quantized

SetupFunctions: TypeAlias = tuple[Callable[[Setup], None], ...]


def hook_optimizer_steps(setup: Setup) -> None:
    """Run :data:`BEFORE_STEP` and :data:`AFTER_STEP` around every optimizer step of the process. Local operation."""
    register_step_functions(BEFORE_STEP, AFTER_STEP, setup.state.checks)


#: Functions that :func:`te_fsdp.fully_shard` runs when the parameters are sharded.
SETUP: SetupFunctions = (
    prepare_units,
    attach_gradient_dtypes,
    reduce_unused_parameters,
    hide_unaveraged_grads,
    watch_unreduced_gradients,
    reduce_replicated_gradients,
    attach_state,
    start_checks,
    hook_forward,
    follow_conversions,
    hook_optimizer_steps,
    fuse_wgrad,
    choose_communication,
    prefetch_in_forward,
    measure_host_pace,
)
#: All components, in the order in which they are attached. The last one is attached by ``te_fsdp.report_nan``,
#: ``HostPace`` on GPUs only.
COMPONENTS: tuple[type[Component], ...] = (
    GradientDtypes,
    ShardedOptimizer,
    UnreducedGradients,
    ReplicatedGradients,
    UnitTransports,
    ForwardPrefetch,
    HostPace,
    NanReport,
)
#: Around every step of an optimizer of sharded models. Bound models have a part of it (``bind_device_mesh.py``). In
#: between, ``MainParameters`` installs main weights and removes them again by hooks of the optimizer. torch runs those
#: before :data:`AFTER_STEP`, so that hooks which the user registers later see parameters with their new values.
BEFORE_STEP: StepFunctions = (
    record_stepping_optimizer,
    wait_for_gradients,
    settle_kept_weights,
    run_checks,
    check_gradients,
    wrap_closure,
    update_written_main_weights,
    sync_tp_replicas,
    prepare_components,
    allow_mixed_parameters,
    use_fused_adam_master_weights,
)
AFTER_STEP: StepFunctions = (
    refresh_quantized,
    increment_versions,
    record_weight_versions,
    reshard_units,
    undo_preparations,
    finish_components,
    release_weights,
)
