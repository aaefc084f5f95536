"""Execution of a :class:`~te_fsdp.plan.ModelPlan`: bind the modules, apply FSDP2 to each unit, adapt FSDP2's units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy as Fsdp2Policy,
    fully_shard as fsdp2_fully_shard,
)
from torch.distributed.tensor import Shard

from te_fsdp.bind_device_mesh import bind, remove_bound_checks
from te_fsdp.check_points import CheckPoints
from te_fsdp.errors import MeshError
from te_fsdp.forward_hooks import register_forward_hooks
from te_fsdp.layout import Storage
from te_fsdp.lifecycle import track_replaced_parameters
from te_fsdp.mesh import Meshes, as_meshes
from te_fsdp.mesh_checks import ALL_AXES
from te_fsdp.modules.context_parallel import check_attention, set_attention_cp_group
from te_fsdp.modules.mixin import pair_of
from te_fsdp.plan import ModelPlan
from te_fsdp.quantized.gather_metadata import replay_gather
from te_fsdp.quantized.shards import restore_quantized, stash_quantized
from te_fsdp.records import (
    PARAMETER,
    ParameterPlan,
    binding_of,
    get_or_create_record,
    module_record,
    param_owners,
    require_model,
)
from te_fsdp.sharded_model import ShardedModel, attach_state_to_params
from te_fsdp.tp_gradients import sum_at_once
from te_fsdp.upstream import (
    fsdp2_gather as _fsdp2_gather,
    fsdp2_hooks as _fsdp2_hooks,
    fsdp2_patches as _fsdp2_patches,
    fsdp2_settled as _fsdp2_settled,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te_modules as _te_modules,
)
from te_fsdp.upstream.fsdp2_unused import complete_gradients
from te_fsdp.upstream.torch_mixed_lists import support_foreach_copy

ModelT = TypeVar("ModelT", bound="nn.Module")


def require_meshes(model: nn.Module, passed: Meshes | DeviceMesh) -> Meshes:
    """Return the job's meshes. Raise MeshError if the model was built for tp, but the meshes have no tp axis.

    Local operation for :class:`Meshes`. A torch mesh may need new process groups (:meth:`Meshes.from_device_mesh`).
    """
    meshes = as_meshes(passed, "fully_shard")
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


def check_plan(plan: ModelPlan, points: CheckPoints) -> None:
    """Raise if attention does not fit the plan, or if a check fails. Collective as the checks are."""
    # Attention may have a group although the meshes have no ``cp``.
    grouped = (getattr(module, "cp_group", None) is not None for module in plan.model.modules())
    if plan.meshes.cp is not None or any(grouped):
        check_attention(plan.model, plan.meshes)
    for check in points.plan:
        check(plan)


def attach_plan(plan: ModelPlan, points: CheckPoints) -> ShardedModel:
    """Record the plan on each parameter, and return the model's state, without units yet. Local operation.

    Makes parameters contiguous, and moves replicated ones to the device, and also buffers if all are replicated.
    """
    model, device, request = plan.model, plan.meshes.device, plan.request
    support_foreach_copy()
    for owner in param_owners(model):
        row = get_or_create_record(owner.parameter).plan = plan.parameters[id(owner.module), owner.name]
        if type(owner.parameter) is torch.nn.Parameter and not owner.parameter.is_contiguous():
            # FSDP2 refuses parameters that are not contiguous (torch 2.11 to 2.15).
            owner.parameter.data = owner.parameter.data.contiguous()
        # FSDP2 moves only the parameters that it shards to the device.
        if row.storage.is_replicated and owner.parameter.device.type == "cpu" != device.type:
            owner.parameter.data = owner.parameter.data.to(device)
    for module in model.modules() if "" in plan.replicated_modules else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "cpu":
                module._buffers[name] = buffer.to(device)
    return ShardedModel(
        model,
        plan.meshes,
        plan.units,
        request.outer_strategy,
        plan.precision,
        request.average_gradients,
        points,
        {row.label: row for row in plan.parameters.values()},
    )


def replace_parameters(plan: ModelPlan, state: ShardedModel) -> ShardedModel:
    """Bind the model, then apply FSDP2 to each unit. Inner units are first, because FSDP2 skips sharded parameters.

    Collective as :func:`te_fsdp.bind_device_mesh.bind` and :func:`complete_bindings`. Returns ``state`` with units.
    """
    model, precision = plan.model, plan.precision
    with track_replaced_parameters(model, "fully_shard"), _fsdp2.chunk_this_rank_only():
        bind(model, plan.modules)
        for binding in filter(None, map(binding_of, model.modules())):
            binding.amax.agreed = True  # the weight mesh and FSDP2's mesh are from the same Meshes
        stash = stash_quantized(model)
        if precision is not None:
            precision.widen(model)
        # Weights that FSDP2 shards along a dim other than the first.
        dims = {id(m.module._parameters[n]): d for m in plan.modules for n, d in m.fsdp_dims.items() if d}
        options: dict[str, Any] = {
            "mp_policy": plan.mp_policy,
            "shard_placement_fn": (lambda p: Shard(dims[id(p)]) if id(p) in dims else None) if dims else None,
            "ignored_params": {item.parameter for item in plan.replicated},
        }
        expert_units = _expert_units(plan.parameters.values())
        # FSDP2 must shard a unit after all units inside of it. The order of names is not enough: a module that several
        # units share has one name, inside of one of them.
        sharded = [name for name in reversed(plan.units) if name not in plan.replicated_modules]
        modules = {name: model.get_submodule(name) for name in sharded}
        names = {id(module): name for name, module in modules.items()}
        order: dict[str, None] = {}

        def add(name: str) -> None:
            inside = (names.get(id(module), name) for module in modules[name].modules())
            for inner in [inner for inner in inside if inner != name and inner not in order][::-1]:
                add(inner)
            order.setdefault(name)

        for name in modules:
            add(name)
        for name in list(order):
            row = plan.units[name]
            unit = state.modules[name] = model.get_submodule(name)
            options["mesh"] = _fsdp_mesh(plan.meshes, row, experts=name in expert_units)
            if precision is not None:
                options["mp_policy"] = precision.fsdp2_policy(name)
            fsdp2_fully_shard(unit, reshard_after_forward=row.gather == "pass", **options)
        if plan.meshes.pp is not None and "" in plan.replicated_modules:
            # A pipeline stage marks the last microbatch on FSDP2 modules only, so make the model an empty unit.
            fsdp2_fully_shard(
                model, mesh=plan.meshes.fsdp_with_size_one, ignored_params=set(model.parameters())
            )
        complete_bindings(state)
        set_gradient_divisors(state, plan.mp_policy)
        restore_quantized(stash)
    return state


def _expert_units(rows: Iterable[ParameterPlan]) -> set[str]:
    """Return the names of the units whose sharded parameters are distributed over ``ep``."""
    return {row.unit for row in rows if row.experts and not row.storage.is_replicated}


def _fsdp_mesh(meshes: Meshes, storage: Storage, *, experts: bool) -> DeviceMesh:
    """Return the mesh passed to FSDP2 for a unit. Exclude ``dp_replicate`` if HFSDP reduces over it later."""
    if storage.gradient[0] == "P":
        root = meshes.expert_mesh if experts and meshes.expert_mesh is not None else meshes.device_mesh
        return root["dp_shard"]
    return meshes.expert_fsdp_with_size_one if experts else meshes.fsdp_with_size_one


def complete_bindings(state: ShardedModel) -> None:
    """Set the group over which TE reduces the amax of delayed scaling, and record FSDP2 in the modules' bindings.

    Collective over the world at the first call.
    """
    meshes = {True: state.meshes.expert_amax, False: state.meshes.amax}
    groups = {kind: None if mesh is None else mesh.get_group() for kind, mesh in meshes.items()}
    for binding in filter(None, map(binding_of, state.model.modules())):
        binding.amax.group = groups[binding.experts is not None]
        binding.ep.divided = binding.experts is not None or binding.ep.divided
        binding.fsdp.is_managed = True


# [Note: gradients of experts] Gradients of experts equal those of one process:
#
#     one process       gradient of the mean loss over all tokens
#     dense parameter   every rank has a mean over its own tokens    -> mean over all data-parallel ranks
#     expert            its tokens come from all ranks of ``ep``,    -> sum over the ranks that have the expert,
#                       its gradient is a sum over those ranks          divided by the number of all data-parallel ranks
#
# FSDP2 would divide by the number of ranks that have the expert. te_fsdp sets the other number.
def set_gradient_divisors(state: ShardedModel, policy: Fsdp2Policy) -> None:
    """Set FSDP2's divisor of gradients in units for which its own would be wrong. Local operation.

    Gradients of experts are divided by the same number as those of dense parameters. The average of HFSDP over
    ``dp_replicate`` is outside of FSDP2, and the same for both. With ``average_gradients=False`` all gradients are
    sums. ``policy`` is FSDP2's, for models without a precision policy of te_fsdp.
    """
    average = state.average_gradients
    expert_units = _expert_units(state.plans.values())
    for name, unit in state.modules.items():
        experts = name in expert_units
        if average and not experts:
            continue
        storage, ranks = state.units[name], 1
        mesh = _fsdp_mesh(state.meshes, storage, experts=experts)
        if average:
            ranks = state.meshes.size("dp_shard")
            ranks *= state.meshes.size("dp_replicate") if storage.gradient[0] != "P" else 1
        shards = mesh["dp_shard"] if mesh.ndim == 2 else mesh
        # Over one rank FSDP2 divides fp16 gradients twice, by the factor each time (torch 2.11 to 2.13 foreach_reduce).
        unit_policy = policy if state.precision is None else state.precision.fsdp2_policy(name)
        twice = shards.size() == 1 and _fsdp2.reduced_dtype(unit, unit_policy) == torch.float16
        factor = math.sqrt(ranks) if twice else float(ranks)
        unit.set_gradient_divide_factor(factor)  # type: ignore[not-callable]
        if shards.size() > 1:
            # Not NCCL's premultiplied sum: in bf16 torch passes a wrong factor, and gradients become zeros (torch 2.11,
            # docs/upstream.md). gloo has no such operation. On one rank FSDP2 divides twice with this option.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[not-callable]


class Setup:
    """Argument of the functions in :data:`te_fsdp.components.SETUP`: a model whose parameters are sharded.

    The truth of an attribute is the condition of a function (:func:`te_fsdp.lifecycle.runs_if`).
    """

    def __init__(self, plan: ModelPlan, state: ShardedModel, fused: list[nn.Module]) -> None:
        self.plan, self.state = plan, state
        self.fused = fused  #: Modules with ``fuse_wgrad_accumulation``
        self.precision = plan.precision  #: Dtypes of the units, ``None`` without a policy
        self.is_hfsdp = state.outer == "optim"  #: Whether optimizer state is sharded over ``dp_replicate``
        self.axes = {axis for axis in ALL_AXES if plan.meshes.size(axis) > 1}  #: Axes of several ranks
        self.device = plan.meshes.device
        #: Whether the first steps measure the host's pace
        self.is_timed = self.device.type == "cuda" and state.checks.level != "off"
        #: Units whose all-gathers can start during the previous unit: those of each pass, if there are several.
        units = {n: u for n, u in state.modules.items() if n and state.units[n].gather == "pass"}
        self.prefetched = units if len(units) > 1 else {}
        self.replicated = plan.replicated  #: Parameters that are replicated over data parallel
        #: Name of a unit -> its parameter groups of FSDP2
        self.groups = {name: fsdp2_units.fsdp_parameter_groups(unit) for name, unit in state.modules.items()}

    def run(self, functions: Iterable[Callable[[Setup], None]]) -> None:
        """Run the functions whose condition is true. Collective as they are."""
        for function in functions:
            attribute = getattr(function, "runs_if", None)
            if attribute is None or getattr(self, attribute):
                function(self)


def prepare_units(setup: Setup) -> None:
    """Adapt FSDP2's units: a shorter steady state, no copies of quantized shards, sums over tp. Local operation."""
    plan, state = setup.plan, setup.state
    # Also of weights that are quantized later.
    quantizable = {(id(item.module), name) for item in plan.modules for name in item.fsdp_dims}
    for name, unit in state.modules.items():
        _fsdp2_hooks.shorten_hooks(unit, setup.groups[name])
        for group in setup.groups[name]:
            _fsdp2_patches.adapt_records(group, quantizable)
            _fsdp2_patches.alias_single_rank_shards(group)
            _fsdp2_settled.swap_in_one_loop(group, pair_of, PARAMETER)
            _fsdp2_settled.shorten_fsdp_calls(group, replay_gather)
            _fsdp2_gather.repeat_gathers(group)
            if "tp" in setup.axes:
                sum_at_once(group)
    for unit in state.model.modules():
        for module in unit.modules() if isinstance(unit, FSDPModule) else ():
            _te_modules.cache_is_fsdp2(module)


