"""``set_device_mesh``: plan, check, then bind every module of a tree to its meshes."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from te_fsdp import _te, _torch
from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.all_ranks import collective_call
from te_fsdp.binding import KEY, NO_SHARD, Binding, binding_of
from te_fsdp.mesh import check_1d
from te_fsdp.modules.assigned import watch_assignments
from te_fsdp.modules.checks import Selection, plan_modules
from te_fsdp.modules.classes import bound_class
from te_fsdp.modules.copies import sync_tp_replicas
from te_fsdp.modules.equal_shards import find_equal_shards, on_device, refuse_equal_shards
from te_fsdp.modules.grouped import adopt_single
from te_fsdp.modules.inputs import watch_inputs
from te_fsdp.modules.plan import Meshing
from te_fsdp.modules.replaced import refuse_replaced, replacing
from te_fsdp.parameters import attributes_of
from te_fsdp.quantized.all_gather import mend_hooks
from te_fsdp.quantized.amax import requantize
from te_fsdp.quantized.installed import mend_new_zeros
from te_fsdp.quantized.optimizer_steps import refresh_quantized, require_main_weights, take_out_main_weights
from te_fsdp.step_hooks import StepFunctions, run_around_steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from te_fsdp.layout.experts import ExpertRange
    from te_fsdp.modules.plan import ModulePlan

__all__ = ["bind", "set_device_mesh"]

_log = logging.getLogger("te_fsdp")

#: Around every step of an optimizer of bound models, in this order (:mod:`te_fsdp.step_hooks`).
BEFORE_STEP: StepFunctions = (take_out_main_weights, refuse_replaced, require_main_weights, sync_tp_replicas)
AFTER_STEP: StepFunctions = (refresh_quantized,)


def set_device_mesh(
    model: nn.Module,
    tp_mesh: DeviceMesh | None = None,
    weight_mesh: DeviceMesh | None = None,
    *,
    ep_mesh: DeviceMesh | None = None,
    expert_weight_mesh: DeviceMesh | None = None,
    experts: Selection = None,
    check_inputs: bool = True,
) -> None:
    """Bind a tree of TE modules to meshes, in place: parameters become DTensors, rightly placed over tp.

    Call it once, before FSDP2's ``fully_shard``, on parameters made on the device or on meta. Each module's
    class becomes te_fsdp's subclass of its TE class, so that ``isinstance``, names and ``state_dict`` keys
    stay. Modules that TE does not know are replicated over tp; mark a parameter ``sequence_parallel = True``
    if each tp rank computes only its part of that parameter's gradient. Calling again with the same meshes
    changes nothing.

    Local for parameters on meta. With parameters on the device it is collective over ``tp_mesh`` and ``weight_mesh``:
    a few bytes per parameter tell whether ranks of tp hold equal parts, and quantized weights with one scale per tensor
    are requantized with the scale of the whole weight. With an ``ep_mesh`` it is collective over that too: the ranks
    tell each other how many experts they hold.

    Args:
        model: A TE module, or any tree that contains some.
        tp_mesh: 1-D tensor-parallel mesh, or ``None`` for no tensor parallelism. A parameter of local shape
            ``(out / tp, in)`` becomes a DTensor of global shape ``(out, in)``, and so on.
        weight_mesh: 1-D mesh of all ranks that hold pieces of one weight: FSDP shard x tp, flattened, without
            replicas. Needed for weights with one scale per tensor under tensor parallelism.
        ep_mesh: 1-D expert-parallel mesh, or ``None``. The ``GroupedLinear`` modules of each of its ranks then hold
            other experts (``num_gemms`` of them), and their parameters are registered under global indices
            (``weight2``, ``weight3`` on the second of two ranks with two experts each).
        expert_weight_mesh: As ``weight_mesh``, for expert modules: without ``ep``.
        experts: Names or classes of the grouped modules to deal out, or of modules that hold some; by default all.
        check_inputs: Compare what enters ``model`` over tp, when it comes in new shapes (:class:`te_fsdp.InputError`).
            Not for a model that is a TE module itself, which may be part of another.

    Raises:
        MeshError: A mesh is not 1-D, or not in ascending order, contradicts a module's ``tp_size`` or
            ``tp_group``, or the meshes do not fit together; or experts that are not dealt out over ``ep_mesh`` as
            ``torch.chunk`` cuts.
        OrderError: Parameters are sharded by FSDP2 already, or bound to other meshes.
        PlacementError: A module or option for which there is no right placement, or a quantized weight of which no
            cut consists of whole blocks of its format.
        InitError: Ranks of tp hold equal parts of a weight, or ranks of ep equal experts, as equal seeds draw them.
        CollectiveError: Where it communicates: some ranks did not make the call.

    Source: semantics of TransformerEngine PR #2713, signature included.
    """
    mesh = _communicates_over(model, tp_mesh, weight_mesh, ep_mesh)
    together = collective_call("set_device_mesh", mesh) if mesh is not None else nullcontext()
    meshings = Meshing(tp_mesh, weight_mesh), Meshing(tp_mesh, expert_weight_mesh, ep_mesh)
    with together, replacing(model, "set_device_mesh"):
        with raised_on_all_ranks(mesh, "set_device_mesh"):
            planned = plan_modules(model, *meshings, experts)
        _check_drawn_apart(planned, tp_mesh, ep_mesh)
        bind(model, planned)
    if _te.kind_of(model) is None:
        watch_inputs(model, tp_mesh if check_inputs else None)


def _check_drawn_apart(
    planned: Collection[ModulePlan], tp_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None
) -> None:
    """Refuse equal parts of what ranks should hold parts of. Collective over both, if anything is on the device."""
    if on_device(planned):
        with raised_on_all_ranks(ep_mesh, "set_device_mesh"), raised_on_all_ranks(tp_mesh, "set_device_mesh"):
            refuse_equal_shards(find_equal_shards(planned, tp_mesh, ep_mesh))


def bind(model: nn.Module, planned: Collection[ModulePlan]) -> None:
    """Carry a plan out: what ``set_device_mesh`` does after the last check.

    Collective over the weight meshes of quantized weights on the device that have one scale.

    Args:
        model: The root.
        planned: Its modules.
    """
    run_around_steps(BEFORE_STEP, AFTER_STEP)
    for item in planned:  # all before the first is replaced: ``replaced`` goes by ids of living parameters
        if item.kind == "GroupedLinear" and binding_of(item.module) is None:
            adopt_single(item.module)
    replaced: dict[int, torch.nn.Parameter] = {}
    for item in planned:
        _bind(item, replaced)
    watch_assignments(model)
    if _te.is_loaded():
        mend_hooks()


def _communicates_over(
    model: nn.Module, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, ep_mesh: DeviceMesh | None
) -> DeviceMesh | None:
    """The ranks that must come first, if the call communicates; ``None`` if it is local. Local operation."""
    for mesh, argument in ((tp_mesh, "tp_mesh"), (weight_mesh, "weight_mesh"), (ep_mesh, "ep_mesh")):
        check_1d(mesh, argument, f"set_device_mesh({type(model).__name__})")
    if ep_mesh is not None:
        return ep_mesh
    device = [p for p in model.parameters() if not p.is_meta and not isinstance(p, DTensor)]
    if device and tp_mesh is not None:
        return tp_mesh if weight_mesh is None else weight_mesh
    return weight_mesh if any(map(_te.is_quantized, device)) else None


def _bind(item: ModulePlan, replaced: dict[int, torch.nn.Parameter]) -> None:
    """Bind one module: class, process group, parameters. ``replaced`` keeps tied parameters tied."""
    module, meshes = item.module, item.meshes
    tp_mesh, weight_mesh = meshes.tp_mesh, meshes.weight_mesh
    known = binding_of(module)
    if known is not None:
        # A parent knows more than the module alone (q/k norms, fused projections): its rules replace earlier
        # ones.
        known.rules.update(item.rules)
        known.weight_mesh = known.weight_mesh or weight_mesh
        known.name = item.name if len(item.name) > len(known.name) else known.name
        return
    if item.kind is None and any(isinstance(p, DTensor) for p in module._parameters.values()):
        _log.debug("%s: left alone, its parameters are DTensors already", item.name)
        return
    binding = Binding(item.name, tp_mesh, weight_mesh, dict(item.rules))
    if item.experts is not None:
        binding.ep_mesh, binding.experts = meshes.ep_mesh, item.experts
        binding.rules = {item.experts.registered_name(name): rule for name, rule in item.rules.items()}
        _register_globally(module, item.experts)
        binding.experts_mesh = meshes.experts_mesh
    for name, parameter in module._parameters.items():
        if parameter is not None:
            binding.attributes[name] = attributes_of(parameter)
    module.__dict__[KEY] = binding
    module.__class__ = bound_class(type(module))
    if (
        tp_mesh is not None
        and hasattr(module, "set_tensor_parallel_group")
        and getattr(module, "tp_size", 1) > 1
    ):
        module.set_tensor_parallel_group(tp_mesh.get_group())
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if id(parameter) not in replaced:
            mesh = binding.whole_mesh(name)
            new = _place(parameter, name, binding, mesh) if mesh is not None else parameter
            local = _torch.local_of(new)
            if _te.is_quantized(local) and not local.is_meta:
                requantize(local, binding)
                mend_new_zeros(local)
            binding.carry(name, new)
            replaced[id(parameter)] = new
            replaced.setdefault(id(new), new)
        module._parameters[name] = replaced[id(parameter)]


def _register_globally(module: nn.Module, experts: ExpertRange) -> None:
    """Register a module's parameters under global expert indices, in the order that they have. Local operation."""
    own = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({experts.registered_name(name): value for name, value in own.items()})
    exempt = module.__dict__.get(NO_SHARD)
    if isinstance(exempt, frozenset):
        module.__dict__[NO_SHARD] = frozenset(map(experts.registered_name, exempt))
    _te.rename_parameters(module, {name: experts.registered_name(name) for name in own})


def _place(
    parameter: torch.nn.Parameter, name: str, binding: Binding, mesh: DeviceMesh
) -> torch.nn.Parameter:
    """The parameter as a DTensor on its mesh; data, quantized buffers and ``requires_grad`` stay as they are.

    A parameter of all experts also lies on ``ep``.
    """
    rule, local = binding.rules[name], parameter.detach()
    kept = _te.high_precision_value(parameter)
    if kept is not None:
        _te.attach_high_precision_value(local, kept)
    shape = list(local.shape)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if binding.experts is not None and rule.layout.is_grouped:
        shape[0], placements[0] = binding.experts.total, Shard(0)
    if rule.shard_dim is not None and binding.tp_mesh is not None:
        shape[rule.shard_dim] *= binding.tp_mesh.size()
        placements[-1] = Shard(rule.shard_dim)
    like = _torch.placed(local, mesh, placements, torch.empty(shape, device="meta"))
    return _torch.with_local(local, like, requires_grad=parameter.requires_grad)
