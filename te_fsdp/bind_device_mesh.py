"""``set_device_mesh``: plan, check, then bind every module of a tree to its meshes.

A bound module has a te_fsdp class, created on first use (TE is not imported before):

    te_fsdp.Linear  =  MeshModule  +  te.Linear  +  ShardedInit  +  TransformerEngineBaseModule

``ShardedInit`` is between TE's class and TE's base class. So the ``reset_parameters`` of TE's class runs, and only the
generic part, which does not support shards, is replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from te_fsdp import state_dict_wrappers
from te_fsdp.check_points import check_points
from te_fsdp.collectives.agreement import raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import require_flags
from te_fsdp.initialize import initialize_te_parameters
from te_fsdp.inline_init import record_writes
from te_fsdp.layout import ExpertRange
from te_fsdp.lifecycle import (
    StepFunctions,
    register_step_functions,
    run_checks,
    sync_tp_replicas,
    track_replaced_parameters,
)
from te_fsdp.mesh_checks import check_1d
from te_fsdp.modules import expert_entries, fused_states, newest_amaxes, state_loading
from te_fsdp.modules.grouped import GroupedModule, Selection, adopt_single, check_switch
from te_fsdp.modules.mixin import (
    ForeignModule,
    MeshModule,
    OpMeshModule,
    ReadableModule,
    ResettableModule,
    local_parameters,
)
from te_fsdp.modules.options import check_divisible
from te_fsdp.modules.plan import ModuleMeshes, ModulePlan, plan_modules
from te_fsdp.modules.state_loading import watch_loading
from te_fsdp.modules.torch_units import bound_models, explain_mesh, reshard_units
from te_fsdp.modules.user_dtensors import on_te_fsdp_mesh
from te_fsdp.quantized import boxed_loading, fsdp_hooks
from te_fsdp.quantized.amax import refresh_quantized
from te_fsdp.quantized.boxed import describe_shards
from te_fsdp.quantized.shards import patch_new_zeros, requantize
from te_fsdp.records import (
    BINDING,
    MODULE,
    PARAMETER,
    ModuleBinding,
    ModuleRecord,
    UserDTensor,
    binding_of,
    module_record,
    param_attrs_to_copy,
    require_model,
)
from te_fsdp.row_order import refuse_writes_to_copies
from te_fsdp.upstream import (
    te as _te,
    te_modules as _te_modules,
    torch_dtensor as _torch,
    torch_redistribution,
)
from te_fsdp.upstream.fsdp2_gradients import add_unsharded_inputs
from te_fsdp.upstream.patches import PICKLES, Replacements, apply_patches
from te_fsdp.upstream.torch_data import count_writes_to_data
from te_fsdp.upstream.torch_functions import unscale_over_all_meshes
from te_fsdp.upstream.torch_redistribution import move_strided_shards
from te_fsdp.upstream.torch_rows import after_copies
from te_fsdp.versions import warn_if_untested


@functools.cache
def _sharded_init_class() -> type:
    """Return ``TransformerEngineBaseModule`` with a generic ``reset_parameters`` for shards."""
    base = _te.base_module_class()

    # In the MRO it is between a TE class, whose own ``reset_parameters`` calls it with ``super()``, and TE's
    # base.
    class ShardedInit(base):  # type: ignore[misc, valid-type]
        """Replaces the generic part of TE's ``reset_parameters`` for bound modules."""

        @property
        def is_fsdp2(self) -> Any:
            """Return whether TE's forward drops a weight that backward then quantizes again."""
            # Backward repeats a quantization only. A weight cast by ``torch.autocast`` would be missing (2.20.2).
            return super().is_fsdp2 and not _te_modules.is_casting()

        def reset_parameters(self: Any, defer_init: bool | None = False) -> None:
            """Initialize this rank's shards; see :meth:`MeshModule.reset_parameters`."""
            if binding_of(self) is None:
                super().reset_parameters(defer_init=defer_init)  # type: ignore[not-callable]
            elif not defer_init:
                initialize_te_parameters(self)

    return ShardedInit


