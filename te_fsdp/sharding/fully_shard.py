"""``fully_shard``: set_device_mesh, then FSDP2 unit by unit, then what FSDP2 leaves undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import Shard

from te_fsdp import _torch
from te_fsdp.binding import binding_of
from te_fsdp.errors import PlacementError, PrecisionError, message
from te_fsdp.modules.apply import set_device_mesh
from te_fsdp.modules.experts import Selection
from te_fsdp.quantized.shards import Key, restore_quantized, stash_quantized
from te_fsdp.sharding.agree import check_replicas, check_same_model, raised_on_all_ranks
from te_fsdp.sharding.experts import divide_gradients, fsdp_mesh, plan_parameters, with_expert_units
from te_fsdp.sharding.no_shard import NoShard, plan_no_shard
from te_fsdp.sharding.no_shard_reduce import ReplicatedGradients
from te_fsdp.sharding.precision import MixedPrecisionPolicy
from te_fsdp.sharding.precision_plan import PrecisionPlan, plan_precision
from te_fsdp.sharding.state import KEY, ShardingState, mark
from te_fsdp.sharding.strategies import DEFAULT, STRATEGIES, Strategy, check_outer
from te_fsdp.sharding.ties import check_ties
from te_fsdp.sharding.units import check_accepted, check_order, find_units
from te_fsdp.sharding.unused import reduce_unused

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.mesh import Meshes
    from te_fsdp.modules.plan import Planned

__all__ = ["fully_shard"]

_log = logging.getLogger("te_fsdp")


def fully_shard(
    model: nn.Module,
    meshes: Meshes,
    *,
    units: Iterable[type | str] | type | str | None = None,
    strategy: str | Strategy | Mapping[type | str, str | Strategy] | None = None,
    outer_strategy: str = "no_shard",
    precision: MixedPrecisionPolicy | None = None,
    mp_policy: Fsdp2Policy | None = None,
    reshard_after_forward: bool | None = None,
    experts: Selection = None,
) -> nn.Module:
    """Shard a TE model over its meshes on FSDP2, with or without tp.

    Binds the model (:func:`te_fsdp.set_device_mesh`), applies FSDP2 to every unit and to the rest of the
    model, keeps quantized weights quantized with one scale per weight, and keeps the parameters' Python
    attributes. Build the optimizer afterwards.

    Collective over the world: call on all ranks. Communicates checksums of parameters that live on the
    device, and the amax of quantized ones.

    Args:
        model: A tree of TE modules and others; parameters on meta or on the device. Changed in place.
        meshes: The job's meshes.
        units: What is gathered and released as one: module classes, or names in the tree (``"layers.0"``; a
            trailing ``.*`` means every child). By default every ``te.TransformerLayer``.
        strategy: What is cut over ``dp_shard``: ``"no_shard"``, ``"optim"``, ``"optim_grads"`` or
            ``"optim_grads_params"`` (the default), for the model or as a mapping of classes or names to them. A key
            holds for all in its module, which becomes a unit; ``""`` is the root.
        outer_strategy: What is cut over ``dp_replicate`` as well: ``"no_shard"`` (nothing: HSDP) or ``"optim"``
            (main weights and optimizer state: HFSDP).
        precision: Dtypes of main weights, gradients and the wire (:class:`te_fsdp.MixedPrecisionPolicy`). ``None``:
            all in the parameters' own dtype.
        mp_policy: FSDP2's own mixed precision policy instead of ``precision``.
        reshard_after_forward: FSDP2's word instead of ``strategy``: True is ``"optim_grads_params"``, False is
            ``"optim_grads"``.
        experts: With expert parallelism: names or classes of the ``GroupedLinear`` modules to deal out over ``ep``, or
            of modules that hold some; by default all of them. They are units of their own.

    Returns:
        ``model``.

    Raises:
        MeshError, PlacementError, OrderError: see :func:`te_fsdp.set_device_mesh`; also a unit that matches
            nothing or has no forward, a scalar parameter, a model that is sharded already, arguments that
            contradict each other, and quantized weights whose shards would not fit their format.
        PrecisionError: Both ``precision`` and ``mp_policy``, or a policy that the model contradicts.
        InitError: Ranks that must hold equal values do not.
    """
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        check_order(model)
        _check_policy(precision, mp_policy)
        rows = find_units(model, units, _strategy(strategy, reshard_after_forward))
        state = ShardingState(model, meshes, rows, check_outer(outer_strategy), precision)
        exempt = _plan_units(state, experts)
        state.precision_plan = _plan_precision(state, exempt)
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        parameters, cuts = plan_parameters(model, meshes, exempt.keys, experts)
        plan = _Plan(parameters, cuts, exempt, mp_policy or Fsdp2Policy())
    check_same_model(model, meshes, parameters)
    check_replicas(model, parameters, meshes)
    plan.exempt.commit(meshes.device)
    set_device_mesh(
        model,
        meshes.tp,
        meshes.weight,
        ep_mesh=meshes.ep,
        expert_weight_mesh=meshes.expert_weight,
        experts=experts,
    )
    _apply_fsdp2(state, plan)
    _finish(state, plan)
    _log.debug("fully_shard: %d units over %s", len(rows), meshes)
    return model


@dataclass(frozen=True)
class _Plan:
    """What is known before anything changes: where each parameter goes, along which dim it is cut, in which dtypes."""

    parameters: list[Planned]
    cuts: dict[Key, int]
    exempt: NoShard
    mp_policy: Fsdp2Policy


def _plan_units(state: ShardingState, experts: Selection) -> NoShard:
    """Settle the units, and what none of them takes. Changes nothing in the model; a rank may fail alone."""
    state.units = with_expert_units(state.model, state.meshes, state.units, experts)
    exempt = plan_no_shard(state.model, state.units)
    state.units = exempt.without_units(state.units)
    check_ties(state.model, state.units, exempt.keys)
    check_accepted(state.model, state.units)
    return exempt


def _plan_precision(state: ShardingState, exempt: NoShard) -> PrecisionPlan | None:
    """What the precision policy means for the units that FSDP2 cuts. Changes nothing; a rank may fail alone."""
    if state.precision is None:
        return None
    all_reduces = state.outer == "no_shard" and state.meshes.size("dp_replicate") > 1
    units = [name for name in state.units if id(state.model.get_submodule(name)) not in exempt.whole]
    return plan_precision(state.model, units, state.precision, skip=exempt.keys, all_reduces=all_reduces)


def _strategy(
    strategy: str | Strategy | Mapping[type | str, str | Strategy] | None, reshard_after_forward: bool | None
) -> str | Strategy | Mapping[type | str, str | Strategy]:
    """What is meant by ``strategy`` and FSDP2's word for it together."""
    if reshard_after_forward is None:
        return DEFAULT if strategy is None else strategy
    meant = STRATEGIES["optim_grads_params" if reshard_after_forward else "optim_grads"]
    if isinstance(reshard_after_forward, bool) and strategy in (None, meant, meant.name):
        return meant
    raise PlacementError(
        message(
            f"fully_shard: reshard_after_forward={reshard_after_forward!r} with strategy={strategy!r}",
            expected="one of the two; True means 'optim_grads_params', False 'optim_grads'",
            fix="leave reshard_after_forward out",
        )
    )


