"""The plan of ``fully_shard``: units, strategies, dtypes, where each parameter goes. What follows reads it."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import OffloadPolicy

from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.layout import REPLICATED, STORAGE, Storage
from te_fsdp.modules.checks import Selection, find_experts, plan_modules
from te_fsdp.modules.grouped import single_names
from te_fsdp.modules.plan import Meshing, ModulePlan
from te_fsdp.parameters import NO_SHARD, ParameterPlan, Place, is_replicated, places_of
from te_fsdp.sharding.no_shard import ReplicatedParameter
from te_fsdp.sharding.precision import MixedPrecisionPolicy, PrecisionPlan, plan_precision
from te_fsdp.sharding.units import (
    DEFAULT,
    Wanted,
    check_accepted,
    check_order,
    check_word,
    find_units,
    nearest_strategy,
    refuse_hooks,
    unit_by_module,
)

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.mesh import Meshes
    from te_fsdp.quantized.shards import Key

#: How users name strategies: one, or one for each class or name.
Wish = str | Mapping[type | str, str]


@dataclass(frozen=True)
class Request:
    """The arguments of ``fully_shard``."""

    units: Wanted | None = None
    strategy: Wish | None = None
    reshard_after_forward: bool | None = None
    outer_strategy: str = "no_shard"
    precision: MixedPrecisionPolicy | None = None
    mp_policy: Fsdp2Policy | None = None
    offload_policy: OffloadPolicy | None = None
    experts: Selection = None
    average_gradients: bool = True
    transport: str = "auto"
    zero_copy_gradients: bool | str = "auto"


@dataclass(frozen=True)
class ModelPlan:
    """All that is settled before anything changes.

    Attributes:
        model: The root.
        meshes: The job's meshes.
        request: What the user asked for.
        units: Name -> storage of each unit, outer before inner; ``""`` is the root with what its units have left.
        whole: Names of modules that have parameters, in them or below them, all of which stay whole.
        parameters: Every place of a parameter, by its owner's id and the name that it has there before it is bound.
        modules: How each module is bound.
        precision: What the policy means for each unit that FSDP2 cuts; ``None`` without a policy.
    """

    model: nn.Module
    meshes: Meshes
    request: Request
    units: dict[str, Storage]
    whole: frozenset[str]
    parameters: dict[Key, ParameterPlan]
    modules: list[ModulePlan]
    precision: PrecisionPlan | None

    @property
    def replicated(self) -> list[ReplicatedParameter]:
        """The parameters that stay whole."""
        return replicated_parameters(self.model, self.parameters)

    @property
    def mp_policy(self) -> Fsdp2Policy:
        """FSDP2's own policy, of models without ours."""
        return self.request.mp_policy or Fsdp2Policy()

    def settings(self) -> str:
        """What was decided beside the parameters' places, in words that are the same on ranks that agree."""
        request = self.request
        units = ", ".join(f"{name or 'root'}={row}" for name, row in self.units.items())
        # Without numbers: ranks may hold different numbers of experts.
        replicated = ", ".join(
            dict.fromkeys(item.plan.label.rstrip("0123456789") for item in self.replicated)
        )
        transport = f"{request.transport}; zero_copy_gradients={request.zero_copy_gradients}"
        return (
            f"units {units}; outer_strategy={request.outer_strategy}; average_gradients={request.average_gradients}; "
            f"{request.precision or self.mp_policy}; transport={transport}; not sharded: {replicated or 'none'}"
        )


def plan_sharding(model: nn.Module, meshes: Meshes, request: Request) -> ModelPlan:
    """Check all that can be checked, and decide the rest. Changes nothing.

    Collective over the world: what one rank refuses, all do.
    """
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        check_order(model)
        _check_policy(request.precision, request.mp_policy)
        _check_offload(request.offload_policy)
        units = _plan_units(model, meshes, request)
        placed = plan_storage(model, units)
        whole = _whole(model, placed)
        kept = {id(p.parameter) for p in places_of(model) if placed[id(p.owner), p.name].storage.is_whole}
        refuse_hooks(((n, p) for n, p in model.named_parameters() if id(p) not in kept), sharded=False)
        # No unit is made of a module that stays whole.
        units = {name: row for name, row in units.items() if not name or row.is_whole or name not in whole}
        check_accepted(model, units)
        cut = {name: row for name, row in units.items() if name not in whole}
        precision = None
        if request.precision is not None:
            all_reduces = request.outer_strategy == "no_shard" and meshes.size("dp_replicate") > 1
            precision = plan_precision(model, placed, cut, request.precision, all_reduces=all_reduces)
            for place in places_of(model):
                key = id(place.owner), place.name
                dtype = precision.gradient_of(place.parameter, placed[key])
                placed[key] = replace(placed[key], gradient_dtype=dtype)
    # A context of its own: it gathers over ep, where every rank must arrive.
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        replicas = meshes.size("dp_replicate")
        dense = Meshing(meshes.tp, meshes.weight, replicas=replicas)
        experts = Meshing(meshes.tp, meshes.expert_weight, meshes.ep, replicas)
        modules = plan_modules(
            model, dense, experts, request.experts, stays_whole=functools.partial(_stays_whole, placed)
        )
    parameters = _completed(placed, modules)
    return ModelPlan(model, meshes, request, units, whole, parameters, modules, precision)