@functools.cache
def mesh_class(kind: str) -> type[torch.nn.Module]:
    """Return te_fsdp's class of a module kind, for example ``te_fsdp.Linear``."""
    stock = _te.module_class(kind)

    def __init__(
        self: Any,
        *args: Any,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        **kwargs: Any,
    ) -> None:
        check_1d(tp_mesh, "tp_mesh", kind)
        check_1d(weight_mesh, "weight_mesh", kind)
        check_switch(kwargs)
        # TE's norms have no tensor-parallel arguments.
        if tp_mesh is not None and kind not in ("LayerNorm", "RMSNorm"):
            kwargs.setdefault("tp_group", tp_mesh.get_group())
            kwargs.setdefault("tp_size", tp_mesh.size())
        check_divisible(kind, stock, args, kwargs)
        super(cls, self).__init__(*args, **kwargs)  # type: ignore[invalid-argument]
        if tp_mesh is not None or weight_mesh is not None:
            self.set_device_mesh(tp_mesh=tp_mesh, weight_mesh=weight_mesh)

    doc = f"""TransformerEngine's ``{kind}`` that can be bound to meshes.

    Accepts all arguments of ``transformer_engine.pytorch.{kind}``, and two further keywords.

    Args:
        *args: As for TE.
        tp_mesh: 1-D tensor-parallel mesh; the default of ``tp_group`` and ``tp_size``.
        weight_mesh: 1-D mesh of all ranks with shards of one weight (FSDP shard x tp), for the scale of
            quantized weights with one scale per tensor.
        **kwargs: As for TE.

    Raises:
        MeshError: A mesh is not 1-D, or contradicts ``tp_size`` or ``tp_group``.
        PlacementError: Heads or features that ``tp_size`` does not divide.
    """
    members = {"__init__": __init__, "set_device_mesh": set_device_mesh, "__doc__": doc}
    # The constructor above reads `cls` for ``super()`` when it runs, and the class exists by then.
    cls = type(kind, _bases(stock), members | {"__module__": "te_fsdp"})
    return cls


@functools.cache
def bound_class(cls: type, under_tp: bool = False) -> type:
    """Return the class of a bound instance of ``cls``: for ``te.Linear`` a subclass of ``te_fsdp.Linear``.

    ``under_tp`` adds :class:`ReadableModule` to classes outside of TE.

    It has the name and ``__module__`` of ``cls``: ``_init_weights`` of public models recognizes TE's modules by them.
    A user's subclass, and a module outside of TE, keep their code behind the mixin.
    """
    if issubclass(cls, MeshModule):
        return cls
    members = {"set_device_mesh": set_device_mesh, "__doc__": cls.__doc__, "__module__": cls.__module__}
    for name in _te.KINDS if _te.is_loaded() else ():
        if cls is _te.module_class(name):
            return type(name, (mesh_class(name),), members)
    is_foreign = not any(
        str(base.__module__).partition(".")[0] == "transformer_engine" for base in cls.__mro__
    )
    bases = (ReadableModule, *_bases(cls)) if is_foreign and under_tp else _bases(cls)
    return type(cls.__name__, bases, {**members, "_is_foreign": is_foreign})


def _bases(cls: type) -> tuple[type, ...]:
    """Return the bases of a bound class over ``cls``."""
    if _te.is_loaded() and issubclass(cls, _te.base_module_class()):
        grouped = issubclass(cls, _te.module_class("GroupedLinear"))
        return (GroupedModule if grouped else ResettableModule, cls, _sharded_init_class())
    if hasattr(cls, "op_backward"):
        return (OpMeshModule, cls)
    # The module's own ``reset_parameters`` would initialize a shard like an unsharded tensor.
    from_te = cls.__module__.split(".")[0] == "transformer_engine"
    return (ForeignModule if hasattr(cls, "reset_parameters") and not from_te else MeshModule, cls)


