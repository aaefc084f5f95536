"""``ShardedModel``: the training state of a model after ``fully_shard``.

:func:`get_sharded_model` returns it for the model, and :func:`sharded_model_of` for a parameter, because optimizer
hooks get only parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from te_fsdp import records
from te_fsdp.check_points import NONE, CheckPoints
from te_fsdp.component import Components
from te_fsdp.errors import OrderError, PlacementError, shorten
from te_fsdp.layout import SyncMode
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS
from te_fsdp.upstream import (
    fsdp2_gradients as _fsdp2_gradients,
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te as _te,
    torch_autograd as _torch_autograd,
    torch_dtensor as _torch,
)

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import UnshardHandle
    from torch.optim import Optimizer

    from te_fsdp.collectives.redistribute import GradComm
    from te_fsdp.layout import Storage
    from te_fsdp.mesh import Meshes
    from te_fsdp.precision import PrecisionPlan
    from te_fsdp.records import ParameterPlan

_log = logging.getLogger("te_fsdp")


@dataclass
class ForwardRecord:
    """How the last forwards on this rank were computed (:mod:`te_fsdp.forward_hooks`)."""

    mode: tuple[bool, bool] | None = None  #: Training mode, and whether gradients are enabled
    modes: set[tuple[bool, bool]] = field(default_factory=set)  #: All modes so far
    #: Recipe, and dtype of ``torch.autocast``, of the last forward in training.
    under: tuple[Any, Any] | None = None
    #: FQN of each parameter, and where it is registered.
    places: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)
    trained: list[bool] | None = None  #: Their ``requires_grad`` in that forward
    units: dict[str, Any] = field(default_factory=dict)  #: Name of a unit -> its last recipe in training
    #: Old and new recipes that were compared over ranks in this forward.
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    #: Names of a mesh's axes -> number of comparisons over its ranks.
    checks_done: Counter[tuple[str, ...] | None] = field(default_factory=Counter)
    methods: int = 0  #: Number of running methods of the model that all-gather as forward does


@dataclass
class GradientSync:
    """How the next backwards reduce gradients, and the state of the gradients of the last ones."""

    mode: SyncMode = SyncMode.LAST  #: How the next backwards count
    comm: GradComm | None = None  #: How gradients are sent; ``None`` without a precision policy
    #: Whether the loop has marked the next backward as the last one of its step. Otherwise others may follow.
    last_microbatch: bool = False
    last_microbatches: int = 0  #: Number of microbatches that were marked so
    unfinished: bool = False  #: Whether reductions may be in flight
    waiting: bool = False  #: Whether there may be unreduced gradients
    failed: bool = (
        False  #: Whether a backward or a step has raised, so that gradients are invalid until cleared
    )
    #: Whether that backward has dropped gradients of earlier microbatches, which no ``.grad`` shows.
    dropped: bool = False


@dataclass
class UnshardedUnits:
    """The units that stay unsharded between forwards, by name."""

    gathers: dict[str, UnshardHandle] = field(default_factory=dict)  #: All-gathers that the user has started
    #: Versions of a unit's shards when it was all-gathered (:func:`versions_of`).
    versions: dict[str, dict[int, int]] = field(default_factory=dict)
    #: Versions of the shards of units whose sharded parameters are exposed.
    aside: dict[str, list[int]] = field(default_factory=dict)
    known: set[str] = field(
        default_factory=set
    )  #: Units whose unsharded parameters :func:`shard_of` recognizes


@dataclass
class StepRecord:
    """The optimizer step that is running, or has raised."""

    optimizer: weakref.ref[Optimizer] | None = None
    #: Open while the optimizer works on DTensors and plain parameters together.
    mixing: ExitStack = field(default_factory=ExitStack)


@dataclass
class CheckRecord:
    """State of one-time checks."""

    on_meta: bool = True  #: Whether parameters may still be on meta
    released: bool = False  #: Whether ``to_empty`` may have left uninitialized memory
    inferred: bool = False  #: Whether the first forward ran under ``torch.inference_mode``
    #: Optimizers that have begun a step, with their number of parameters and the ``id`` of their state then.
    optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    #: Owner's ``id`` and name of each parameter when it was sharded -> the owner's parameters, the name, the full name.
    places: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = field(default_factory=dict)


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
        """Map the ``id`` of each of these parameters to its name."""
        return {id(parameter): name for name, parameter in self.parameters().items()}

    def is_expert(self, name: str) -> bool:
        """Return whether a parameter belongs to experts, of which each rank of ``ep`` has different ones."""
        plan = self.plans.get(name)
        return plan is not None and plan.experts

    def pending(self) -> dict[int, str]:
        """Map the ``id`` of each parameter with an unreduced gradient to its name. Local operation."""
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
            record_unsharded_params(unit)
        names = self.names()
        found = {(key := id(_fsdp2.sharded_param_of(record))): names[key] for record in records}
        return found | {key: name for key, name in names.items() if name in waiting}

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
    record: records.ModuleRecord | None = model.__dict__.get(records.MODULE)
    return None if record is None else record.sharded


def mesh_of(model: nn.Module) -> DeviceMesh | None:
    """Return the model's mesh: of ``fully_shard``, or else of a parameter; ``None`` if there is only this rank."""
    state = get_sharded_model(model)
    if state is not None:
        return state.meshes.device_mesh
    return next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)