def _plan_units(model: nn.Module, meshes: Meshes, request: Request) -> dict[str, Storage]:
    """The units that are asked for, and those of experts; a rank may fail alone."""
    words = find_units(model, request.units, _strategy(request.strategy, request.reshard_after_forward))
    outer = check_word("outer_strategy", request.outer_strategy)
    check_word("transport", request.transport)
    if not isinstance(request.zero_copy_gradients, bool) and request.zero_copy_gradients != "auto":
        raise PlacementError(
            "fully_shard: zero_copy_gradients",
            expected="True, False or 'auto'",
            got=repr(request.zero_copy_gradients),
            fix="leave zero_copy_gradients out",
        )
    words = _with_expert_units(model, meshes, words, request.experts)
    units = {name: STORAGE[word, outer] for name, word in words.items()}
    if outer == "optim" and all(row.is_whole for row in units.values()):
        raise PlacementError(
            "fully_shard: strategy='no_shard' with outer_strategy='optim'",
            expected="a strategy that cuts the optimizer's state over dp_shard",
            got="one that cuts nothing",
            fix="strategy='optim', or leave outer_strategy out",
        )
    return units


def _with_expert_units(
    model: nn.Module, meshes: Meshes, units: dict[str, str], selection: Selection
) -> dict[str, str]:
    """``units`` and the expert modules, which cannot share a unit with parameters on other meshes. Local operation.

    Returns:
        Name -> strategy, outer before inner; an expert module has that of the unit around it.
    """
    if meshes.ep is None:
        return units
    chosen = {**units, **dict.fromkeys(find_experts(model, selection) - units.keys())}
    names = [name for name, _ in model.named_modules() if name in chosen]
    return {name: units.get(name) or nearest_strategy(name, units) for name in names}


def plan_storage(model: nn.Module, units: Mapping[str, Storage]) -> dict[Key, ParameterPlan]:
    """Settle for each parameter in which unit it is, and whether it stays whole: marked so, or with its unit.

    Local operation; changes nothing. Gives the same on all ranks that hold the same model.

    Args:
        model: The root.
        units: Name -> storage of each unit, ``""`` for the root.

    Returns:
        Every place of a parameter, by its owner's id and its name there.

    Raises:
        PlacementError: A parameter registered at several places, of which some are replicated, or in several units.
    """
    inside = unit_by_module(model, units)
    modules = model.named_modules(remove_duplicate=False)
    marked = {id(sub) for _, m in modules if m.__dict__.get(NO_SHARD) is True for sub in m.modules()}
    tied: dict[object, list[tuple[Place, str, Storage]]] = {}
    for place in places_of(model, remove_duplicate=False):
        unit = inside[place.path]
        storage = units[unit]
        if not storage.is_whole and (id(place.owner) in marked or is_replicated(place.owner, place.name)):
            storage = STORAGE[REPLICATED, storage.outer]
        tied.setdefault(_tensor_of(place), []).append((place, unit, storage))
    rows: dict[Key, ParameterPlan] = {}
    for places in tied.values():
        _check_tied(places)
        owners = tuple(place.label for place, _, _ in places)
        for place, unit, storage in places:
            row = ParameterPlan(place.label, place.name, unit, storage, owners)
            rows.setdefault((id(place.owner), place.name), row)  # a module of several names: the first one
    return dict(sorted(rows.items(), key=lambda item: item[1].label))


def _tensor_of(place: Place) -> object:
    """What is one and the same where a parameter is tied, and where experts will be one parameter."""
    single = place.name.rstrip("0123456789")
    if single != place.name and single in single_names(place.owner):
        return id(place.owner), single
    return id(place.parameter)


def _check_tied(places: Sequence[tuple[Place, str, Storage]]) -> None:
    """All owners of a tied parameter must be gathered together, or be replicated.

    FSDP2 cuts a parameter for the unit that owns it. Owned by two units it is cut twice: torch 2.11 then trains two
    parameters in silence, and torch 2.13 raises in the first forward, when the optimizer is built already.
    """
    whole = [place.label for place, _, storage in places if storage.is_whole]
    others = {place.label: unit for place, unit, storage in places if not storage.is_whole}
    if whole and others:
        raise PlacementError(
            f"{whole[0]} is exempt from sharding, but tied to {', '.join(others)}",
            expected="all owners of a tied parameter exempt, or none",
            why="One tensor cannot be whole for one owner and cut for another",
            fix="pass the parameter itself, or all of its owners, to te_fsdp.fsdp_no_shard",
        )
    if len(set(others.values())) > 1:
        raise PlacementError(
            f"{', '.join(others)}: one parameter in several units",
            expected="all owners of a tied parameter in one unit",
            got=", ".join(f"{label} in {unit or 'the root'}" for label, unit in others.items()),
            why="FSDP2 would cut it once for each, and train them apart",
            fix="make no unit of these owners, so that the root gathers it, or one unit of a module that "
            "contains them all, or exempt it: te_fsdp.fsdp_no_shard(parameter)",
        )


