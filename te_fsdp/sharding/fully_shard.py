"""``fully_shard``: set_device_mesh, then FSDP2 unit by unit, then what FSDP2 leaves undone.

Gradients of experts come out as in one process:

    one process       gradient of the mean loss over all tokens
    dense parameter   every rank has a mean over its own tokens    -> mean over all data-parallel ranks
    expert            its tokens come from all ranks of ``ep``,    -> sum over the ranks that hold the expert,
                      its gradient is a sum over those ranks          divided by the number of all data-parallel ranks

FSDP2 would divide by the number of ranks that hold the expert. It is told the other number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Shard

from te_fsdp import _fsdp2, _fsdp2_grads, _fsdp2_patches, _torch
from te_fsdp.agree import rank
from te_fsdp.all_ranks import collective_call
from te_fsdp.errors import require_flags, shorten
from te_fsdp.mesh import as_meshes
from te_fsdp.modules.apply import bind
from te_fsdp.modules.checks import Selection
from te_fsdp.modules.context_parallel import check_attention, tell_attention
from te_fsdp.modules.inputs import watch_for_copies, watch_inputs
from te_fsdp.modules.rank_checks import compare_gradients
from te_fsdp.parameters import binding_of, noted, places_of, require_model
from te_fsdp.quantized.shards import restore_quantized, stash_quantized
from te_fsdp.sharding.comm_units import (
    choose_transports,
    reduce_from_where_they_lie,
    reduce_unused,
    take_in_shards,
)
from te_fsdp.sharding.first_looks import watch_first_backward, watch_writes
from te_fsdp.sharding.materialize import check_replicas, check_same_model
from te_fsdp.sharding.no_shard_reduce import ReplicatedGradients
from te_fsdp.sharding.outer_averages import watch_reductions
from te_fsdp.sharding.precision import MixedPrecisionPolicy
from te_fsdp.sharding.sharding_plan import ModelPlan, Request, Wish, plan_sharding
from te_fsdp.sharding.state import KEY, ShardingState, mark
from te_fsdp.sharding.steps import watch_forward, watch_steps
from te_fsdp.sharding.units import Wanted
from te_fsdp.sharding.wgrad_fusion import fuse_wgrad, refuse_whole, wgrad_fusion_set_aside
from te_fsdp.step_hooks import replacing

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.layout import Storage
    from te_fsdp.mesh import Meshes
    from te_fsdp.modules.plan import ModulePlan
    from te_fsdp.sharding.no_shard import ReplicatedParameter

_log = logging.getLogger("te_fsdp")

ModelT = TypeVar("ModelT", bound="nn.Module")


def fully_shard(
    model: ModelT,
    meshes: Meshes | DeviceMesh,
    *,
    units: Wanted | None = None,
    strategy: Wish | None = None,
    outer_strategy: str = "no_shard",
    precision: MixedPrecisionPolicy | None = None,
    mp_policy: Fsdp2Policy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | None = None,
    experts: Selection = None,
    average_gradients: bool = True,
    check_inputs: bool = True,
    transport: str = "auto",
    zero_copy_gradients: bool | str = "auto",
) -> ModelT:
    """Shard a TE model over its meshes on FSDP2, with or without tp.

    Binds the model (:func:`te_fsdp.set_device_mesh`), applies FSDP2 to every unit and to what is left, keeps quantized
    weights quantized, and tells attention of ``cp``. Build the optimizer afterwards. Collective over all ranks.

    Args:
        model: A tree of TE modules and others; parameters on meta or on the device. Changed in place.
        meshes: The job's meshes; or torch's, as :meth:`Meshes.from_device_mesh` takes it.
        units: What is gathered as one: module classes or names (``"layers.*"``: every child); ``te.TransformerLayer``.
        strategy: What is cut over ``dp_shard``: "no_shard", "optim", "optim_grads" or "optim_grads_params"
            (the default); or a mapping of classes or names, whose modules become units, to them; ``""`` is the root.
        outer_strategy: What is cut over ``dp_replicate`` too: nothing (``"no_shard"``) or optimizer state ("optim").
        precision: Dtypes of main weights, gradients and the wire. ``None``: all in the parameters' own dtype.
        mp_policy: FSDP2's own mixed precision policy instead of ``precision``.
        offload_policy: FSDP2's. One that offloads is refused, with the reason.
        reshard_after_forward: FSDP2's word for strategies: True ``"optim_grads_params"``, False ``"optim_grads"``.
        experts: Names or classes of ``GroupedLinear`` modules (or around some) to deal out over ``ep``; default: all.
        average_gradients: Gradients are means over the data-parallel ranks, for losses that are means; or sums.
        check_inputs: Compare over ``tp`` and ``cp`` what enters the model in new shapes, and gradients in two steps.
        transport: How weights are gathered: ``"auto"``, ``"nccl"``, ``"copy_engine"`` (or the log says why not).
        zero_copy_gradients: Reduce large gradients uncopied (or the log says why not); "auto": with "copy_engine".

    Returns:
        ``model``.

    Raises:
        MeshError, PlacementError, OrderError: see :func:`te_fsdp.set_device_mesh`; also units without a module or a
            forward, scalar parameters, a sharded model, contradicting arguments, shards that do not fit their format.
        PrecisionError: Both ``precision`` and ``mp_policy``, or a policy that the model contradicts.
        InitError: Ranks that must hold equal values do not, or hold equal parts of what should differ.
        CollectiveError: Ranks did not make the call.
    """
    asked = units, strategy, reshard_after_forward, outer_strategy, precision, mp_policy, offload_policy
    meshes = _meshes_for(model, meshes, average_gradients, check_inputs)
    with collective_call("fully_shard", meshes.device_mesh), wgrad_fusion_set_aside(model) as fused:
        request = Request(*asked, experts, average_gradients, transport, zero_copy_gradients)
        plan = plan_sharding(model, meshes, request)
        _check_ranks(plan, fused)
        state = _begin(plan)
        _replace_parameters(plan, state)
        _finish(plan, state, check_inputs, fused)
        _log.debug("fully_shard: %d units over %s", len(plan.units), meshes)
    return model


def _meshes_for(model: object, given: object, average_gradients: object, check_inputs: object) -> Meshes:
    """The meshes, if all arguments are what they should be."""
    require_flags("fully_shard", average_gradients=average_gradients, check_inputs=check_inputs)
    meshes = as_meshes(given, "fully_shard")
    require_model(model, "fully_shard(model, meshes)")
    return meshes


def _check_ranks(plan: ModelPlan, fused: list[nn.Module]) -> None:
    """What must hold on all ranks alike. Collective over the world."""
    check_attention(plan.model, plan.meshes)
    refuse_whole(fused, {key for key, row in plan.parameters.items() if row.storage.is_whole}, plan.model)
    check_same_model(plan)
    check_replicas(plan)


def _begin(plan: ModelPlan) -> ShardingState:
    """Note the plan on each parameter, and move what stays whole from the CPU, as FSDP2 moves all else. Local."""
    model, device, request = plan.model, plan.meshes.device, plan.request
    for place in places_of(model):
        row = noted(place.parameter).plan = plan.parameters[id(place.owner), place.name]
        if row.storage.is_whole and place.parameter.device.type == "cpu" != device.type:
            place.parameter.data = place.parameter.data.to(device)
    for module in model.modules() if "" in plan.whole else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                module._buffers[name] = buffer.to(device)
    return ShardingState(
        model,
        plan.meshes,
        plan.units,
        request.outer_strategy,
        request.precision,
        request.average_gradients,
        plan.precision,
        {row.label: row for row in plan.parameters.values()},
    )


def _replace_parameters(plan: ModelPlan, state: ShardingState) -> None:
    """Bind the model and apply FSDP2 to it."""
    with replacing(plan.model, "fully_shard"), _fsdp2.cutting_few_pieces():
        bind(plan.model, plan.modules)
        for binding in filter(None, map(binding_of, plan.model.modules())):
            binding.weight_mesh_agreed = True  # one object gives both meshes
        _apply_fsdp2(plan, state)


def _apply_fsdp2(plan: ModelPlan, state: ShardingState) -> None:
    """FSDP2 unit by unit, inner ones first: a parent's FSDP group takes what its units have left."""
    model, precision = plan.model, plan.precision
    options: dict[str, Any] = {"mp_policy": plan.mp_policy}
    stash = stash_quantized(model)
    if precision is not None:
        precision.widen(model)
    options["shard_placement_fn"] = _placements(plan.modules)
    options["ignored_params"] = {item.parameter for item in plan.replicated}
    for name, row in reversed(plan.units.items()):
        if name in plan.whole:
            continue
        unit = state.modules[name] = model.get_submodule(name)
        options["mesh"] = _fsdp_mesh(plan.meshes, unit, row)
        if precision is not None:
            options["mp_policy"] = precision.fsdp2_policy(name)
        fsdp2_fully_shard(unit, reshard_after_forward=row.gather == "pass", **options)
    if plan.meshes.pp is not None and "" in plan.whole:
        # A pipeline's stage says which microbatch is the last one to modules of FSDP2's alone: a unit of nothing.
        fsdp2_fully_shard(model, mesh=plan.meshes.fsdp_with_size_one, ignored_params=set(model.parameters()))
    divide_gradients(state, plan.mp_policy)
    restore_quantized(stash)


