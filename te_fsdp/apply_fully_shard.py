"""``fully_shard``: set_device_mesh, then FSDP2 unit by unit, then what FSDP2 leaves undone.

Gradients of experts come out as in one process:

    one process       gradient of the mean loss over all tokens
    dense parameter   every rank has a mean over its own tokens    -> mean over all data-parallel ranks
    expert            its tokens come from all ranks of ``ep``,    -> sum over the ranks that hold the expert,
                      its gradient is a sum over those ranks          divided by the number of all data-parallel ranks

FSDP2 would divide by the number of ranks that hold the expert. te_fsdp sets the other number.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.fsdp import (
    MixedPrecisionPolicy as Fsdp2Policy,
    OffloadPolicy,
    fully_shard as fsdp2_fully_shard,
)
from torch.distributed.tensor import Shard

from te_fsdp.bind_device_mesh import bind, remove_bound_checks
from te_fsdp.check_points import CheckPoints, requested_checks
from te_fsdp.collectives.agreement import rank
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import MeshError, PlacementError, require_flags, shorten
from te_fsdp.features.hfsdp.gradients import register_reduction_hooks
from te_fsdp.features.replicated_gradients import ReplicatedGradients
from te_fsdp.features.unreduced_gradients import register_unreduced_gradients
from te_fsdp.forward_hooks import register_forward_hooks
from te_fsdp.lifecycle import register_step_functions, track_replaced_parameters
from te_fsdp.materialization import wrap_module_apply
from te_fsdp.mesh import as_meshes
from te_fsdp.modules.context_parallel import check_attention, set_attention_cp_group
from te_fsdp.modules.grouped import Selection
from te_fsdp.modules.mixin import pair_of
from te_fsdp.optimizer_step import AFTER_STEP, BEFORE_STEP
from te_fsdp.plan import ModelPlan, ShardRequest, StrategySpec, UnitSpec, plan_sharding
from te_fsdp.precision import MixedPrecisionPolicy
from te_fsdp.quantized.shards import restore_quantized, stash_quantized
from te_fsdp.records import KEY as FACTS, binding_of, get_or_create_record, iter_param_owners, require_model
from te_fsdp.sharded_model import KEY, ShardedModel, attach_state_to_params
from te_fsdp.tp_gradients import sum_at_once
from te_fsdp.unit_communication import (
    choose_transports,
    enable_zero_copy_reduce_scatter,
    move_shards_to_shared_memory,
    reduce_unused,
)
from te_fsdp.upstream import (
    fsdp2_patches as _fsdp2_patches,
    fsdp2_settled as _fsdp2_settled,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    torch_amp as _torch_amp,
    torch_dtensor as _torch,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.layout import Storage
    from te_fsdp.mesh import Meshes
    from te_fsdp.records import ParameterPlan

_log = logging.getLogger("te_fsdp")

ModelT = TypeVar("ModelT", bound="nn.Module")

#: Weights of the modules whose ``fuse_wgrad_accumulation`` is served. GroupedLinear's is still refused.
_FUSED_WEIGHTS = {
    "Linear": ("weight",),
    "LayerNormLinear": ("weight",),
    "LayerNormMLP": ("fc1_weight", "fc2_weight"),
}


def fully_shard(
    model: ModelT,
    meshes: Meshes | DeviceMesh,
    *,
    units: UnitSpec | None = None,
    strategy: StrategySpec | None = None,
    outer_strategy: str = "no_shard",
    precision: MixedPrecisionPolicy | None = None,
    mp_policy: Fsdp2Policy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | None = None,
    experts: Selection = None,
    average_gradients: bool = True,
    checks: str | None = None,
    check_inputs: bool | None = None,
    transport: str = "auto",
    zero_copy_gradients: bool | str = "auto",
) -> ModelT:
    """Shard a TE model over its meshes on FSDP2, with or without tp.

    Binds the model (:func:`te_fsdp.set_device_mesh`), applies FSDP2 to every unit and to what is left, keeps quantized
    weights quantized, and tells attention of ``cp``. Build the optimizer afterwards. Collective over all ranks.

    Args:
        model: A tree of TE modules and others; parameters on meta or on the device. Changed in place, and returned.
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
        checks: Level of checks: ``"off"``, ``"setup"``, ``"first_steps"`` (the default) or ``"full"`` (docs/checks.md).
        check_inputs: Deprecated, use ``checks``. False leaves out comparisons of inputs and gradients.
        transport: How weights are gathered: ``"auto"``, ``"nccl"``, ``"copy_engine"`` (or the log says why not).
        zero_copy_gradients: Reduce large gradients uncopied (or the log says why not); "auto": with "copy_engine".

    Raises:
        MeshError, PlacementError, OrderError: Meshes, arguments or a model that do not fit (docs/troubleshooting.md).
        PrecisionError: Both ``precision`` and ``mp_policy``, or a policy that the model contradicts.
        InitError: Ranks that must hold equal values do not, or hold equal parts of what should differ.
        CollectiveError: Ranks did not make the call.
    """
    asked = units, strategy, reshard_after_forward, outer_strategy, precision, mp_policy, offload_policy
    require_flags("fully_shard", average_gradients=average_gradients)
    points = requested_checks("fully_shard", checks, check_inputs)
    meshes = _require_meshes(model, meshes)
    call = points.call("fully_shard")
    with collective_call(call, meshes.device_mesh), _wgrad_fusion_disabled(model) as fused:
        request = ShardRequest(*asked, experts, average_gradients, transport, zero_copy_gradients)
        plan = plan_sharding(model, meshes, request)
        _check_plan(plan, fused, points)
        state = _attach_plan(plan, points)
        _replace_parameters(plan, state)
        _install_hooks(plan, state, fused)
    return model


def _require_meshes(model: nn.Module, given: Meshes | DeviceMesh) -> Meshes:
    """Return the job's meshes. Raise if they have no ``tp`` axis, but the model was built for one. Local operation."""
    meshes = as_meshes(given, "fully_shard")
    require_model(model, "fully_shard(model, meshes)")
    sizes = {name: getattr(module, "tp_size", 1) for name, module in model.named_modules()}
    name, size = next(((name, size) for name, size in sizes.items() if size not in (1, None)), ("", 1))
    if size != 1 and meshes.size("tp") == 1:
        raise MeshError(
            f"{name or type(model).__name__}: fully_shard over meshes without a tensor-parallel axis",
            expected=f"meshes with tp={size}, for which the module was built",
            got=str(meshes),
            why="te_fsdp binds the model to the tensor-parallel axis and applies FSDP2 in one call",
            fix="te_fsdp.fully_shard(model, meshes), with te_fsdp.Meshes.build(tp=...) or the torch mesh of all axes",
        )
    return meshes


