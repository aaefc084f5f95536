"""Records of te_fsdp on the objects of a model.

Binding, sharding, initialization, casts and loading replace the object of a parameter. The attributes of the old
object are copied to the new one, its successor (:func:`copy_param_attrs`):

    ``_te_fsdp``          te_fsdp's record, a :class:`ParameterRecord`; each replacement gets a copy
    other attributes      the user's and TE's; attributes that the successor already has are unchanged

A sharded parameter and the unsharded parameter that FSDP2 installs in its place share one record. Optimizers, and
torch's hooks around their steps, get only parameters: the record contains the data about the model that they need.

``set_device_mesh`` adds a :class:`ModuleBinding` to each module: its meshes, its rules and the attributes of its
parameters. :mod:`te_fsdp.shard_info` derives the global indices of a parameter's local shard from both records.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from te_fsdp.check_points import CheckPoints, check_points
from te_fsdp.errors import PlacementError, require_kind
from te_fsdp.layout import ExpertRange, ParameterRule, Storage
from te_fsdp.upstream import te as _te, torch_autograd as _torch_autograd, torch_dtensor as _torch
from te_fsdp.upstream.fsdp2_units import ShardedUnshardedPair
from te_fsdp.upstream.te_formats import Format
from te_fsdp.upstream.torch_dtensor import DTensorSpec

#: Attribute of a parameter: its :class:`ParameterRecord`.
PARAMETER = "_te_fsdp"
#: Attribute of the local tensor of a quantized weight: its :class:`WeightRecord`.
WEIGHT = "_te_fsdp_weight"
#: Key in the ``__dict__`` of a bound module: its :class:`ModuleBinding`.
BINDING = "_te_fsdp_binding"
#: Key in the ``__dict__`` of any module: its :class:`ModuleRecord`.
MODULE = "_te_fsdp_module"
#: Attribute of an optimizer with main weights of te_fsdp (:class:`te_fsdp.features.main_params.MainParameters`)
KEEPS_MAIN_WEIGHTS = "_te_fsdp_main_weights"
_NOT_COPIED = _torch.DTENSOR_ATTRIBUTES | {WEIGHT}
#: Cause in :attr:`ParameterRecord.replaced_by` of a copy.
COPIED = "copy.deepcopy"


@dataclass(frozen=True)
class ParameterPlan:
    """Decisions of ``fully_shard`` for one registered parameter, before anything changes."""

    label: str  #: FQN of the bound parameter: experts have global indices and may be one parameter
    name: str  #: Last part of the FQN
    unit: str  #: Name of the innermost unit that contains it
    storage: Storage  #: How it is stored and sharded
    #: FQNs under which this parameter is registered, in module order: several for a tied parameter.
    owners: tuple[str, ...]
    rule: ParameterRule | None = None  #: How tp shards it; ``None`` if it does not
    experts: bool = False  #: Whether it is distributed over ``ep``
    #: Tensor dim that FSDP2 shards, for quantized weights and weights of all experts; ``None``: dim 0.
    fsdp_dim: int | None = None
    gradient_dtype: torch.dtype | None = None  #: Dtype of its gradient, if not the parameter's own


@dataclass(eq=False)
class ParameterRecord:
    """Data of te_fsdp about a parameter. Copies of the parameter do not keep references to existing objects."""

    label: str | None = None  #: FQN of a bound parameter that may be quantized
    tp_replica: bool = False  #: Whether tp replicates it, so that its values must be equal on all tp ranks
    no_shard: bool = False  #: Whether ``fsdp_no_shard`` was called for it
    plan: ParameterPlan | None = None  #: Decisions of ``fully_shard`` about it
    #: Expert-parallel mesh of an expert's parameter; its ranks have different experts.
    ep_mesh: DeviceMesh | None = None
    state: weakref.ref[Any] | None = None  #: The ``ShardedModel`` of its model
    #: FSDP2's ``FSDPParam`` of an unsharded parameter that may stay registered after a forward.
    fsdp_param: weakref.ref[Any] | None = None
    #: Main parameters of the optimizer with sharded states (:class:`te_fsdp.features.main_params.MainParameters`).
    main_parameters: weakref.ref[Any] | None = None
    #: Name and cause, if this object was replaced in its module (:mod:`te_fsdp.lifecycle`), or if it is a copy that
    #: was never registered in a module.
    replaced_by: tuple[str, str] | None = None
    #: For such a copy: the record of the copied parameter.
    copied_from: weakref.ref[ParameterRecord] | None = None
    #: Number of further steps in which a check compares its gradient over tp; -1 for all steps.
    grad_checks_left: int = 0
    #: For a sharded parameter: its ``id`` and :func:`te_fsdp.upstream.torch_dtensor.memory_id`, to detect an
    #: assignment to its ``.data``.
    memory: tuple[int, int] | None = None
    #: A gradient, and the factor that it gets before anything is added to it (:mod:`te_fsdp.features.hfsdp.gradients`).
    deferred_scale: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
    writes: int = 0  #: In-place writes to it on meta (:mod:`te_fsdp.inline_init`)
    rewrites: tuple[int, ...] = ()  #: Number of them that ``materialize`` has repeated, by owner

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterRecord:
        """Return a copy with the same meshes, because process groups cannot be copied."""
        return dataclasses.replace(
            self,
            plan=None,
            state=None,
            fsdp_param=None,
            main_parameters=None,
            deferred_scale=None,
            replaced_by=("", COPIED),
            copied_from=weakref.ref(self),
        )

    def __reduce__(self) -> Any:
        """Return an empty dict instead of the record, which ``torch.load(weights_only=True)`` can read."""
        return OrderedDict, ()


@dataclass(eq=False)
class WeightRecord:
    """Data of te_fsdp about the local tensor of a quantized weight. It belongs to this tensor alone."""

    #: Format of an unsharded weight, set when FSDP2 installs it. It stays after resharding.
    unsharded_format: Format | None = None
    #: Cached metadata of the all-gathers of a shard (:mod:`te_fsdp.quantized.fsdp_hooks`)
    gathers: Any = None
    #: Rectangles that a load has read so far, each with its values or bytes (:mod:`te_fsdp.quantized.boxed`).
    arrived: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    #: Loaded values that wait for the amax of all ranks (:mod:`te_fsdp.quantized.boxed`).
    pending: torch.Tensor | None = None
    #: Whether a load has written the weight, until :func:`te_fsdp.quantized.boxed.take_written` is called.
    is_loaded: bool = False


def weight_record(local: torch.Tensor) -> WeightRecord:
    """Return the record of a quantized weight's local tensor; create it if it does not exist. Local operation."""
    record = local.__dict__.get(WEIGHT)
    if record is None:
        record = local.__dict__[WEIGHT] = WeightRecord()
    return record