def _is_expert(module: nn.Module) -> bool:
    """Whether a bound module's parameters are dealt out over ``ep``."""
    binding = binding_of(module)
    return binding is not None and binding.experts is not None


def _fsdp_mesh(meshes: Meshes, unit: nn.Module, storage: Storage) -> DeviceMesh:
    """What FSDP2 shards a unit over. What is added up over ``dp_replicate`` later, it shall not reduce over that."""
    experts = _is_expert(unit)
    if storage.gradient[0] == "P":
        root = meshes.expert_mesh if experts and meshes.expert_mesh is not None else meshes.device_mesh
        return root["dp_shard"]
    return meshes.expert_fsdp_with_size_one if experts else meshes.fsdp_with_size_one


def divide_gradients(state: ShardingState, policy: Fsdp2Policy) -> None:
    """Tell FSDP2 by what to divide gradients, where it would not know; and TE over whom to reduce the amax, likewise.

    Local operation but for the process group of that; call after ``fully_shard``. Gradients of experts are divided by
    as many ranks as FSDP2 divides those of dense parameters by; what is averaged outside of FSDP2 is so for both. All
    gradients are divided by one if the user wants sums.

    Args:
        state: The model's.
        policy: FSDP2's, of models without a precision policy.
    """
    average = state.average_gradients
    meshes = {True: state.meshes.expert_amax, False: state.meshes.amax}
    groups = {kind: None if mesh is None else mesh.get_group() for kind, mesh in meshes.items()}
    for binding in filter(None, map(binding_of, state.model.modules())):
        binding.divided = binding.experts is not None or binding.divided
        binding.amax_group = groups[binding.experts is not None]
    for name, unit in state.modules.items():
        experts = _is_expert(unit)
        if average and not experts:
            continue
        storage, ranks = state.units[name], 1
        mesh = _fsdp_mesh(state.meshes, unit, storage)
        if average:
            ranks = state.meshes.size("dp_shard")
            ranks *= state.meshes.size("dp_replicate") if storage.gradient[0] != "P" else 1
        shards = mesh["dp_shard"] if mesh.ndim == 2 else mesh
        # Over one rank FSDP2 divides fp16 gradients twice, by the factor each time (torch 2.11 to 2.13 foreach_reduce).
        own = policy if state.precision_plan is None else state.precision_plan.fsdp2_policy(name)
        twice = shards.size() == 1 and _fsdp2.reduced_dtype(unit, own) == torch.float16
        factor = math.sqrt(ranks) if twice else float(ranks)
        unit.set_gradient_divide_factor(factor)  # type: ignore[not-callable]
        if shards.size() > 1 and (not average or dist.get_backend(shards.get_group()) == "gloo"):
            # gloo has no operation that multiplies first. On one rank FSDP2 divides without it, and with it twice.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[not-callable]