def reduce_unused_parameters(setup: Setup) -> None:
    """Reduce zeros for trained parameters without a gradient on this rank. Local operation.

    FSDP2 reduces only existing gradients. If they differ between ranks (for example due to a branch that only one rank
    takes), the collectives would not match: they would hang, or mix gradients of different parameters. A parameter
    that no rank used keeps ``None``, as in one process.

    Each unit must still run on all ranks or on none, because its all-gather is a collective, too.
    """
    for group in chain.from_iterable(setup.groups.values()):
        complete_gradients(group)


def attach_state(setup: Setup) -> None:
    """Attach the state to the model and its parameters, and the context-parallel group to attention. Local."""
    state = setup.state
    module_record(state.model).sharded = state
    attach_state_to_params(state)
    if state.meshes.cp is not None:
        set_attention_cp_group(state.model, state.meshes)


def start_checks(setup: Setup) -> None:
    """Start the checks of the requested level, in place of those of ``set_device_mesh``. Local operation."""
    remove_bound_checks(setup.state.model)
    # Checks over axes of one rank would compare nothing.
    points = setup.state.checks
    for check in points.sharded:
        if check not in points.axes or not setup.axes.isdisjoint(points.axes[check]):
            check(setup.state)


def hook_forward(setup: Setup) -> None:
    """Register the hooks of forward. Local operation."""
    register_forward_hooks(setup.state)