def _check_policy(precision: MixedPrecisionPolicy | None, mp_policy: Fsdp2Policy | None) -> None:
    if precision is not None and mp_policy is not None:
        raise PrecisionError(
            message(
                "fully_shard: precision and mp_policy",
                expected="one of them",
                got="both",
                why="Each says in which dtypes to compute and to reduce",
                fix="leave mp_policy out",
            )
        )


def _apply_fsdp2(state: ShardingState, plan: _Plan) -> None:
    """FSDP2 unit by unit, inner ones first: a parent's FSDP group takes what its units have left."""
    model = state.model
    for binding in filter(None, map(binding_of, model.modules())):
        binding.weight_mesh_agreed = True  # one object gives both meshes
    options: dict[str, Any] = {"mp_policy": plan.mp_policy}
    stash, precision = stash_quantized(model), state.precision_plan
    if precision is not None:
        precision.widen(model)
    options["shard_placement_fn"] = _placements(model, plan.cuts)
    options["ignored_params"] = plan.exempt.ignored()
    for name, row in reversed(state.units.items()):
        unit = model.get_submodule(name)
        if id(unit) in plan.exempt.whole:
            continue
        state.modules[name] = unit
        options["mesh"] = fsdp_mesh(state, unit)
        if precision is not None:
            options["mp_policy"] = precision.fsdp2_policy(name)
        fsdp2_fully_shard(unit, reshard_after_forward=row.release_after_forward, **options)
    divide_gradients(state, options["mp_policy"])
    restore_quantized(model, stash)


def _placements(model: nn.Module, cuts: dict[Key, int]) -> Callable[[nn.Parameter], Shard | None] | None:
    """FSDP2's ``shard_placement_fn`` for weights that it shall cut along another dim than the first."""
    dims = {
        id(parameter): cuts[id(module), name]
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if cuts.get((id(module), name))
    }
    return (lambda parameter: Shard(dims[id(parameter)]) if id(parameter) in dims else None) if dims else None


def _drop_flat_shards(model: nn.Module, cuts: dict[Key, int]) -> None:
    """No high-precision copies of quantized shards in FSDP2, neither now nor when a shard is quantized later."""
    for unit in model.modules():
        for managed in _torch.managed_by(unit) if _torch.is_fsdp_module(unit) else ():
            if any((id(owner), name) in cuts for owner, name in _torch.owners_of(managed)):
                _torch.keep_no_flat_shard(managed)


def _finish(state: ShardingState, plan: _Plan) -> None:
    """What FSDP2 drops when it replaces parameters: Python attributes, also where it bypasses ``__setattr__``.

    And what it shall not keep: flat copies of quantized shards.
    """
    _drop_flat_shards(state.model, plan.cuts)
    for module in state.model.modules():
        binding = binding_of(module)
        if binding is None:
            continue
        binding.under_fsdp = True
        for name, parameter in module._parameters.items():
            if parameter is not None:
                binding.carry(name, parameter)
    if state.precision_plan is not None:
        state.precision_plan.install(state.model)
    reduce_unused(state.model)
    if plan.exempt.parameters:
        state.replicated = ReplicatedGradients(
            state.model,
            plan.exempt,
            state.meshes,
            grads_dtype=getattr(state.precision, "main_grads_dtype", None),
        )
    state.model.__dict__[KEY] = state
    mark(state)