#: Run around every step of an optimizer of bound models, in this order (:mod:`te_fsdp.lifecycle`).
BEFORE_STEP: StepFunctions = (run_checks, sync_tp_replicas)
AFTER_STEP: StepFunctions = (refresh_quantized, reshard_units)


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
    """Bind a tree of TE modules to meshes, in place: parameters become DTensors with the right placement over tp.

    Call it once, before FSDP2's ``fully_shard``, on parameters on the device or on meta. Each module's class becomes
    te_fsdp's subclass of its TE class, so ``isinstance``, FQNs and ``state_dict`` keys do not change. Modules outside
    of TE are replicated over tp. Set ``sequence_parallel = True`` on a parameter if each tp rank computes only its
    term of that parameter's gradient. A repeated call with the same meshes has no effect.

    Local operation for parameters on meta. Otherwise it is collective over ``tp_mesh`` and ``weight_mesh``: ranks of tp
    compare a few bytes per parameter, and quantized weights with one scale per tensor get the scale of the unsharded
    weight. It is also collective over an ``ep_mesh``, whose ranks exchange their numbers of experts.

    Args:
        model: A TE module, or any module tree that contains some.
        tp_mesh: 1-D tensor-parallel mesh, or ``None`` for no tensor parallelism. A parameter of local shape
            ``(out / tp, in)`` becomes a DTensor of global shape ``(out, in)``, and so on.
        weight_mesh: 1-D mesh of all ranks that shard one weight: FSDP shard x tp, flattened, without replicas.
            Required for weights with one scale per tensor under tensor parallelism.
        ep_mesh: 1-D expert-parallel mesh, or ``None``. The ``GroupedLinear`` modules on each rank contain different
            experts. Their parameters have global indices (``weight2``, ``weight3`` on rank 1 of two experts each).
        expert_weight_mesh: As ``weight_mesh``, for expert modules: without ``ep``.
        experts: Names or classes of the grouped modules to distribute, or of modules that contain some. Default: all.
        check_inputs: Compare inputs of ``model`` with new shapes over tp, unless it is itself a TE module, and
            gradients of replicated parameters in the first two steps.

    Raises:
        MeshError: A mesh is not 1-D or not in ascending order, contradicts another mesh or a module's ``tp_size`` or
            ``tp_group``, or experts are not distributed over ``ep_mesh`` as by ``torch.chunk``.
        OrderError: Parameters are already sharded by FSDP2, or bound to different meshes.
        PlacementError: A module or option has no correct placement, or a quantized weight no shards of full blocks.
        InitError: Ranks of tp have equal shards of a weight, or ranks of ep equal experts, because of equal seeds.
        CollectiveError: The call communicates, and some ranks did not make it.

    Source: semantics and signature of TransformerEngine PR #2713.
    """
    require_flags("set_device_mesh", check_inputs=check_inputs)
    mesh = _communicates_over(model, tp_mesh, weight_mesh, ep_mesh, expert_weight_mesh)
    together = collective_call("set_device_mesh", mesh) if mesh is not None else nullcontext()
    tp = None if tp_mesh is None or tp_mesh.size() == 1 else tp_mesh
    dense = ModuleMeshes(tp, weight_mesh, single=tp_mesh if tp is None else None)
    with together, track_replaced_parameters(model, "set_device_mesh"):
        with raised_on_all_ranks(mesh, "set_device_mesh"):
            planned = plan_modules(model, dense, ModuleMeshes(tp, expert_weight_mesh, ep_mesh), experts)
        for check in check_points().binding:
            check(planned, tp_mesh, ep_mesh)
        bind(model, planned)
    bound_models.add(model)
    points = module_record(model).bound_checks = check_points()
    register_step_functions(BEFORE_STEP, AFTER_STEP, points)
    for check in points.bound:
        check(model, tp_mesh if check_inputs else None)


def remove_bound_checks(model: nn.Module) -> None:
    """Remove the checks of ``set_device_mesh`` on any part of a model. Local operation."""
    for module in model.modules():
        record: ModuleRecord | None = module.__dict__.get(MODULE)
        if record is not None and record.bound_checks is not None:
            for check in record.bound_checks.bound:
                check(module, None)
            record.bound_checks = None


