"""What te_fsdp notes: a record on each parameter, one on each bound module, and where a parameter's shard lies.

Binding, sharding, initialising, casting and loading make new objects for a parameter. What hangs on the old one goes to
the new one, its successor (:func:`copy_param_attrs`):

    ``_te_fsdp``          te_fsdp's own record, :class:`ParameterRecord`; each object that takes another's place
    has its own
    other attributes      the user's and TE's marks; those that the successor has already stay as they are

A shard and the gathered parameter that FSDP2 installs in turn share one record. Optimizers, and torch's hooks around
their steps, see parameters alone: what they have to know of the model is found here.

``set_device_mesh`` leaves a :class:`ModuleBinding` on each module: its meshes, its rules and its parameters'
attributes.
Where a parameter lies follows from both (:func:`shard_info`).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.boxed_dtensor import coordinates_of
from te_fsdp.check_points import CheckPoints, check_points
from te_fsdp.errors import PlacementError
from te_fsdp.layout import Box, Coordinates, ParameterRule, chunk_boxes, shard_boxes
from te_fsdp.upstream import te as _te, torch_autograd as _torch_autograd, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from te_fsdp.layout import ExpertRange, Storage
    from te_fsdp.upstream.torch_dtensor import DTensorSpec

#: The attribute.
KEY = "_te_fsdp"
#: Cause in :attr:`ParameterRecord.replaced_by` of a copy.
COPIED = "copy.deepcopy"


@dataclass(frozen=True)
class ParameterPlan:
    """What ``fully_shard`` settles for one place where a parameter is registered, before anything changes."""

    label: str  #: Full name, once its module is bound: experts then count globally, and may be one parameter
    name: str  #: Its last part
    unit: str  #: Name of the innermost unit around it
    storage: Storage  #: Where it rests, and what belongs to it
    #: Full names of all places of this very parameter, that of the first in front: several if it is tied.
    owners: tuple[str, ...]
    rule: ParameterRule | None = None  #: How tp cuts it; ``None`` if it does not
    experts: bool = False  #: Whether it is dealt out over ``ep``
    #: The dim that FSDP2 is told to cut, of weights that are quantized or hold all experts.
    cut_dim: int | None = None
    gradient_dtype: torch.dtype | None = None  #: Dtype of its gradient, if that is to be another than its own


@dataclass(eq=False)
class ParameterRecord:
    """What te_fsdp knows of a parameter. Copies of the parameter leave references to living objects behind."""

    label: str | None = None  #: Full name of a bound parameter that may be quantized
    tp_replica: bool = False  #: Whether every tensor-parallel rank holds it whole, and must hold the same
    no_shard: bool = False  #: Whether ``fsdp_no_shard`` was called for it
    plan: ParameterPlan | None = None  #: What ``fully_shard`` has settled about it
    #: Of an expert's parameter: the expert-parallel mesh, whose ranks hold other experts.
    ep_mesh: DeviceMesh | None = None
    state: weakref.ref[Any] | None = None  #: The ``ShardedModel`` of its model
    #: FSDP2's record of it, which knows its shard; of parameters that stay gathered.
    record: weakref.ref[Any] | None = None
    #: Those of the optimizer that keeps its state in parts (``main_parameters.MainParameters``).
    main_parameters: weakref.ref[Any] | None = None
    #: Name and cause, once a module has lost this very object (:mod:`te_fsdp.lifecycle`), or never had it: a copy
    #: that nothing has given to a module as a successor.
    replaced_by: tuple[str, str] | None = None
    copied_from: weakref.ref[ParameterRecord] | None = None  #: Of such a copy: the record of what was copied
    #: Number of steps in which a check still compares its gradient over tp; -1 for all.
    grad_checks_left: int = 0
    #: Of a sharded parameter its ``id`` and :func:`te_fsdp.upstream.torch_dtensor.memory_of` it, to see that its
    #: ``.data`` was
    #: assigned.
    memory: tuple[int, int] | None = None
    writes: int = 0  #: In-place writes to it on meta (:mod:`te_fsdp.inline_init`)
    rewrites: tuple[int, ...] = ()  #: Those that ``materialize`` has repeated, by owner

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterRecord:
        """Meshes are shared by the copy: process groups cannot be copied."""
        return dataclasses.replace(
            self,
            plan=None,
            state=None,
            record=None,
            main_parameters=None,
            replaced_by=("", COPIED),
            copied_from=weakref.ref(self),
        )

    def __reduce__(self) -> Any:
        """Pickles leave it behind. An empty dict takes its place, which ``torch.load(weights_only=True)`` can read."""
        return OrderedDict, ()


def get_record(parameter: torch.Tensor) -> ParameterRecord | None:
    """A parameter's record; ``None`` if te_fsdp knows nothing of it. Local operation."""
    return parameter.__dict__.get(KEY) or None