def _check_plan(plan: ModelPlan, fused: list[nn.Module], points: CheckPoints) -> None:
    """Raise if attention or fused modules do not fit the plan, or if a check fails. Collective as the checks are."""
    # Attention may have a group although the meshes have no ``cp``.
    grouped = (getattr(module, "cp_group", None) is not None for module in plan.model.modules())
    if plan.meshes.cp is not None or any(grouped):
        check_attention(plan.model, plan.meshes)
    _refuse_fused(fused, plan)
    for check in points.plan:
        check(plan)


def _attach_plan(plan: ModelPlan, points: CheckPoints) -> ShardedModel:
    """Note the plan on each parameter, and move what stays whole from the CPU, as FSDP2 moves all else. Local."""
    model, device, request = plan.model, plan.meshes.device, plan.request
    for place in iter_param_owners(model):
        row = get_or_create_record(place.parameter).plan = plan.parameters[id(place.owner), place.name]
        if type(place.parameter) is torch.nn.Parameter and not place.parameter.is_contiguous():
            # FSDP2 shards no others (torch 2.11 to 2.15).
            place.parameter.data = place.parameter.data.contiguous()
        if row.storage.is_whole and place.parameter.device.type == "cpu" != device.type:
            place.parameter.data = place.parameter.data.to(device)
    for module in model.modules() if "" in plan.whole else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                module._buffers[name] = buffer.to(device)
    return ShardedModel(
        model,
        plan.meshes,
        plan.units,
        request.outer_strategy,
        request.precision,
        request.average_gradients,
        points,
        plan.precision,
        {row.label: row for row in plan.parameters.values()},
    )