_TORCH_PATCHES: Replacements = (
    *state_dict_wrappers.PATCHES,
    *state_loading.PATCHES,
    *torch_redistribution.PATCHES,
    *boxed_loading.PATCHES,
    *expert_entries.PATCHES,
    *newest_amaxes.PATCHES,
)
_TE_PATCHES: Replacements = (*fsdp_hooks.PATCHES, *fused_states.PATCHES, *PICKLES)


def bind(model: nn.Module, planned: Collection[ModulePlan]) -> None:
    """Apply a plan. Collective over the weight meshes of quantized weights on the device with one scale."""
    warn_if_untested()
    record_writes(model)
    register_step_functions(BEFORE_STEP, AFTER_STEP)
    adopted: dict[int, tuple[Any, Any]] = {}
    # All of them before the first replacement, because ``replaced`` needs the ids of living parameters.
    for item in planned:
        if item.kind == "GroupedLinear" and binding_of(item.module) is None:
            adopt_single(item.module, adopted)
    replaced: dict[int, torch.nn.Parameter] = {}
    for item in planned:
        _bind(item, replaced)
    watch_loading(model)
    apply_patches(_TORCH_PATCHES + _TE_PATCHES if _te.is_loaded() else _TORCH_PATCHES)
    move_strided_shards()
    after_copies(PARAMETER, refuse_writes_to_copies)
    count_writes_to_data(PARAMETER)
    add_unsharded_inputs()
    unscale_over_all_meshes()
    _torch.explain_concatenations(explain_mesh)


def _communicates_over(
    model: nn.Module,
    tp_mesh: DeviceMesh | None,
    weight_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    expert_weight_mesh: DeviceMesh | None,
) -> DeviceMesh | None:
    """Return the mesh of the ranks that must make the call, or ``None`` if it is local. Local operation."""
    require_model(model, "set_device_mesh(model, tp_mesh, weight_mesh)")
    meshes = {"tp_mesh": tp_mesh, "weight_mesh": weight_mesh, "ep_mesh": ep_mesh}
    for argument, mesh in {**meshes, "expert_weight_mesh": expert_weight_mesh}.items():
        check_1d(mesh, argument, f"set_device_mesh({type(model).__name__})")
    # Ranks of `ep` exchange their numbers of experts, whatever the state of the parameters is.
    if ep_mesh is not None:
        return ep_mesh
    # Parameters on meta have no values to compare or to quantize.
    device = [p for p in model.parameters() if not p.is_meta and not isinstance(p, DTensor)]
    if device and tp_mesh is not None:
        return tp_mesh if weight_mesh is None else weight_mesh
    return weight_mesh if any(map(_te.is_quantized, device)) else None