def get_record(parameter: torch.Tensor) -> ParameterRecord | None:
    """Return a parameter's record; ``None`` if it has none. Local operation."""
    return parameter.__dict__.get(PARAMETER) or None


def get_or_create_record(parameter: torch.Tensor) -> ParameterRecord:
    """Return a parameter's record; create it if it does not exist. Local operation."""
    record = parameter.__dict__.get(PARAMETER)
    if not record:
        record = parameter.__dict__[PARAMETER] = ParameterRecord()
    return record


def plan_of(parameter: torch.Tensor) -> ParameterPlan | None:
    """Return the decisions of ``fully_shard`` about a parameter; ``None`` for other parameters. Local operation."""
    record = parameter.__dict__.get(PARAMETER)
    return record.plan if record else None


def checks_of(parameter: torch.Tensor) -> CheckPoints:
    """Return the checks of the sharded model of a parameter, or those of the default level. Local operation."""
    record = get_record(parameter)
    state = record.state() if record is not None and record.state is not None else None
    return check_points() if state is None else state.checks


def label_of(parameter: torch.Tensor, kind: str = "a parameter") -> str:
    """Return a parameter's name for messages: its label, or else its shape. Local operation."""
    record = get_record(parameter)
    named = None if record is None else record.plan.label if record.plan is not None else record.label
    return named or f"{kind} of shape {tuple(parameter.shape)}"


def share_record(parameter: torch.Tensor, unsharded: torch.Tensor) -> None:
    """Set the record of a shard on its unsharded parameter, and copy the attributes that the latter lacks. Local."""
    if PARAMETER in parameter.__dict__:
        unsharded.__dict__[PARAMETER] = parameter.__dict__[PARAMETER]
    copy_param_attrs(parameter, unsharded)