def sharded_model_of(parameter: torch.Tensor) -> ShardedModel | None:
    """Return the state of a parameter's model; ``None`` if it has none."""
    facts = parameter.__dict__.get(records.KEY)
    return facts.state() if facts and facts.state is not None else None


def require_sharded_model(model: nn.Module, where: str) -> ShardedModel:
    """Return the state of a model; raise OrderError if it has none."""
    state = get_sharded_model(model)
    if state is None:
        raise OrderError(
            f"{where}({type(model).__name__})",
            expected="the model that te_fsdp.fully_shard was called on",
            got="another module",
            fix="pass the root; for a model that torch's own fully_shard has sharded, use FSDP2's setters",
        )
    return state


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sharded parameter of an unsharded one known from :func:`record_unsharded_params`.

    Other parameters are returned unchanged.
    """
    facts = parameter.__dict__.get(records.KEY)
    record = facts.record() if facts and facts.record is not None else None
    return parameter if record is None else _fsdp2.sharded_param_of(record)


def record_unsharded_params(unit: nn.Module) -> None:
    """Let :func:`shard_of` find the sharded parameters of a unit's unsharded ones. Local operation."""
    for parameter, record in _fsdp2.unsharded_parameters(unit):
        records.get_or_create_record(parameter).record = weakref.ref(record)


def versions_of(unit: nn.Module) -> dict[int, int]:
    """Map the ``id`` of each shard to its version, except quantized shards, to which kernels write directly."""
    shards = ((parameter, _torch.local_of(parameter)) for parameter in _fsdp2.sharded_parameters(unit))
    return {id(p): _torch.version_of(p) for p, local in shards if not _te.is_quantized(local)}


def recover_from_exception(state: ShardedModel) -> None:
    """Restore a consistent state after an exception in a forward, a backward or a step.

    Local operation. It is collective over data parallel after a backward in which reductions of ``no_shard`` units may
    have started: ranks that have started different ones complete all of them.

    After a forward nothing is lost, and the microbatch can be repeated. After a backward, some units have added the
    microbatch's gradients and others have not. So the gradients are invalid, and unreduced gradients are dropped.
    """
    optimizer = state.step.optimizer() if state.step.optimizer is not None else None
    for prepare in state.components.before_recovery:
        prepare()
    undo_step(state)
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None and (main_parameters.pairs or main_parameters.locals):
        # ``zero_grad`` of the optimizer has not cleared the gradients of the parameters that they replaced.
        main_parameters.remove_main_params(optimizer)
        state.sync.failed = any(p.grad is not None for p in state.parameters().values())
    lost = False
    for root in state.roots():
        phase = _fsdp2.interrupted_phase(root)
        lost |= phase == "backward"
        if phase:
            _log.warning(
                "a %s was interrupted by an exception: FSDP2 is made ready for the next forward", phase
            )
            _fsdp2.reset_iteration(root)
            state.unsharded.gathers.clear()
    for recover in state.components.recover:
        lost |= recover()
    if lost:
        # Without microbatches they belong to the failed backward, so that any clearing of gradients clears all.
        waiting = state.sync.waiting and bool(state.pending())
        for unit in state.modules.values():
            _fsdp2_gradients.drop_unreduced_gradients(unit)
        state.sync.dropped = state.sync.dropped or waiting
        state.sync.failed = waiting or any(p.grad is not None for p in state.parameters().values())


def undo_step(state: ShardedModel) -> None:
    """Undo the changes to a model for a step that has ended or failed. Local operation."""
    state.step.optimizer = None
    state.step.mixing.close()
    for undo in state.components.undo_step:
        undo()