def _whole(model: nn.Module, rows: Mapping[Key, ParameterPlan]) -> frozenset[str]:
    """Names of the modules that have parameters in them or below them, all of which stay whole."""
    around: dict[bool, set[str]] = {True: set(), False: set()}
    places = places_of(model, remove_duplicate=False)
    for path, is_whole in {(p.path, rows[id(p.owner), p.name].storage.is_whole) for p in places}:
        around[is_whole].update(_enclosing(path))
    return frozenset(around[True] - around[False])


def _stays_whole(rows: Mapping[Key, ParameterPlan], module: nn.Module, name: str) -> bool:
    """Whether a module's own parameter does, by the name that it has now or when the module is bound."""
    row = rows.get((id(module), name)) or rows.get((id(module), f"{name}0"))
    return row is not None and row.storage.is_whole


def _enclosing(path: str) -> Iterator[str]:
    """Names of a module and of all modules around it."""
    yield path
    while path:
        path = path.rpartition(".")[0]
        yield path


def _completed(
    placed: Mapping[Key, ParameterPlan], modules: Iterable[ModulePlan]
) -> dict[Key, ParameterPlan]:
    """The rows, with what is known of their modules and by the names that they have when those are bound."""
    planned = {id(item.module): item for item in modules}
    names = {
        row.label: row.label.removesuffix(name)
        + (planned[owner].registered(name) if owner in planned else name)
        for (owner, name), row in placed.items()
    }
    rows = {}
    for (owner, name), row in placed.items():
        owners, item = (
            tuple(dict.fromkeys(names.get(label, label) for label in row.owners)),
            planned.get(owner),
        )
        row = replace(row, label=names[row.label], owners=owners)
        if item is not None:
            own = item.registered(name)
            rule = item.rules.get(name, item.rules.get(own))
            cut, experts = item.cuts.get(own), item.experts is not None
            row = replace(row, name=own, rule=rule, experts=experts, cut_dim=cut)
        rows[owner, name] = row
    return rows


def replicated_parameters(model: nn.Module, rows: Mapping[Key, ParameterPlan]) -> list[ReplicatedParameter]:
    """The parameters that stay whole, each once, in the order of the rows: the same on all ranks. Local operation.

    Args:
        model: The root.
        rows: All places of its parameters.
    """
    modules = {id(module): module for module in model.modules()}
    found = {
        row.label: ReplicatedParameter(row, modules[owner])
        for (owner, _), row in rows.items()
        if row.storage.is_whole and row.label == row.owners[0]
    }
    return list(found.values())


def _strategy(strategy: Wish | None, reshard_after_forward: bool | None) -> Wish:
    """What is meant by ``strategy`` and FSDP2's word for it together."""
    if reshard_after_forward is None:
        return DEFAULT if strategy is None else strategy
    meant = "optim_grads_params" if reshard_after_forward else "optim_grads"
    if isinstance(reshard_after_forward, bool) and strategy in (None, meant):
        return meant
    raise PlacementError(
        f"fully_shard: reshard_after_forward={reshard_after_forward!r} with strategy={strategy!r}",
        expected="one of the two; True means 'optim_grads_params', False 'optim_grads'",
        fix="leave reshard_after_forward out",
    )


def _check_policy(precision: MixedPrecisionPolicy | None, mp_policy: Fsdp2Policy | None) -> None:
    if precision is not None and mp_policy is not None:
        raise PrecisionError(
            "fully_shard: precision and mp_policy",
            expected="one of them",
            got="both",
            why="Each says in which dtypes to compute and to reduce",
            fix="leave mp_policy out",
        )
    for word, given, kind in (
        ("precision", precision, MixedPrecisionPolicy),
        ("mp_policy", mp_policy, Fsdp2Policy),
    ):
        if given is not None and not isinstance(given, kind):
            raise PrecisionError(
                f"fully_shard: {word}",
                expected=f"a {kind.__module__.split('.')[0]} MixedPrecisionPolicy",
                got=f"{type(given).__module__}.{type(given).__name__}",
                fix="precision=te_fsdp.MixedPrecisionPolicy(...), or "
                "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            )


def _check_offload(policy: OffloadPolicy | None) -> None:
    """Shards stay on the device: optimizers of TE, amaxes and the reductions over tp work on them there."""
    if policy is not None and type(policy) is not OffloadPolicy:  # torch's base class offloads nothing
        raise PlacementError(
            f"fully_shard: offload_policy={type(policy).__name__}",
            expected="None, or OffloadPolicy(): shards, gradients and optimizer state stay on the device",
            got=policy,
            why="Quantization, TE's optimizers, gradient norms and checks over ranks read shards on the device; "
            "TE quantizes nothing on the CPU",
            fix="leave it out; strategy='optim_grads_params', a larger dp_shard, outer_strategy='optim' or bf16 "
            "moments of FusedAdam save memory on the device",
        )