def _replace_parameters(plan: ModelPlan, state: ShardedModel) -> None:
    """Bind the model; apply FSDP2 unit by unit, inner ones first: a parent's group takes what its units have left."""
    model, precision = plan.model, plan.precision
    with track_replaced_parameters(model, "fully_shard"), _fsdp2.chunk_own_rank_only():
        bind(model, plan.modules)
        for binding in filter(None, map(binding_of, model.modules())):
            binding.weight_mesh_agreed = True  # one object gives both meshes
        stash = stash_quantized(model)
        if precision is not None:
            precision.widen(model)
        # Weights that FSDP2 shards along another dim than the first.
        dims = {
            id(m.module._parameters[name]): dim for m in plan.modules for name, dim in m.cuts.items() if dim
        }
        options: dict[str, Any] = {
            "mp_policy": plan.mp_policy,
            "shard_placement_fn": (lambda p: Shard(dims[id(p)]) if id(p) in dims else None) if dims else None,
            "ignored_params": {item.parameter for item in plan.replicated},
        }
        of_experts = _expert_units(plan.parameters.values())
        for name in _inner_first(plan):
            row = plan.units[name]
            unit = state.modules[name] = model.get_submodule(name)
            options["mesh"] = _fsdp_mesh(plan.meshes, row, experts=name in of_experts)
            if precision is not None:
                options["mp_policy"] = precision.fsdp2_policy(name)
            fsdp2_fully_shard(unit, reshard_after_forward=row.gather == "pass", **options)
        if plan.meshes.pp is not None and "" in plan.whole:
            # A pipeline's stage says which microbatch is the last one to modules of FSDP2's alone: a unit of nothing.
            fsdp2_fully_shard(
                model, mesh=plan.meshes.fsdp_with_size_one, ignored_params=set(model.parameters())
            )
        divide_gradients(state, plan.mp_policy)
        restore_quantized(stash)


def _inner_first(plan: ModelPlan) -> list[str]:
    """Return the names of the units that FSDP2 manages, each after all units inside of it.

    A module that several units share has one name, by which it is inside of one of them. FSDP2 must cut it before any.
    """
    modules = {
        name: plan.model.get_submodule(name) for name in reversed(plan.units) if name not in plan.whole
    }
    names = {id(module): name for name, module in modules.items()}
    order: dict[str, None] = {}

    def add(name: str) -> None:
        inside = (names.get(id(module), name) for module in modules[name].modules())
        for inner in [inner for inner in inside if inner != name and inner not in order][::-1]:
            add(inner)
        order.setdefault(name)

    for name in modules:
        add(name)
    return list(order)


def _expert_units(rows: Iterable[ParameterPlan]) -> set[str]:
    """Return the names of the units whose sharded parameters are distributed over ``ep``."""
    return {row.unit for row in rows if row.experts and not row.storage.is_whole}


def _fsdp_mesh(meshes: Meshes, storage: Storage, *, experts: bool) -> DeviceMesh:
    """Return the mesh passed to FSDP2 for a unit. Exclude ``dp_replicate`` if HFSDP reduces over it later."""
    if storage.gradient[0] == "P":
        root = meshes.expert_mesh if experts and meshes.expert_mesh is not None else meshes.device_mesh
        return root["dp_shard"]
    return meshes.expert_fsdp_with_size_one if experts else meshes.fsdp_with_size_one


def divide_gradients(state: ShardedModel, policy: Fsdp2Policy) -> None:
    """Tell FSDP2 by what to divide gradients, where it would not know; and TE over whom to reduce the amax, likewise.

    Local operation but for the process group of that; call after ``fully_shard``. Gradients of experts are divided by
    as many ranks as FSDP2 divides those of dense parameters by; what is averaged outside of FSDP2 is so for both. All
    gradients are divided by one if the user wants sums. ``policy`` is FSDP2's, of models without one of ours.
    """
    average = state.average_gradients
    meshes = {True: state.meshes.expert_amax, False: state.meshes.amax}
    groups = {kind: None if mesh is None else mesh.get_group() for kind, mesh in meshes.items()}
    for binding in filter(None, map(binding_of, state.model.modules())):
        binding.divided = binding.experts is not None or binding.divided
        binding.amax_group = groups[binding.experts is not None]
    of_experts = _expert_units(state.plans.values())
    for name, unit in state.modules.items():
        experts = name in of_experts
        if average and not experts:
            continue
        storage, ranks = state.units[name], 1
        mesh = _fsdp_mesh(state.meshes, storage, experts=experts)
        if average:
            ranks = state.meshes.size("dp_shard")
            ranks *= state.meshes.size("dp_replicate") if storage.gradient[0] != "P" else 1
        shards = mesh["dp_shard"] if mesh.ndim == 2 else mesh
        # Over one rank FSDP2 divides fp16 gradients twice, by the factor each time (torch 2.11 to 2.13 foreach_reduce).
        own = policy if state.precision_plan is None else state.precision_plan.fsdp2_policy(name)
        twice = shards.size() == 1 and _fsdp2.reduced_dtype(unit, own) == torch.float16
        factor = math.sqrt(ranks) if twice else float(ranks)
        unit.set_gradient_divide_factor(factor)  # type: ignore[not-callable]
        if shards.size() > 1:
            # Not NCCL's premultiplied sum: in bf16 torch passes a wrong factor, and gradients become zeros (torch 2.11,
            # docs/upstream.md). gloo has no such operation. On one rank FSDP2 divides twice with this option.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[not-callable]