def refuse_in_backward(where: str) -> None:
    """Raise OrderError if autograd is running a backward."""
    if _torch.in_backward():
        raise OrderError(
            f"{where} from inside of backward", fix="call it before or after backward, or in a context"
        )


def attach_state_to_params(state: ShardedModel, *, moved: bool = False) -> None:
    """Set the record of each parameter: ``state`` and its plan; ``moved``: after a conversion. Local operation."""
    reference = weakref.ref(state)
    state.computed.places.clear()
    for name, parameter in state.parameters().items():
        facts = records.get_or_create_record(parameter)
        # A parameter that was renamed, as by torch.compile, already has its plan.
        facts.state, facts.plan = reference, state.plans.get(name, facts.plan)
        # A successor has its predecessor's record.
        if isinstance(parameter, DTensor) and (moved or not facts.memory or facts.memory[0] != id(parameter)):
            facts.memory = id(parameter), _torch.memory_id(parameter)


@torch.no_grad()
def leave_unset(state: ShardedModel) -> None:
    """Fill the memory after ``to_empty`` with NaN, which the first forward detects and any loss shows."""
    for tensor in [*state.model.parameters(), *state.model.buffers()]:
        local = _torch.local_of(tensor)
        if not local.is_meta and local.is_floating_point() and not _te.is_quantized(local):
            local.fill_(float("nan"))
    state.checked.released = state.checked.on_meta = True


def is_assigned(parameter: torch.Tensor) -> bool:
    """Return whether ``.data`` of a sharded parameter was assigned since its record was set. Local operation."""
    if not isinstance(parameter, DTensor):
        return False
    facts = records.get_record(parameter)
    known = facts.memory if facts is not None else None
    return known is not None and known[0] == id(parameter) and known[1] != _torch.memory_id(parameter)


def refuse_assigned(state: ShardedModel) -> None:
    """Raise OrderError if ``.data`` of a sharded parameter was assigned. Local operation."""
    found = [name for name, parameter in state.parameters().items() if is_assigned(parameter)]
    if found:
        raise OrderError(
            f"{shorten(found, 3)}: parameter.data was assigned",
            expected="values that are written in place",
            got=f"an assignment to .data of {len(found)} parameter(s), as of torch.nn.utils.vector_to_parameters",
            why="torch leaves the values of a DTensor as they are then, and says nothing",
            fix="with torch.no_grad(): parameter.copy_(value)",
        )


def check_order(model: nn.Module) -> None:
    """Raise OrderError if FSDP2 or ``fully_shard`` was applied to a part of a model, or to one that contains it.

    Local.
    """
    for name, module in model.named_modules():
        if isinstance(module, (DataParallel, DistributedDataParallel, FullyShardedDataParallel)):
            raise OrderError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="the model that it was made of",
                got="a wrapper that reduces gradients, or cuts parameters, itself",
                fix="te_fsdp.fully_shard in its place; strategy='no_shard' keeps whole weights on each rank",
            )
        if fsdp2_units.is_fsdp_module(module):
            raise OrderError(
                f"{name or type(model).__name__}: fully_shard on a module that is sharded already",
                expected="a model without FSDP2",
                got=type(module).__name__,
                why="The tensor-parallel placements must be set before FSDP2 cuts the parameters",
                fix="call te_fsdp.fully_shard once, and not torch's fully_shard before it",
            )
    for name, parameter in model.named_parameters():
        # FSDP2 does not detect models without FSDP2 units, and modules inside of a sharded one.
        state = sharded_model_of(parameter)
        if state is not None:
            raise OrderError(
                f"{name}: fully_shard on a parameter that is sharded already",
                expected="a model that fully_shard was not called on",
                got=f"a parameter of a sharded {type(state.model).__name__}",
                why="Its gradients would be averaged twice",
                fix="call te_fsdp.fully_shard once, on the full model; select parts of it with units= and strategy=",
            )
        if isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ()):
            raise OrderError(
                f"{name}: fully_shard on a parameter that is sharded already",
                expected="a plain parameter or a DTensor over ep, tp, or both",
                got=f"placements {tuple(parameter.placements)}",
                fix="build a new model",
            )