def _placements(modules: Iterable[ModulePlan]) -> Callable[[nn.Parameter], Shard | None] | None:
    """FSDP2's ``shard_placement_fn`` for weights that it shall cut along another dim than the first."""
    dims = {
        id(item.module._parameters[name]): dim for item in modules for name, dim in item.cuts.items() if dim
    }
    return (lambda parameter: Shard(dims[id(parameter)]) if id(parameter) in dims else None) if dims else None


def _drop_flat_shards(plan: ModelPlan, state: ShardingState) -> None:
    """No high-precision copies of quantized shards in FSDP2, neither now nor when a shard is quantized later."""
    cuts = {(id(item.module), name) for item in plan.modules for name in item.cuts}
    for unit in state.modules.values():
        for managed in _torch.managed_by(unit):
            if any((id(owner), name) in cuts for owner, name in _torch.owners_of(managed)):
                _fsdp2_patches.keep_no_flat_shard(managed)


def _finish(plan: ModelPlan, state: ShardingState, check_inputs: bool, fused: list[nn.Module]) -> None:
    """What FSDP2 shall not keep, flat copies of quantized shards; then what watches the model, and gathers it."""
    _drop_flat_shards(plan, state)
    for unit in state.modules.values():
        _fsdp2_patches.remember_shard_meshes(unit)
        _fsdp2_patches.alias_whole_shards(unit)
        _fsdp2_grads.pass_whole_gradients(unit)
    for binding in filter(None, map(binding_of, state.model.modules())):
        binding.under_fsdp = True
    if state.precision_plan is not None:
        state.precision_plan.install(state.model, plan.parameters.values())
    reduce_unused(state.model)
    watch_reductions(state)
    if replicated := plan.replicated:
        if rank() == 0:
            _log.info("%s", _whole_parameters(replicated))
        state.replicated = ReplicatedGradients(
            state.model,
            replicated,
            state.meshes,
            units=[name for name, row in reversed(plan.units.items()) if row.is_whole],
            grads_dtype=getattr(state.precision, "main_grads_dtype", None),
            average=state.average_gradients,
            beside_fsdp2=bool(state.modules),
        )
        if state.meshes.pp is not None and _torch.is_fsdp_module(state.model):
            own = state.replicated
            _fsdp2_patches.around_pipeline_step(
                state.model, own.set_gradient_sync, own.reduce_after_microbatches
            )
    state.model.__dict__[KEY] = state
    mark(state)
    tell_attention(state.model, state.meshes)
    watch_inputs(
        state.model, state.meshes.tp if check_inputs else None, state.meshes.cp if check_inputs else None
    )
    if check_inputs and state.modules:
        watch_for_copies(state.model, state.meshes)
    compare_gradients(state.model, check_inputs)
    watch_forward(state)
    watch_first_backward(state)
    watch_writes(state)
    watch_steps()
    fuse_wgrad(state, fused)
    choose_transports(state, plan.request.transport)
    take_in_shards(state)
    reduce_from_where_they_lie(state, plan.mp_policy, plan.request.zero_copy_gradients)


def _whole_parameters(replicated: Sequence[ReplicatedParameter]) -> str:
    """What stays whole, in a line for the log."""
    parameters = [item.parameter for item in replicated]
    trained = sum(parameter.requires_grad for parameter in parameters)
    elements = sum(_torch.local_of(parameter).numel() for parameter in parameters)
    names = shorten([item.plan.label for item in replicated], 3)
    return (
        f"no_shard: {len(replicated)} parameters of {elements:,} elements stay whole on every data-parallel "
        f"rank, {trained} of them trained: {names}"
    )