def get_or_create_record(parameter: torch.Tensor) -> ParameterRecord:
    """A parameter's record, made if there is none, to be written to. Local operation."""
    facts = parameter.__dict__.get(KEY)
    if not facts:
        facts = parameter.__dict__[KEY] = ParameterRecord()
    return facts


def plan_of(parameter: torch.Tensor) -> ParameterPlan | None:
    """What ``fully_shard`` has settled about a parameter; ``None`` for any other. Local operation."""
    facts = parameter.__dict__.get(KEY)
    return facts.plan if facts else None


def checks_of(parameter: torch.Tensor) -> CheckPoints:
    """Return the checks of the sharded model of a parameter, or those of the default level. Local operation."""
    record = get_record(parameter)
    state = record.state() if record is not None and record.state is not None else None
    return check_points() if state is None else state.checks


def label_of(parameter: torch.Tensor, kind: str = "a parameter") -> str:
    """Name of a parameter for messages: its label, else its shape. Local operation."""
    facts = get_record(parameter)
    return (facts.label if facts is not None else None) or f"{kind} of shape {tuple(parameter.shape)}"


def share_record(parameter: torch.Tensor, gathered: torch.Tensor) -> None:
    """Let a gathered parameter have its shard's record, and the attributes that it lacks. Local operation."""
    if KEY in parameter.__dict__:
        gathered.__dict__[KEY] = parameter.__dict__[KEY]
    copy_param_attrs(parameter, gathered)


def param_attrs_to_copy(parameter: torch.Tensor) -> dict[str, Any]:
    """What hangs on a parameter and its successors shall have, not what a tensor subclass keeps there for itself."""
    own: Collection[str] = _torch.OWN_ATTRIBUTES
    if not isinstance(parameter, DTensor) and type(parameter) is not torch.nn.Parameter:
        own = {*parameter.detach().__dict__, *_te.DATA_ATTRIBUTES}  # of quantized and of grouped tensors
    return {key: value for key, value in parameter.__dict__.items() if key not in own}


def copy_param_attrs(
    old: torch.Tensor | dict[str, Any], new: torch.Tensor, *, leave_out: Collection[str] = ()
) -> None:
    """Give a parameter's successor what hangs on the parameter, unless the successor has it. Local operation.

    ``old`` is the parameter, or the :func:`param_attrs_to_copy` it before it was changed.
    """
    have = new.__dict__
    for key, value in (old if isinstance(old, dict) else param_attrs_to_copy(old)).items():
        if key not in have and key not in leave_out:
            # Another model may go on with the old object, or an optimizer that knows of no change.
            have[key] = (
                dataclasses.replace(value, replaced_by=None) if isinstance(value, ParameterRecord) else value
            )


def inherit(old: torch.Tensor, new: torch.Tensor, *, leave_out: Collection[str] = ()) -> None:
    """Give a parameter's replacement everything that the parameter carries besides its values. Local operation.

    That is ``requires_grad``, Python attributes, gradient hooks and ``grad_dtype``. TE's own ``reset_parameters`` makes
    parameters that have none of these.
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
    """A parameter like the given one around another local tensor, with all that hangs on it. Local operation.

    This very object, of the shape of the parameter's local tensor and of any dtype, is the new one's local tensor.
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
    """Where a parameter is registered."""

    label: str  #: Full name, from the root
    owner: nn.Module  #: Module that has it
    name: str  #: Name there
    parameter: nn.Parameter  #: The parameter

    @property
    def path(self) -> str:
        """Full name of the owner."""
        return self.label.removesuffix(self.name).removesuffix(".")