def check_accepted(model: nn.Module, units: Iterable[str], kept: Collection[int] = ()) -> None:
    """Check for parameters that FSDP2 would refuse after it has sharded some units.

    ``kept``: ids of unsharded parameters.
    """
    for name in units:
        module = model.get_submodule(name)
        if is_container(module):
            raise PlacementError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="a module with a forward",
                got="a container without a forward",
                why="FSDP2 gathers weights in the hooks of forward, which a container never runs",
                fix=f'units="{name}.*" for each of its children'
                if name
                else "shard the module that calls it",
            )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and id(parameter) not in kept:
            raise PlacementError(
                f"{name}: fully_shard of a scalar parameter",
                expected="at least one dim to cut",
                got="shape ()",
                fix="make it a tensor of shape (1,), or call te_fsdp.fsdp_no_shard(parameter)",
            )


def is_container(module: nn.Module) -> bool:
    """Return whether a module is only a container, without a forward."""
    listing = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    return listing and type(module).forward is torch.nn.Module.forward


def refuse_hooks(named: Iterable[tuple[str, torch.Tensor]], *, sharded: bool = True) -> None:
    """Raise OrderError for gradient hooks that FSDP2 would never run, or would lose. Local operation.

    Before parameters are ``sharded``, post-accumulate hooks would be lost, too.
    """
    hooked = [
        name
        for name, p in named
        if _torch_autograd.has_gradient_hooks(p)
        or (not sharded and getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    if hooked:
        raise OrderError(
            f"{hooked[0]}: a gradient hook on a parameter that {'is' if sharded else 'is about to be'} sharded",
            expected="register_post_accumulate_grad_hook, after te_fsdp.fully_shard and te_fsdp.materialize",
            got=f"{len(hooked)} parameter(s) with hooks"
            + (" by register_hook" if sharded else " from before fully_shard"),
            why="FSDP2 puts a new parameter in each one's place, and autograd gives gradients to the gathered ones: "
            "the hook would never run",
            fix="parameter.register_post_accumulate_grad_hook(hook), which sees the reduced gradient in parameter.grad",
        )


# -------------------------------------------------------------------------------------------------------- kept weights
#
# A forward without gradients leaves weights of ``optim`` and ``optim_grads`` unsharded, because no backward reshards
# them. They are kept for the next forward, but ``model.parameters()`` returns the shards. Code that reads or writes
# parameters after an evaluation (averages, manual clipping, a new optimizer) would otherwise use copies that the next
# step discards.


def expose_sharded_params(state: ShardedModel, only: str | None = None) -> None:
    """Make ``model.parameters()`` return sharded parameters while units stay unsharded. Local operation.

    No memory is freed. ``only`` is the name of one unsharded unit. The default is all units that keep their weights.
    """
    units = state.gathered() if only is None else [(only, state.modules[only])]
    for name, unit in units:
        if name in state.unsharded.aside or (only is None and state.units[name].gather == "pass"):
            continue
        for parameter, record in _fsdp2.unsharded_parameters(unit):
            for module, own in fsdp2_units.owners_of(record):
                if module._parameters.get(own) is parameter:
                    _note_aside(module, own, True)
                    # Not by an assignment, after which a quantized weight would free its data.
                    module._parameters[own] = _fsdp2.sharded_param_of(record)
        state.unsharded.aside[name] = _torch.versions_of(_fsdp2.sharded_parameters(unit))


def expose_unsharded_params(state: ShardedModel, name: str, unit: nn.Module) -> None:
    """Undo :func:`expose_sharded_params` for a unit; free its weights if the shards changed. Local operation."""
    versions = state.unsharded.aside.pop(name, None)
    if versions is None or not _fsdp2.is_unit_unsharded(unit):
        return
    if (
        not _torch.in_backward()
        and not state.sync.waiting
        and _torch.versions_of(_fsdp2.sharded_parameters(unit)) != versions
    ):
        unit.reshard()  # type: ignore[operator]
        state.unsharded.versions.pop(name, None)
        return
    for parameter, record in _fsdp2.unsharded_parameters(unit):
        shard = _fsdp2.sharded_param_of(record)
        if parameter.requires_grad != shard.requires_grad:
            parameter.requires_grad_(shard.requires_grad)
        for module, own in fsdp2_units.owners_of(record):
            _note_aside(module, own, False)
            setattr(module, own, parameter)


def _note_aside(module: nn.Module, name: str, is_aside: bool) -> None:
    binding = records.binding_of(module)
    pair = None if binding is None else binding.fsdp.pairs.get(name)
    if pair is not None:
        pair.is_aside = is_aside