def _bind(item: ModulePlan, replaced: dict[int, torch.nn.Parameter]) -> None:
    """Bind one module: class, process group, parameters. Collective as :func:`bind`.

    ``replaced`` maps ``id`` of a parameter to its replacement, so that tied parameters stay tied.
    """
    module, meshes = item.module, item.meshes
    tp_mesh, weight_mesh = meshes.tp_mesh, meshes.weight_mesh
    previous = binding_of(module)
    if previous is not None:
        # A parent has more information than the module alone (q/k norms, fused projections), so its rules replace
        # earlier ones.
        previous.rules.update(item.rules)
        previous.weight_mesh = previous.weight_mesh or weight_mesh
        previous.name = item.name if len(item.name) > len(previous.name) else previous.name
        for name, parameter in module._parameters.items():
            describe_shards(module, previous, name, parameter)
        return
    binding = ModuleBinding(item.name, tp_mesh, weight_mesh, dict(item.rules))
    binding.distributed = dict(item.distributed)
    if item.experts is not None:
        binding.ep.mesh, binding.experts = meshes.ep_mesh, item.experts
        binding.rules = {item.experts.registered_name(name): rule for name, rule in item.rules.items()}
        _register_globally(module, item.experts)
        binding.ep.experts_mesh = meshes.experts_mesh
    for name, parameter in module._parameters.items():
        if parameter is not None:
            # FSDP2 and initialization create new parameters later, which must get the user's attributes.
            binding.attributes[name] = param_attrs_to_copy(parameter)
    module.__dict__[BINDING] = binding
    # Set it on the instance too, because FSDP2 changes the class of a unit to one with torch's ``__module__``.
    module.__dict__.setdefault("__module__", type(module).__module__)
    # The object stays, so references of optimizers, parents and user code stay valid, as in FSDP2.
    module.__class__ = bound_class(type(module), tp_mesh is not None)
    is_sharded = tp_mesh is not None and getattr(module, "tp_size", 1) > 1
    if is_sharded and hasattr(module, "set_tensor_parallel_group"):
        # A module built with ``tp_size`` only has no group yet.
        module.set_tensor_parallel_group(tp_mesh.get_group())
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        if id(parameter) not in replaced:
            mesh, new = binding.unsharded_mesh(name), parameter
            if isinstance(parameter, DTensor):
                user_dtensor = binding.distributed.get(name)
                if user_dtensor is None:  # a TE parameter that is already a DTensor on the tp mesh
                    assert mesh is not None
                    user_dtensor = UserDTensor(mesh, tuple(parameter.placements), False, None)
                new = on_te_fsdp_mesh(parameter, user_dtensor)
            elif mesh is not None:
                new = _to_dtensor(parameter, name, binding, mesh)
            local = _torch.local_of(new)
            if _te.is_quantized(local) and not local.is_meta:
                requantize(local, binding)
                patch_new_zeros(local)
            binding.set_attributes(name, new)
            describe_shards(module, binding, name, new)
            replaced[id(parameter)] = new
            replaced.setdefault(id(new), new)
        module._parameters[name] = replaced[id(parameter)]
    use_local_parameters(module)


def use_local_parameters(owner: nn.Module) -> None:
    """Let hooks that compute a weight (``prune``) read local tensors. Their buffers are plain tensors."""
    for hook in _torch.weight_hooks(owner):
        stock = type(hook)

        def __call__(self: Any, module: nn.Module, *args: Any, stock: Any = stock) -> Any:
            with local_parameters(module, module.__dict__[BINDING], is_foreign=True):
                return stock.__call__(self, module, *args)

        members = {"__call__": __call__, "__module__": stock.__module__}
        hook.__class__ = type(stock.__name__, (stock,), members)


def _register_globally(module: nn.Module, experts: ExpertRange) -> None:
    """Register a module's parameters under global expert indices, in their present order. Local operation."""
    before = dict(module._parameters)
    module._parameters.clear()
    module._parameters.update({experts.registered_name(name): value for name, value in before.items()})
    record = module_record(module)
    if isinstance(record.no_shard, frozenset):
        record.no_shard = frozenset(map(experts.registered_name, record.no_shard))
    _te_modules.rename_parameters(module, {name: experts.registered_name(name) for name in before})


def _to_dtensor(
    parameter: torch.nn.Parameter, name: str, binding: ModuleBinding, mesh: DeviceMesh
) -> torch.nn.Parameter:
    """Return a parameter as a DTensor on ``mesh``, with the shape of the original. Local operation.

    The local tensor shares the memory of ``parameter`` (local shape), also the buffers of a quantized weight.
    """
    rule, local = binding.rules[name], parameter.detach()
    # ``detach`` loses this attribute, from which main weights are initialized.
    initial = _te.high_precision_value(parameter)
    if initial is not None:
        _te.attach_high_precision_value(local, initial)
    shape = list(local.shape)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if binding.experts is not None and rule.layout.is_grouped:
        shape[0], placements[0] = binding.experts.total, Shard(0)
    if rule.shard_dim is not None and binding.tp_mesh is not None:
        # TE creates one rank's part. The DTensor has the shape of the unsharded parameter.
        shape[rule.shard_dim] *= binding.tp_mesh.size()
        placements[-1] = Shard(rule.shard_dim)
    template = _torch.placed(local, mesh, placements, torch.empty(shape, device="meta"))
    return _torch.with_local(local, template, requires_grad=parameter.requires_grad)
