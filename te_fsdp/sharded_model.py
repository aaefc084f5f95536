"""``ShardedModel``: the training state of a model after ``fully_shard``.

:func:`get_sharded_model` returns it for the model, and :func:`sharded_model_of` for a parameter, because optimizer
hooks get only parameters.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import UnshardHandle
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp import records
from te_fsdp.check_points import NONE, CheckPoints
from te_fsdp.collectives.redistribute import GradComm
from te_fsdp.component import Components
from te_fsdp.errors import OrderError
from te_fsdp.layout import Storage, SyncMode
from te_fsdp.mesh import Meshes
from te_fsdp.precision import PrecisionPlan
from te_fsdp.records import ParameterPlan
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_state as _fsdp2,
    te as _te,
    torch_dtensor as _torch,
)


@dataclass
class ForwardRecord:
    """Modes and recipes of the last forwards on this rank (:mod:`te_fsdp.forward_hooks`)."""

    mode: tuple[bool, bool] | None = None  #: Training mode, and whether gradients are enabled
    modes: set[tuple[bool, bool]] = field(default_factory=set)  #: All modes so far
    #: Recipe, and dtype of ``torch.autocast``, of the last forward in training.
    under: tuple[Any, Any] | None = None
    #: FQN of each parameter, and where it is registered.
    places: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    trained: list[bool] | None = None  #: Their ``requires_grad`` in that forward
    units: dict[str, Any] = field(default_factory=dict)  #: Name of a unit -> its last recipe in training
    #: Units that the running forward has called; ``None`` outside of forwards of the model.
    running: list[str] | None = None
    #: Whether the running forward trains and records gradients, and the extent of the reductions of its backward
    order_mode: tuple[bool, bool, int] = (False, False, 0)
    #: ``order_mode`` -> units of the last forward whose order was compared over ranks
    orders: dict[tuple[bool, bool, int], list[str]] = field(default_factory=dict)
    #: Mode of synchronization -> extent of the reductions (:func:`te_fsdp.checks.forward.extent_of_reductions`);
    #: ``None``: after setters of FSDP2
    extents: dict[SyncMode | None, int] = field(default_factory=dict)
    over_ep: dict[str, bool] = field(
        default_factory=dict
    )  #: Name of a unit -> whether it has experts over ``ep``
    setter: str = ""  #: Setter of FSDP2 that the user has called since the last forward
    #: Manual calls of ``unshard`` and ``reshard`` since the last step: before its last forward, and since that forward.
    #: ``None`` before the first call
    calls: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    #: Settings of backwards, and manual calls before forwards, that were compared over ranks
    states: set[Any] = field(default_factory=set)
    reordered: DeviceMesh | None = None  #: Ranks that compare the order at the end of the running forward
    #: Old and new recipes that were compared over ranks in this forward.
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    #: Axis names of a mesh, and kind of comparison -> number of comparisons over its ranks.
    checks_done: Counter[tuple[tuple[str, ...] | None, str]] = field(default_factory=Counter)
    methods: int = 0  #: Number of registered methods of the model that are running


@dataclass
class GradientSync:
    """Role of the next backwards, and the state of the existing gradients."""

    mode: SyncMode = SyncMode.LAST  #: Role of the next backwards in their step
    comm: GradComm | None = None  #: How gradients are sent; ``None`` without a precision policy
    #: Whether the loop has marked the next backward as the last one of its step. Otherwise others may follow.
    last_microbatch: bool = False
    last_microbatches: int = 0  #: Number of microbatches so marked since the model was sharded
    unfinished: bool = False  #: Whether reductions may be in flight
    waiting: bool = False  #: Whether there may be unreduced gradients
    #: Whether a backward since, or an explicit reduction, has completed the gradients of earlier microbatches.
    completed: bool = False
    #: Whether a backward or a step has raised, so that gradients are invalid until cleared
    failed: bool = False
    #: Whether that backward has dropped gradients of earlier microbatches, which no ``.grad`` shows.
    dropped: bool = False


@dataclass
class UnshardedUnits:
    """The units that stay unsharded between forwards, by name."""

    gathers: dict[str, UnshardHandle] = field(default_factory=dict)  #: All-gathers that the user has started
    #: Versions of a unit's shards when it was all-gathered (:func:`versions_of`).
    versions: dict[str, dict[int, int]] = field(default_factory=dict)
    #: Versions of the shards of units whose sharded parameters are exposed (:mod:`te_fsdp.kept_weights`).
    exposed: dict[str, list[int]] = field(default_factory=dict)
    #: Versions and ``requires_grad`` of the unsharded parameters after the first forward of a step.
    kept: dict[str, tuple[list[int], list[bool]]] = field(default_factory=dict)
    #: Units whose unsharded parameters :func:`shard_of` recognizes.
    recorded: set[str] = field(default_factory=set)


@dataclass
class StepRecord:
    """The optimizer step that is running, or has raised."""

    optimizer: weakref.ref[Optimizer] | None = None
    #: Context of torch that is open while the optimizer updates DTensors and plain parameters together.
    mixing: ExitStack = field(default_factory=ExitStack)


@dataclass
class CheckRecord:
    """State of one-time checks."""

    on_meta: bool = True  #: Whether parameters may still be on meta
    released: bool = False  #: Whether ``to_empty`` may have left uninitialized memory
    inferred: bool = False  #: Whether the first forward ran under ``torch.inference_mode``
    assignments: int = 0  #: Last checked number of :data:`te_fsdp.upstream.torch_data.assignments`
    #: Optimizers that have begun a step, with their number of parameters and the ``id`` of their state then.
    optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    #: Owner's ``id`` and name of each parameter when it was sharded -> the owner's parameters, the name, the full name.
    places: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = field(default_factory=dict)
    #: Children and parameters of each module, and the modules and number of parameters, when they were last checked.
    tables: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    contents: list[Any] = field(default_factory=list)
    #: Hash of all pairs of ``max_norm`` and ``norm_type`` so far, and the last pair.
    clipping: tuple[int, float, float] = (0, 0.0, 0.0)


@dataclass(eq=False)
class ShardedModel:
    """Training state of a sharded model."""

    model: nn.Module
    meshes: Meshes
    #: Name -> storage of each unit; ``""`` is the root with the parameters outside of units.
    units: dict[str, Storage]
    outer: str = "no_shard"  #: Strategy over ``dp_replicate``: ``"no_shard"`` or ``"optim"``
    precision: PrecisionPlan | None = None  #: Dtypes of each unit; ``None`` without a policy
    average_gradients: bool = True  #: Whether gradients are means over data-parallel ranks, or sums
    checks: CheckPoints = NONE  #: Checks of the requested level, by point
    #: FQN -> decisions of ``fully_shard`` about a parameter.
    plans: dict[str, ParameterPlan] = field(default_factory=dict)
    #: Name -> module of the units that FSDP2 manages, inner before outer.
    modules: dict[str, nn.Module] = field(default_factory=dict)
    components: Components = field(default_factory=Components)
    sync: GradientSync = field(default_factory=GradientSync)
    unsharded: UnshardedUnits = field(default_factory=UnshardedUnits)
    step: StepRecord = field(default_factory=StepRecord)
    #: How the last forwards were computed, which must be the same on all ranks.
    computed: ForwardRecord = field(default_factory=ForwardRecord)
    checked: CheckRecord = field(default_factory=CheckRecord)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Map names to the optimizer's parameters: sharded ones, also while the model has unsharded ones."""
        return {name: shard_of(parameter) for name, parameter in self.model.named_parameters()}

    def names(self) -> dict[int, str]:
        """Map the ``id`` of each parameter in :meth:`parameters` to its name."""
        return {id(parameter): name for name, parameter in self.parameters().items()}

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter belongs to experts, which differ between ranks of ``ep``."""
        plan = self.plans.get(name)
        return plan is not None and plan.experts

    def pending(self) -> dict[int, str]:
        """Map the ``id`` of each parameter with an unreduced gradient to its name. Local operation."""
        # Gradients that the user has cleared since the backward are not waiting for a reduction any more.
        for drop in self.components.drop_cleared:
            drop()
        records = [
            record
            for unit in self.modules.values()
            for record in _fsdp2_gradients.params_with_unreduced_gradients(unit)
        ]
        waiting = set[str]()
        for unreduced in self.components.unreduced:
            waiting.update(unreduced())
        if not records and not waiting:
            return {}
        for _, unit in self.gathered():
            # An unsharded unit has its unsharded parameters registered, but the names are those of its shards.
            record_unsharded_params(unit)
        names = self.names()
        managed = {(key := id(_fsdp2.sharded_param_of(record))): names[key] for record in records}
        return managed | {key: name for key, name in names.items() if name in waiting}

    def roots(self) -> list[nn.Module]:
        """Return FSDP2's root units: one after the first forward, or several if the model itself is not a unit."""
        return _fsdp2.roots_among(self.modules.values())

    def gathered(self) -> list[tuple[str, nn.Module]]:
        """Return the units that are unsharded at present."""
        return [(name, unit) for name, unit in self.modules.items() if _fsdp2.is_unit_unsharded(unit)]