def param_attrs_to_copy(parameter: torch.Tensor) -> dict[str, Any]:
    """Return the Python attributes that a successor gets, without the private ones of a tensor subclass."""
    excluded = _NOT_COPIED
    if not isinstance(parameter, DTensor) and type(parameter) is not torch.nn.Parameter:
        excluded = excluded.union(
            parameter.detach().__dict__, _te.DATA_ATTRIBUTES
        )  # of quantized and of grouped tensors
    return {key: value for key, value in parameter.__dict__.items() if key not in excluded}


def copy_param_attrs(
    old: torch.Tensor | dict[str, Any], new: torch.Tensor, *, leave_out: Collection[str] = ()
) -> None:
    """Copy a parameter's Python attributes to its successor, except those that the successor has. Local operation.

    ``old`` is the parameter, or the result of :func:`param_attrs_to_copy` for it before it was changed.
    """
    attrs = new.__dict__
    for key, value in (old if isinstance(old, dict) else param_attrs_to_copy(old)).items():
        if key not in attrs and key not in leave_out:
            # A different model or an optimizer may still use the old object.
            attrs[key] = (
                dataclasses.replace(value, replaced_by=None) if isinstance(value, ParameterRecord) else value
            )


def inherit(old: torch.Tensor, new: torch.Tensor, *, leave_out: Collection[str] = ()) -> None:
    """Copy everything except the values from a parameter to its replacement. Local operation.

    This includes ``requires_grad``, Python attributes, gradient hooks and ``grad_dtype``. TE's own
    ``reset_parameters`` creates parameters without them.
    """
    if new is old:
        return
    if new.requires_grad != old.requires_grad:
        new.requires_grad_(old.requires_grad)
    _torch_autograd.copy_gradient_settings(old, new)
    copy_param_attrs(old, new, leave_out=leave_out)


def replace_local_tensor(
    parameter: torch.Tensor, local: torch.Tensor, *, leave_out: Collection[str] = ()
) -> nn.Parameter:
    """Return a parameter with the given local tensor and the attributes of ``parameter``. Local operation.

    ``local`` itself becomes the local tensor of the result. It has the shape of the parameter's local tensor and
    any dtype.
    """
    if isinstance(parameter, DTensor):
        new = _torch.with_local(local, parameter, requires_grad=parameter.requires_grad)
    elif type(local) is torch.Tensor and issubclass(type(parameter), torch.nn.Parameter):
        # The user may have a class of parameters.
        new = local.detach().as_subclass(type(parameter)).requires_grad_(parameter.requires_grad)
    else:
        new = torch.nn.Parameter(local, requires_grad=parameter.requires_grad)
    inherit(parameter, new, leave_out=leave_out)
    return new  # type: ignore[bad-return]


class ParamOwner(NamedTuple):
    """A module that owns a parameter, and the name under which it is registered there."""

    label: str  #: FQN, from the root
    module: nn.Module  #: The module that owns the parameter
    name: str  #: Name in that module
    parameter: nn.Parameter  #: The parameter

    @property
    def path(self) -> str:
        """Return the FQN of the module."""
        return self.label.removesuffix(self.name).removesuffix(".")