def iter_param_owners(
    model: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[ParamOwner]:
    """Every place of a tree where a parameter is registered: tied parameters come once for each. Local operation.

    Owners' parameters may be replaced meanwhile. Without ``remove_duplicate`` modules come as often as they are there.
    """
    for path, owner in model.named_modules(prefix=prefix, remove_duplicate=remove_duplicate):
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                yield ParamOwner(f"{path}.{name}" if path else name, owner, name, parameter)


def require_model(given: object, where: str) -> None:
    """Raise ``PlacementError`` unless a call's argument is a module; it has changed places with another, most often."""
    if not isinstance(given, torch.nn.Module):
        raise PlacementError(
            f"{where}: model",
            expected="a torch.nn.Module",
            got=f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__,
            fix="the model itself, as one module, in this place",
        )


def require_optimizer(given: object, where: str) -> None:
    """As :func:`require_model`, for an optimizer of ``torch.optim``'s protocol."""
    if not isinstance(getattr(given, "param_groups", None), list):
        raise PlacementError(
            f"{where}: optimizer",
            expected="a torch.optim.Optimizer",
            got=type(given).__name__,
            fix="the optimizer itself in this place: no list of them, no state dict, no scheduler",
        )


#: Key in the module's ``__dict__``.
BINDING = "_te_fsdp_binding"
#: Key in a module's ``__dict__`` by ``fsdp_no_shard``: ``True`` for all parameters in it and below it, or a frozenset
#: of names of own ones.
NO_SHARD = "_te_fsdp_no_shard"


@dataclass(frozen=True)
class OwnDTensor:
    """Placement of a parameter that the user registered as a DTensor, before FSDP2 shards it."""

    mesh: DeviceMesh  #: ``ep``, ``tp`` or (``ep``, ``tp``), always with ``tp`` if that has several ranks
    placements: tuple[Placement, ...]  #: One for each axis of the mesh
    is_expert: bool  #: Whether ``ep`` shards it
    tp_dim: int | None  #: Tensor dim that ``tp`` shards


@dataclass
class ShardedUnshardedPair:
    """The two forms of a parameter that FSDP2 installs in turn.

    No weak references: torch swaps no tensor that has some.
    """

    shard: DTensor | None = None  #: The sharded one
    gathered: torch.Tensor | None = None  #: The gathered one, or whatever else was assigned
    #: Frees what the gathered one holds besides what FSDP2 frees (:mod:`te_fsdp.quantized.fsdp_hooks`); ``None``
    #: for nothing.
    release: Callable[[], None] | None = None
    #: Whether the shard is shown while the gathered one is kept (:mod:`te_fsdp.sharded_model`).
    is_aside: bool = False


@dataclass
class FsdpRecord:
    """What FSDP2 has done with the parameters of a bound module, by their names."""

    is_managed: bool = False  #: Whether FSDP2 manages parameters of the module
    needs_requantize: bool = False  #: Whether high-precision values of quantized weights are being sharded
    #: Local shards of delayed-scaling weights since the last all-gather.
    shards: dict[str, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    sharded: set[str] = field(default_factory=set)  #: Parameters that FSDP2 has replaced by shards
    pairs: dict[str, ShardedUnshardedPair] = field(default_factory=dict)  #: Forms that FSDP2 has installed
    #: Spec of an unsharded parameter whose gradient is partial over tp, and the spec with that placement.
    partial_specs: dict[str, tuple[DTensorSpec, DTensorSpec]] = field(default_factory=dict)
    recomputed: bool = (
        False  #: Whether a forward of the module has run within a backward, which needs both forms
    )


@dataclass
class ExpertRecord:
    """Expert parallelism of a bound module. Modules without experts have the defaults."""

    mesh: DeviceMesh | None = None  #: 1-D expert-parallel mesh
    #: Mesh of an unsharded parameter of all experts: ``ep``, or (``ep``, ``tp``).
    experts_mesh: DeviceMesh | None = None
    #: Whether FSDP2 shards the quantized weight of all experts along rows or columns, not between experts.
    is_cut_within: bool = False
    divided: bool = False  #: Whether FSDP2 divides the gradients of experts by the right number of ranks


@dataclass
class AmaxRecord:
    """The ranks over which amax of a bound module's weights is reduced."""

    #: Group of delayed scaling if only some ranks have the module (experts, a pipeline stage). ``None``: that of
    #: ``te.autocast``.
    group: ProcessGroup | None = None
    agreed: bool = (
        False  #: Whether the ranks have agreed that the weight mesh has the ranks that shard the weights
    )
    named: tuple[DeviceMesh, str] | None = None  #: Weight mesh and the name of its process group


@dataclass
class ModuleBinding:
    """The meshes and rules of a module that ``set_device_mesh`` was called on."""

    name: str  #: Name of the module in the tree that ``set_device_mesh`` was called on, for messages
    tp_mesh: DeviceMesh | None  #: 1-D tensor-parallel mesh, or ``None``
    weight_mesh: DeviceMesh | None  #: 1-D mesh of the ranks that have shards of one weight, or ``None``
    rules: dict[str, ParameterRule]  #: Rule of each own parameter
    #: Python attributes of each own parameter (TE's marks and the user's), copied to each object that replaces it.
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Experts of the module, whose parameters are registered under their global indices.
    experts: ExpertRange | None = None
    #: Own parameters that the user registered as DTensors, by name. They stay DTensors in forward.
    distributed: dict[str, OwnDTensor] = field(default_factory=dict)
    on_meta: bool = True  #: Whether parameters may still be on meta
    #: Checks of partial gradients by parameter, for the backwards in which they are compared over tp.
    grad_checks: dict[str, Callable[[torch.Tensor], None]] = field(default_factory=dict)
    fsdp: FsdpRecord = field(default_factory=FsdpRecord)
    ep: ExpertRecord = field(default_factory=ExpertRecord)
    amax: AmaxRecord = field(default_factory=AmaxRecord)

    @property
    def weight_group(self) -> str | None:
        """Return the name of the process group of ``weight_mesh``, cached for each all-gather of a weight."""
        mesh = self.weight_mesh
        if mesh is None:
            return None
        if self.amax.named is None or self.amax.named[0] is not mesh:
            self.amax.named = mesh, mesh.get_group().group_name
        return self.amax.named[1]

    def label(self, parameter: str) -> str:
        """Full name of an own parameter, for messages."""
        return f"{self.name}.{parameter}" if self.name else parameter

    def whole_mesh(self, name: str) -> DeviceMesh | None:
        """Mesh that an own parameter lies on when FSDP2 does not shard it; ``None`` for an ordinary tensor."""
        if name in self.distributed:
            return self.distributed[name].mesh
        grouped = name in self.rules and self.rules[name].layout.is_grouped
        return self.ep.experts_mesh if grouped and self.ep.experts_mesh is not None else self.tp_mesh

    def carry(self, name: str, parameter: torch.Tensor) -> None:
        """Give ``parameter`` what is known for ``name``, and the attributes that it lacks."""
        copy_param_attrs(self.attributes.get(name, {}), parameter)
        facts, rule = get_or_create_record(parameter), self.rules.get(name)
        if rule is not None and rule.quantizable:
            facts.label = self.label(name)
        if rule is not None and rule.shard_dim is None and self.tp_mesh is not None:
            facts.tp_replica = True
        if self.ep.mesh is not None:
            facts.ep_mesh = self.ep.mesh

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleBinding:
        """Meshes are shared by the copy: process groups cannot be copied."""
        attributes = {name: dict(values) for name, values in self.attributes.items()}
        copied = ModuleBinding(self.name, self.tp_mesh, self.weight_mesh, dict(self.rules), attributes)
        copied.experts, copied.distributed = self.experts, dict(self.distributed)
        copied.fsdp.is_managed, copied.amax.group = self.fsdp.is_managed, self.amax.group
        copied.ep = dataclasses.replace(self.ep, divided=False)
        return copied


def binding_of(module: object) -> ModuleBinding | None:
    """The module's binding, ``None`` where ``set_device_mesh`` was never called."""
    return module.__dict__.get(BINDING)


def name_of(module: nn.Module) -> str:
    """A module for messages: its name in the tree if it is bound and has one, else its class."""
    binding = binding_of(module)
    return (binding.name if binding is not None else "") or type(module).__name__


def is_replicated(module: Any, name: str) -> bool:
    """Whether a module's own parameter is, or shall be, kept whole on all data-parallel ranks. Local operation."""
    mark = module.__dict__.get(NO_SHARD, ())
    if mark is True or name in mark:
        return True
    parameter = module._parameters.get(name)
    facts = None if parameter is None else get_record(parameter)
    return facts is not None and (facts.no_shard or bool(facts.plan and facts.plan.storage.is_whole))


_REPLICATED = ParameterRule(None)


@dataclass(frozen=True)
class ShardInfo:
    """One rank's share of one parameter."""

    rule: ParameterRule  #: The parameter's rule; replicated for modules that were never bound
    at: Coordinates  #: This rank's coordinates
    original_shape: tuple[int, ...]  #: Shape of the original (unsharded, tp size 1) tensor
    local_shape: tuple[int, ...]  #: Shape of the local tensor
    boxes: tuple[Box, ...]  #: Rectangles of the original that make up the local tensor


def shard_info(module: nn.Module, name: str, parameter: torch.Tensor, *, label: str = "") -> ShardInfo:
    """Describe ``module._parameters[name]``: plain, tp DTensor, or FSDP2's sharded DTensor, called ``label`` in errors.

    Local operation, reads no data (meta tensors are fine). Raises ``PlacementError`` where the local tensor has not the
    shape that rule and mesh give it.
    """
    label = label or name
    binding = binding_of(module)
    rule = binding.rules.get(name, _REPLICATED) if binding is not None else _REPLICATED
    has_tp = binding is not None and binding.tp_mesh is not None
    has_ep = binding is not None and binding.ep.experts_mesh is not None and rule.layout.is_grouped
    original = tuple(parameter.shape)
    if binding is not None and name in binding.distributed and isinstance(parameter, DTensor):
        at, cuts = _cuts_of(binding.distributed[name], parameter)
        local_shape, boxes = chunk_boxes(original, cuts)
    else:
        at = (
            coordinates_of(parameter, has_tp, has_ep, label)
            if isinstance(parameter, DTensor)
            else Coordinates()
        )
        local_shape, boxes = shard_boxes(original, rule, at, name=label)
    have = tuple(_torch.local_of(parameter).shape)
    if have != local_shape:
        raise PlacementError(
            f"{label}: local shape",
            expected=f"{local_shape} of {original} at {at}",
            got=have,
            fix="do not replace local tensors by hand; bind and shard the model again",
        )
    return ShardInfo(rule, at, original, local_shape, tuple(boxes))


def _cuts_of(own: OwnDTensor, parameter: DTensor) -> tuple[Coordinates, list[tuple[int, int, int]]]:
    """Return this rank's coordinates and the cuts of a user's DTensor: by the user's axes first, then by FSDP2's."""
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate() or ()
    first = mesh.ndim - own.mesh.ndim
    found: dict[int, tuple[int, int, int]] = {}
    for axis in (*range(first, mesh.ndim), *range(first)):
        dim = _torch.shard_dim_of(parameter.placements[axis])
        if dim is not None:
            found[axis] = dim, mesh.size(axis), coordinate[axis]
    fsdp = next((cut for axis, cut in found.items() if axis < first), (0, 1, 0))
    tp = found.get(mesh.ndim - 1, (0, 1, 0)) if own.tp_dim is not None else (0, 1, 0)
    ep = found.get(first, (0, 1, 0)) if own.is_expert else (0, 1, 0)
    return Coordinates(tp[1], tp[2], fsdp[1], fsdp[2], fsdp[0], ep[1], ep[2]), list(found.values())