def get_sharded_model(model: nn.Module) -> ShardedModel | None:
    """Return the state of a model after ``fully_shard``, also for ``torch.compile`` of it; ``None`` for others."""
    if type(model).__name__ == "OptimizedModule":
        model = model._modules["_orig_mod"]  # type: ignore[bad-assignment]
    # Callers report an argument that is not a module, which may have no attributes.
    record: records.ModuleRecord | None = getattr(model, "__dict__", {}).get(records.MODULE)
    return None if record is None else record.sharded


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the model's mesh: of ``fully_shard``, or else of a parameter; ``None`` if there is only this rank."""
    state = get_sharded_model(model)
    if state is not None:
        return state.meshes.device_mesh
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def sharded_model_of(parameter: torch.Tensor) -> ShardedModel | None:
    """Return the state of the sharded model of a parameter; ``None`` for parameters of other models."""
    record = parameter.__dict__.get(records.PARAMETER)
    return record.state() if record and record.state is not None else None


def require_sharded_model(model: nn.Module, where: str) -> ShardedModel:
    """Return the state of a model; raise OrderError if it has none."""
    state = get_sharded_model(model)
    if state is None:
        raise OrderError(
            f"{where}({type(model).__name__})",
            expected="the model that te_fsdp.fully_shard was called on",
            got="a different module" if isinstance(model, torch.nn.Module) else "not a module",
            fix="pass the root; for a model that torch's own fully_shard has sharded, use FSDP2's setters",
        )
    return state


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sharded parameter of an unsharded one that :func:`record_unsharded_params` has recorded.

    Other parameters are returned unchanged. Local operation.
    """
    record = parameter.__dict__.get(records.PARAMETER)
    fsdp_param = record.fsdp_param() if record and record.fsdp_param is not None else None
    return parameter if fsdp_param is None else _fsdp2.sharded_param_of(fsdp_param)


def record_unsharded_params(unit: nn.Module) -> None:
    """Record the sharded parameters of a unit's unsharded ones, for :func:`shard_of`. Local operation."""
    for parameter, fsdp_param in _fsdp2.unsharded_parameters(unit):
        records.get_or_create_record(parameter).fsdp_param = weakref.ref(fsdp_param)