def _install_hooks(plan: ModelPlan, state: ShardedModel, fused: list[nn.Module]) -> None:
    """Install the hooks, checks, transports and reductions of a sharded model, in this order."""
    cuts = {(id(item.module), name) for item in plan.modules for name in item.cuts}
    for unit in state.modules.values():
        for managed in fsdp2_units.managed_fsdp_params(unit):
            if any((id(owner), name) in cuts for owner, name in fsdp2_units.owners_of(managed)):
                # No high-precision copies of quantized shards, neither now nor when a shard is quantized later.
                _fsdp2_patches.disable_flat_shard(managed)
        _fsdp2_patches.record_shard_meshes(unit)
        _fsdp2_patches.alias_single_rank_shards(unit)
        for group in fsdp2_units.fsdp_parameter_groups(unit):
            _fsdp2_settled.swap_at_once(group, pair_of, FACTS)
            _fsdp2_settled.ask_once(group)
            if plan.meshes.tp is not None and plan.meshes.tp.size() > 1:
                sum_at_once(group)
    for binding in filter(None, map(binding_of, state.model.modules())):
        binding.is_managed_by_fsdp = True
    if state.precision_plan is not None:
        state.precision_plan.install(state.model, plan.parameters.values())
    reduce_unused(state.model)
    if state.outer == "optim":
        register_reduction_hooks(state)
    register_unreduced_gradients(state)
    if plan.replicated:
        _install_replicated_reduction(plan, state)
    state.model.__dict__[KEY] = state
    attach_state_to_params(state)
    if state.meshes.cp is not None:
        set_attention_cp_group(state.model, state.meshes)
    remove_bound_checks(state.model)
    for check in state.checks.sharded:
        check(state)
    register_forward_hooks(state)
    wrap_module_apply(state)
    register_step_functions(BEFORE_STEP, AFTER_STEP, state.checks)
    _torch_amp.unscale_over_all_meshes()
    if fused:
        _fuse_wgrad(state, fused)
    choose_transports(state, plan.request.transport)
    move_shards_to_shared_memory(state)
    enable_zero_copy_reduce_scatter(state, plan.mp_policy, plan.request.zero_copy_gradients)
    _log.debug("fully_shard: %d units over %s", len(plan.units), plan.meshes)


def _install_replicated_reduction(plan: ModelPlan, state: ShardedModel) -> None:
    """Reduce the gradients of what stays whole, and say in a line of the log what that is."""
    replicated = plan.replicated
    if rank() == 0:
        parameters = [item.parameter for item in replicated]
        elements = sum(_torch.local_of(parameter).numel() for parameter in parameters)
        _log.info(
            "no_shard: %d parameters of %s elements stay whole on every data-parallel rank, %d of them trained: %s",
            len(replicated),
            f"{elements:,}",
            sum(parameter.requires_grad for parameter in parameters),
            shorten([item.plan.label for item in replicated], 3),
        )
    own = state.replicated = ReplicatedGradients(
        state.model,
        replicated,
        state.meshes,
        units=[name for name, row in reversed(plan.units.items()) if row.is_whole],
        grads_dtype=getattr(state.precision, "main_grads_dtype", None),
        average=state.average_gradients,
        beside_fsdp2=bool(state.modules),
    )
    if state.meshes.pp is not None and fsdp2_units.is_fsdp_module(state.model):
        _fsdp2_patches.wrap_pipeline_step(state.model, own.set_gradient_sync, own.reduce_after_microbatches)


# ------------------------------------------------------------ gradients that TE adds up (``fuse_wgrad_accumulation``)
#
# With the option TE's GEMM writes a weight's gradient to ``weight.main_grad``, or adds it to what is there, and gives
# autograd none. FSDP2 would then reduce nothing, without an error. But FSDP2 itself keeps a whole gradient between
# backwards that do not reduce, and reduces what it finds there. TE gets that buffer, allocated when it requests it.
# Checked on torch 2.11 and 2.13 (``FSDPParam.unsharded_accumulated_grad``), read on 2.15 (the gathered parameter's
# ``grad``).
#
# TE 2.18 to 2.20 asks weights that have ``__fsdp_param__`` for ``get_main_grad()`` during backward. Whether to
# overwrite what it gets there TE takes from ``weight.overwrite_main_grad`` in forward, but looks at that in backward
# alone, right before the product: it is an object that knows by then (``__bool__``).