def param_owners(model: nn.Module, *, remove_duplicate: bool = True) -> list[ParamOwner]:
    """Return the owners of each parameter, several for a tied one. Local operation.

    With ``remove_duplicate=False`` a module with several names is visited once per name.
    """
    return [
        ParamOwner(f"{path}.{name}" if path else name, module, name, parameter)
        for path, module in model.named_modules(remove_duplicate=remove_duplicate)
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


def first_owners(model: nn.Module) -> dict[int, ParamOwner]:
    """Map the ``id`` of each parameter to its first owner. A tied parameter occurs once. Local operation."""
    owners: dict[int, ParamOwner] = {}
    for owner in param_owners(model):
        owners.setdefault(id(owner.parameter), owner)
    return owners


def require_model(value: object, where: str) -> None:
    """Raise ``PlacementError`` unless an argument is a module. Usually two arguments were exchanged."""
    fix = "pass the model itself, as one module"
    require_kind(where, "model", value, torch.nn.Module, expected="a torch.nn.Module", fix=fix)


def require_optimizer(value: object, where: str) -> None:
    """Raise ``PlacementError`` unless an argument is an optimizer with the protocol of ``torch.optim``."""
    if not isinstance(getattr(value, "param_groups", None), list):
        raise PlacementError(
            f"{where}: optimizer",
            expected="a torch.optim.Optimizer",
            got=type(value).__name__,
            fix="pass the optimizer itself, not a list, a state dict or a scheduler",
        )


@dataclass(eq=False)
class ModuleRecord:
    """Data of te_fsdp about a module, bound or not."""

    #: By ``fsdp_no_shard``: ``True`` for all parameters in it and below it, or the names of direct ones.
    no_shard: bool | frozenset[str] = frozenset()
    sharded: Any = None  #: The ``ShardedModel``, if it is the root of one
    #: Checks that watch it, if ``set_device_mesh`` was called on it.
    bound_checks: CheckPoints | None = None
    checks: dict[type, Any] = field(default_factory=dict)  #: State of checks that watch it, by class
    #: Functions that were registered as its hooks
    hooks: set[Callable[..., Any]] = field(default_factory=set)


def module_record(module: nn.Module) -> ModuleRecord:
    """Return the record of a module; create it if it does not exist. Local operation."""
    record = module.__dict__.get(MODULE)
    if record is None:
        record = module.__dict__[MODULE] = ModuleRecord()
    return record


@dataclass(frozen=True)
class UserDTensor:
    """Placement of a parameter that the user registered as a DTensor, before FSDP2 shards it."""

    mesh: DeviceMesh  #: ``ep``, ``tp`` or (``ep``, ``tp``), always with ``tp`` if that has several ranks
    placements: tuple[Placement, ...]  #: One for each axis of the mesh
    is_expert: bool  #: Whether ``ep`` shards it
    tp_dim: int | None  #: Tensor dim that ``tp`` shards


@dataclass
class FsdpRecord:
    """FSDP2's changes to the parameters of a bound module, by their names."""

    is_managed: bool = False  #: Whether FSDP2 manages parameters of the module
    needs_requantize: bool = False  #: Whether high-precision values of quantized weights are being sharded
    #: Local shards of delayed-scaling weights since the last all-gather.
    shards: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    sharded: set[str] = field(default_factory=set)  #: Parameters that FSDP2 has replaced by shards
    pairs: dict[str, ShardedUnshardedPair] = field(default_factory=dict)  #: Forms that FSDP2 has installed
    #: Spec of an unsharded parameter whose gradient is partial over tp, and the spec with that placement.
    partial_specs: dict[str, tuple[DTensorSpec, DTensorSpec]] = field(default_factory=dict)
    #: Whether a forward of the module has run within a backward, which needs both forms
    recomputed: bool = False
    emptied: bool = False  #: Whether ``to_empty`` may have left uninitialized memory
    #: Living autograd nodes that lead from forwards to the parameters
    forwards: list[weakref.ref[Any]] = field(default_factory=list)


@dataclass
class ExpertRecord:
    """Expert parallelism of a bound module. Modules without experts have the defaults."""

    mesh: DeviceMesh | None = None  #: 1-D expert-parallel mesh
    #: Mesh of an unsharded parameter of all experts: ``ep``, or (``ep``, ``tp``).
    experts_mesh: DeviceMesh | None = None
    #: Whether FSDP2 shards the quantized weight of all experts along rows or columns, not along the experts' dim.
    shards_within_experts: bool = False
    divided: bool = False  #: Whether FSDP2 divides the gradients of experts by the right number of ranks


@dataclass
class AmaxRecord:
    """The ranks over which the amax of a bound module's weights is reduced."""

    #: Group of delayed scaling if only some ranks have the module (experts, a pipeline stage). ``None``: that of
    #: ``te.autocast``.
    group: ProcessGroup | None = None
    #: Whether the ranks have agreed that the weight mesh has the ranks that shard the weights
    agreed: bool = False
    named: tuple[DeviceMesh, str] | None = None  #: Weight mesh and the name of its process group


@dataclass
class ModuleBinding:
    """Meshes, rules and parameter attributes of a bound module."""

    name: str  #: Name of the module in the tree of the ``set_device_mesh`` call, for messages
    tp_mesh: DeviceMesh | None  #: 1-D tensor-parallel mesh, or ``None``
    weight_mesh: DeviceMesh | None  #: 1-D mesh of the ranks that shard one weight, or ``None``
    rules: dict[str, ParameterRule]  #: Rule of each direct parameter
    #: Python attributes of each direct parameter (TE's and the user's), copied to every object that replaces the
    #: parameter.
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: The experts of an expert module. Its parameters are registered under their global indices.
    experts: ExpertRange | None = None
    #: Own parameters that the user registered as DTensors, by name. They stay DTensors in forward.
    distributed: dict[str, UserDTensor] = field(default_factory=dict)
    on_meta: bool = True  #: Whether parameters may still be on meta
    #: Name of a parameter -> check of its partial gradient, for the backwards in which it is compared over tp.
    grad_checks: dict[str, Callable[[torch.Tensor], None]] = field(default_factory=dict)
    fsdp: FsdpRecord = field(default_factory=FsdpRecord)
    ep: ExpertRecord = field(default_factory=ExpertRecord)
    amax: AmaxRecord = field(default_factory=AmaxRecord)

    @functools.cached_property
    def is_tp_sharded(self) -> bool:
        """Return whether several ranks of ``tp`` share the module. Cached, because the mesh never changes."""
        return self.tp_mesh is not None and self.tp_mesh.size() > 1

    @property
    def weight_group(self) -> str | None:
        """Return the process group name of ``weight_mesh``, cached because weights with one scale need it often."""
        mesh = self.weight_mesh
        if mesh is None:
            return None
        if self.amax.named is None or self.amax.named[0] is not mesh:
            self.amax.named = mesh, mesh.get_group().group_name
        return self.amax.named[1]

    def label(self, parameter: str) -> str:
        """Return the FQN of a direct parameter, for messages."""
        return f"{self.name}.{parameter}" if self.name else parameter

    def unsharded_mesh(self, name: str) -> DeviceMesh | None:
        """Return the mesh of a direct parameter without FSDP2's sharding; ``None`` for an ordinary tensor."""
        if name in self.distributed:
            return self.distributed[name].mesh
        grouped = name in self.rules and self.rules[name].layout.is_grouped
        return self.ep.experts_mesh if grouped and self.ep.experts_mesh is not None else self.tp_mesh

    def set_attributes(self, name: str, parameter: torch.Tensor) -> None:
        """Complete the attributes and the record of ``parameter``, which is about to be registered as ``name``.

        Local operation. Attributes that it already has are unchanged.
        """
        copy_param_attrs(self.attributes.get(name, {}), parameter)
        record, rule = get_or_create_record(parameter), self.rules.get(name)
        if rule is not None and rule.quantizable:
            record.label = self.label(name)
        if rule is not None and rule.shard_dim is None and self.tp_mesh is not None:
            record.tp_replica = True
        if self.ep.mesh is not None:
            record.ep_mesh = self.ep.mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleBinding:
        """Return a copy with the same meshes, because process groups cannot be copied."""
        attributes = {name: dict(values) for name, values in self.attributes.items()}
        copied = ModuleBinding(self.name, self.tp_mesh, self.weight_mesh, dict(self.rules), attributes)
        copied.experts, copied.distributed = self.experts, dict(self.distributed)
        copied.fsdp.is_managed, copied.amax.group = self.fsdp.is_managed, self.amax.group
        copied.ep = dataclasses.replace(self.ep, divided=False)
        return copied


def no_shard_mark(module: nn.Module) -> bool | frozenset[str]:
    """Return :attr:`ModuleRecord.no_shard` of a module. Local operation."""
    record: ModuleRecord | None = module.__dict__.get(MODULE)
    return frozenset() if record is None else record.no_shard


def binding_of(module: object) -> ModuleBinding | None:
    """Return the module's binding; ``None`` if ``set_device_mesh`` was never called for it."""
    return module.__dict__.get(BINDING)


def name_of(module: nn.Module) -> str:
    """Return a module's name for messages: its name in the tree if it is bound and has one, else its class."""
    binding = binding_of(module)
    return (binding.name if binding is not None else "") or type(module).__name__


def is_replicated(module: Any, name: str) -> bool:
    """Return whether a module's direct parameter is, or will be, replicated over data parallel. Local operation."""
    mark = no_shard_mark(module)
    if mark is True or (mark and name in mark):
        return True
    parameter = module._parameters.get(name)
    record = None if parameter is None else get_record(parameter)
    return record is not None and (record.no_shard or bool(record.plan and record.plan.storage.is_replicated))