def versions_of(unit: nn.Module) -> dict[int, int]:
    """Map the ``id`` of each shard to its version, except quantized shards, to which kernels write directly."""
    shards = ((parameter, _torch.local_of(parameter)) for parameter in _fsdp2.sharded_parameters(unit))
    return {id(p): _torch.version_of(p) for p, local in shards if not _te.is_quantized(local)}


def refuse_in_backward(where: str) -> None:
    """Raise OrderError if autograd is running a backward."""
    if _torch.in_backward():
        raise OrderError(
            f"{where} from inside of backward",
            expected="a call outside of backward",
            got="a call by a hook or a recomputed forward",
            fix="call it before or after backward",
        )


def attach_state_to_params(state: ShardedModel, *, moved: bool = False) -> None:
    """Set the record of each parameter: ``state`` and its plan; ``moved``: after a conversion. Local operation."""
    reference = weakref.ref(state)
    state.computed.places.clear()
    for name, parameter in state.parameters().items():
        record = records.get_or_create_record(parameter)
        # A parameter that was renamed, as by torch.compile, already has its plan.
        record.state, record.plan = reference, state.plans.get(name, record.plan)
        # A successor has its predecessor's record.
        is_new = moved or not record.memory or record.memory[0] != id(parameter)
        if is_new and isinstance(parameter, DTensor):
            record.memory = id(parameter), _torch.memory_id(parameter)