@contextlib.contextmanager
def _wgrad_fusion_disabled(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Without the option while the model is bound, which refuses it: FSDP2 alone would lose gradients. Local operation.

    Yields the modules that have it, and get it back at the end: those of which TE reads the parameters themselves.
    Split ones it concatenates first.
    """
    fused = [
        module
        for module in model.modules()
        if getattr(module, "fuse_wgrad_accumulation", False)
        and (names := _fused_weights(module))
        and all(module._parameters.get(name) is not None for name in names)
    ]
    for module in fused:
        module.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    try:
        yield fused
    finally:
        for module in fused:
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def _fused_weights(module: nn.Module) -> tuple[str, ...]:
    return _FUSED_WEIGHTS.get(_te.kind_of(module) or "", ())


def _refuse_fused(fused: list[nn.Module], plan: ModelPlan) -> None:
    """Raise for a fused module whose weights FSDP2 does not reduce. Local operation, the same on all ranks."""
    for module in fused:
        for weight in _fused_weights(module):
            row = plan.parameters[id(module), weight]
            if row.storage.is_whole:
                raise PlacementError(
                    f"{row.label}: fuse_wgrad_accumulation=True of a weight that is not sharded",
                    why="TE gives no gradient that could be reduced",
                    fix="leave fuse_wgrad_accumulation off, or the module out of no_shard",
                )


def _fuse_wgrad(state: ShardedModel, fused: list[nn.Module]) -> None:
    """Let TE accumulate the weight gradients of ``fused`` where FSDP2 finds them. Local operation."""
    holders: list[weakref.ref[torch.Tensor]] = []
    records = {
        (id(owner), name): _MainGradBuffer(managed, group, holders)
        for unit in state.modules.values()
        for managed, group in _fsdp2.fsdp_params_of(unit)
        for owner, name in fsdp2_units.owners_of(managed)
    }
    for module in fused:
        buffers = {name: records[id(module), name] for name in _fused_weights(module)}
        module.register_forward_pre_hook(
            _torch.disable_compile(functools.partial(_attach_main_grad_buffers, buffers))
        )


def _attach_main_grad_buffers(buffers: dict[str, _MainGradBuffer], module: nn.Module, args: Any) -> None:
    """After FSDP2 has gathered: the tensors that TE will see say where their gradients go."""
    for name, buffer in buffers.items():
        local: Any = _torch.local_of(module._parameters[name])  # type: ignore[arg-type]
        if not hasattr(local, "__fsdp_param__"):
            local.__fsdp_param__, local.overwrite_main_grad = True, buffer
            local.get_main_grad = functools.partial(buffer.tensor, weakref.ref(local))


class _MainGradBuffer:
    """Where FSDP2 looks for one parameter's gradient. True while what is there is to be overwritten."""

    def __init__(self, managed: Any, group: Any, holders: list[weakref.ref[torch.Tensor]]) -> None:
        self.managed, self.group = weakref.ref(managed), weakref.ref(group)
        self._is_new = self._was_asked = False
        self._holders = holders  # the weight that keeps a buffer as an attribute, of those of all of a model

    def __bool__(self) -> bool:
        if _torch.backward_id() < 0:
            return False  # not known in forward: TE has to add, to zeros
        self._was_asked = True
        return self._is_new

    def tensor(self, weight: weakref.ref[torch.Tensor]) -> torch.Tensor:
        """The local buffer for TE, to be overwritten where nothing was accumulated. Local operation.

        TE keeps it as an attribute of the weight: that of the weight before is dropped here.
        """
        for earlier in self._holders:
            held = earlier()
            if held is not None:
                held.__dict__.pop("main_grad", None)
        self._holders[:] = [weight]
        managed, group = self.managed(), self.group()
        assert managed is not None and group is not None
        self._is_new = _fsdp2.unreduced_gradient(managed) is None
        found = _fsdp2.find_unreduced_gradient(managed, group)
        if self._is_new and not self._was_asked:
            found.zero_()  # a TE that does not read the flag adds to it
        return found
