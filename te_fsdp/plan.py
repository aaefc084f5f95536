"""The plan of ``fully_shard``: all decisions, made before anything changes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy, OffloadPolicy

from te_fsdp import unshardable_models as _unshardable
from te_fsdp.collectives.agreement import raised_on_all_ranks
from te_fsdp.errors import PlacementError, PrecisionError, shorten, suggest
from te_fsdp.expert_units import dense_params_in_expert_units, expert_units
from te_fsdp.layout import OUTER_STRATEGIES, REPLICATED, STORAGE, STRATEGIES, Storage
from te_fsdp.mesh import Meshes
from te_fsdp.modules.grouped import Selection, single_names
from te_fsdp.modules.plan import ModuleMeshes, ModulePlan, plan_modules, refuse_uneven_ties
from te_fsdp.precision import MixedPrecisionPolicy, PrecisionPlan, plan_precision
from te_fsdp.quantized.shards import Key
from te_fsdp.records import ParameterPlan, ParamOwner, is_replicated, no_shard_mark, param_owners
from te_fsdp.replicated_params import ReplicatedParameter
from te_fsdp.upstream import te as _te, torch_autograd as _torch_autograd

#: How users select units: classes, or names in the tree.
UnitSpec = Iterable[type | str] | type | str
#: How users select strategies: one, or one for each class or name.
StrategySpec = str | Mapping[type | str, str]
#: The default strategy.
DEFAULT_STRATEGY = "optim_grads_params"
#: How FSDP2's units are all-gathered (:mod:`te_fsdp.features.transports`).
TRANSPORTS = ("auto", "nccl", "copy_engine")
#: Options of ``fully_shard`` -> their values.
OPTIONS = {"strategy": STRATEGIES, "outer_strategy": OUTER_STRATEGIES, "transport": TRANSPORTS}
_HYBRID = "'{}' on Meshes.build(dp_replicate=...), whose outer axis copies the model"
_HFSDP = "'optim_grads_params' and outer_strategy='optim' on Meshes.build(dp_replicate=...)"
#: Value in te_fsdp -> values in DeepSpeed, FSDP1 and others, as :func:`te_fsdp.errors.suggest` compares them.
_OTHER_LIBRARIES = {
    "strategy": {
        "no_shard": "0 zero0 stage0 zerostage0 ddp no none false replicate",
        "optim": "1 zero1 stage1 zerostage1 optimizer zero os",
        "optim_grads": "2 zero2 stage2 zerostage2 shardgradop osg gradop",
        "optim_grads_params": "3 zero3 stage3 zerostage3 fullshard fullyshard full fsdp fsdp2 params true osgp",
        _HYBRID.format("optim_grads_params"): "hybridshard hsdp hybrid",
        _HYBRID.format("optim_grads"): "hybridshardzero2",
        _HFSDP: "hfsdp",
    },
    "outer_strategy": {
        "no_shard": "0 zero0 ddp no none false replicate hsdp hybridshard",
        "optim": "1 2 3 zero1 zero2 zero3 hfsdp full fullshard true optimgrads optimgradsparams shardgradop optimizer "
        "zero",
    },
    "transport": {"nccl": "gloo", "auto": "default none", "copy_engine": "ce p2p symmmem symmetricmemory"},
}


@dataclass(frozen=True)
class ShardRequest:
    """The arguments of ``fully_shard``."""

    units: UnitSpec | None = None
    strategy: StrategySpec | None = None
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
    """All decisions of ``fully_shard`` before anything changes."""

    model: nn.Module
    meshes: Meshes
    request: ShardRequest
    #: Name -> storage of each unit, outer before inner; ``""`` is the root with the remaining parameters.
    units: dict[str, Storage]
    #: Names of modules whose parameters (at least one, in submodules too) are all replicated.
    replicated_modules: frozenset[str]
    #: Every owner of a parameter, by the id of the module and the name there before binding.
    parameters: dict[Key, ParameterPlan]
    modules: list[ModulePlan]  #: How each module is bound
    #: The dtypes of each unit that FSDP2 shards; ``None`` without a policy.
    precision: PrecisionPlan | None

    @property
    def replicated(self) -> list[ReplicatedParameter]:
        """Return the parameters that are replicated over data parallel."""
        return replicated_parameters(self.model, self.parameters)

    @property
    def mp_policy(self) -> Fsdp2Policy:
        """Return FSDP2's policy, for models without a policy of te_fsdp."""
        return self.request.mp_policy or Fsdp2Policy()

    def settings(self) -> str:
        """Return all decisions except parameter storage as a string, which checks compare over ranks."""
        request = self.request
        units = ", ".join(f"{name or 'root'}: {row}" for name, row in self.units.items())
        # without numbers, because ranks may have different numbers of experts
        replicated = ", ".join(dict.fromkeys(i.plan.label.rstrip("0123456789") for i in self.replicated))
        transport = f"{request.transport}; zero_copy_gradients={request.zero_copy_gradients}"
        return (
            f"units={units}; outer_strategy={request.outer_strategy}; average_gradients={request.average_gradients}; "
            f"precision={request.precision or self.mp_policy}; transport={transport}; unsharded={replicated or 'none'}"
        )


def plan_sharding(model: nn.Module, meshes: Meshes, request: ShardRequest) -> ModelPlan:
    """Check the arguments of ``fully_shard`` and plan the model; change nothing.

    Collective over the model's ranks, and over ``ep`` as in :func:`te_fsdp.modules.plan.plan_modules`. If one rank
    raises, all do: the errors of :func:`te_fsdp.fully_shard` about arguments, units and parameters.
    """
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        _unshardable.check_order(model)
        _check_policies(request)
        units = _plan_units(model, meshes, request)
        policy = request.precision
        # A policy with both dtypes stores, all-gathers and reduces all parameters of a unit equally.
        uniform = policy is not None and None not in (policy.main_params_dtype, policy.param_dtype)
        in_expert_units = dense_params_in_expert_units(model, meshes, units, request.experts)
        # Without a compute dtype FSDP2 all-gathers a unit in the dtype of its parameters, of the frozen ones as well.
        frozen = policy is not None and policy.param_dtype is None
        rows = plan_storage(model, units, one_dtype=not uniform, with_frozen=frozen, exempt=in_expert_units)
        _unshardable.refuse_sparse_gradients(model)
        _unshardable.refuse_quantized_ops(model, lambda m, name: rows[id(m), name].storage.is_replicated)
        owners = param_owners(model)
        replicated = {id(o.parameter) for o in owners if rows[id(o.module), o.name].storage.is_replicated}
        named = [(name, p) for name, p in model.named_parameters() if id(p) not in replicated]
        _torch_autograd.refuse_hooks(named, sharded=False)
        # A module with only replicated parameters does not become a unit.
        without_shards = _replicated_modules(model, rows)
        units = {n: row for n, row in units.items() if not n or row.is_replicated or n not in without_shards}
        _unshardable.check_accepted(model, units, replicated)
        sharded_units = {name: row for name, row in units.items() if name not in without_shards}
        precision = None
        if request.precision is not None:
            precision = plan_precision(model, rows, sharded_units, request.precision)
            for owner in param_owners(model):
                key = id(owner.module), owner.name
                dtype = precision.gradient_of(owner.parameter, rows[key])
                rows[key] = replace(rows[key], gradient_dtype=dtype)

    def stays_replicated(module: nn.Module, name: str) -> bool:
        """Return whether a module's direct parameter is replicated, by its present name or its name after binding."""
        row = rows.get((id(module), name)) or rows.get((id(module), f"{name}0"))
        return row is not None and row.storage.is_replicated

    # A separate context, because it all-gathers over ep, which a rank that has raised above would not join.
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        replicas = meshes.size("dp_replicate")
        single = meshes.tp if meshes.tp_or_none is None else None
        dense = ModuleMeshes(meshes.tp_or_none, meshes.weight, replicas=replicas, single=single)
        experts = ModuleMeshes(meshes.tp_or_none, meshes.expert_weight, meshes.ep, replicas)
        modules = plan_modules(model, dense, experts, request.experts, stays_replicated=stays_replicated)
        refuse_uneven_ties(model, modules)
    parameters = _with_module_rows(rows, modules)
    return ModelPlan(model, meshes, request, units, without_shards, parameters, modules, precision)


def _plan_units(model: nn.Module, meshes: Meshes, request: ShardRequest) -> dict[str, Storage]:
    """Return the storage of the requested units and of the experts' units. One rank may raise without the others."""
    strategy, reshard = request.strategy, request.reshard_after_forward
    if reshard is not None:  # FSDP2's argument
        equivalent = "optim_grads_params" if reshard else "optim_grads"
        if not isinstance(reshard, bool) or strategy not in (None, equivalent):
            raise PlacementError(
                f"fully_shard: reshard_after_forward={reshard!r} with strategy={strategy!r}",
                expected="one of the two; True means 'optim_grads_params', False 'optim_grads'",
                fix="omit reshard_after_forward",
            )
        strategy = equivalent
    strategies = find_units(model, request.units, DEFAULT_STRATEGY if strategy is None else strategy)
    outer = check_option("outer_strategy", request.outer_strategy)
    check_option("transport", request.transport)
    if not isinstance(request.zero_copy_gradients, bool) and request.zero_copy_gradients != "auto":
        raise PlacementError(
            "fully_shard: zero_copy_gradients",
            expected="True, False or 'auto'",
            got=repr(request.zero_copy_gradients),
            fix="omit zero_copy_gradients",
        )
    if meshes.ep is not None:
        # Experts cannot share a unit with parameters on other meshes. They have the strategy of the unit around them.
        chosen = strategies.keys() | expert_units(model, meshes, request.experts, strategies)
        names = [name for name, _ in model.named_modules() if name in chosen]
        strategies = {name: strategies.get(name) or nearest_strategy(name, strategies) for name in names}
    units = {name: STORAGE[strategy_name, outer] for name, strategy_name in strategies.items()}
    if outer == "optim" and all(row.is_replicated for row in units.values()):
        raise PlacementError(
            "fully_shard: strategy='no_shard' with outer_strategy='optim'",
            expected="a strategy that shards the optimizer's state over dp_shard",
            got="a strategy that shards nothing",
            fix="use strategy='optim', or omit outer_strategy",
        )
    return units


def plan_storage(
    model: nn.Module,
    units: Mapping[str, Storage],
    *,
    one_dtype: bool = False,
    with_frozen: bool = False,
    exempt: Collection[int] = (),
) -> dict[Key, ParameterPlan]:
    """Return the unit and the storage of each parameter, the same on all ranks with the same model. Local operation.

    Args:
        model: The root.
        units: Name -> storage of each unit; ``""`` is the root.
        one_dtype: Replicate trained parameters whose dtype differs from most of their unit.
        with_frozen: With ``one_dtype``, also frozen ones.
        exempt: ``id`` of parameters to replicate in any case. Parameters without elements always are.

    Returns:
        One plan for each owner of a parameter, by ``id`` of the module and the name there.

    Raises:
        PlacementError: A tied parameter is in several units, or replicated for some of its owners only.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    marked = {id(sub) for m in modules.values() if no_shard_mark(m) is True for sub in m.modules()}
    named = {id(modules[name]): name for name in units}
    # The innermost unit around each module; a module with several names is in several units.
    unit_of: dict[str, str] = {}
    for name, module in modules.items():  # parents before their children
        unit_of[name] = named.get(id(module), unit_of[name.rpartition(".")[0]] if name else "")
    tied: dict[object, list[tuple[ParamOwner, str, Storage]]] = {}
    sharded: dict[str, list[ParamOwner]] = {}
    for owner in param_owners(model):
        if not units[unit_of[owner.path]].is_replicated and id(owner.module) not in marked:
            sharded.setdefault(unit_of[owner.path], []).append(owner)
    replicated = _unshardable.find_unshardable(sharded, one_dtype=one_dtype, with_frozen=with_frozen) | {
        *exempt
    }
    for owner in param_owners(model, remove_duplicate=False):
        unit = unit_of[owner.path]
        storage = units[unit]
        is_exempt = id(owner.module) in marked or is_replicated(owner.module, owner.name)
        if not storage.is_replicated and (is_exempt or id(owner.parameter) in replicated):
            storage = STORAGE[REPLICATED, storage.outer]
        # The key for tied parameters, and for experts that will be one parameter.
        single = owner.name.rstrip("0123456789")
        is_single = single != owner.name and single in single_names(owner.module)
        tensor = (id(owner.module), single) if is_single else id(owner.parameter)
        tied.setdefault(tensor, []).append((owner, unit, storage))
    rows: dict[Key, ParameterPlan] = {}
    for entries in tied.values():
        _check_tied(entries)
        owners = tuple(owner.label for owner, _, _ in entries)
        for owner, unit, storage in entries:
            row = ParameterPlan(owner.label, owner.name, unit, storage, owners)
            # the first name of a module with several names
            rows.setdefault((id(owner.module), owner.name), row)
    return dict(sorted(rows.items(), key=lambda item: item[1].label))


def _check_tied(entries: Sequence[tuple[ParamOwner, str, Storage]]) -> None:
    """Raise PlacementError unless all owners of a tied parameter are in one unit, or all are replicated.

    FSDP2 would shard it once per unit: torch 2.11 trains two parameters, torch 2.13 raises in the first forward.
    """
    replicated = [owner.label for owner, _, storage in entries if storage.is_replicated]
    others = {owner.label: unit for owner, unit, storage in entries if not storage.is_replicated}
    if replicated and others:
        raise PlacementError(
            f"{replicated[0]} is exempt from sharding, but tied to {', '.join(others)}",
            expected="all owners of a tied parameter exempt, or none",
            why="One tensor cannot be replicated for one owner and sharded for another",
            fix="pass the parameter itself, or all of its owners, to te_fsdp.fsdp_no_shard",
        )
    if len(set(others.values())) > 1:
        raise PlacementError(
            f"{', '.join(others)}: one parameter in several units",
            expected="all owners of a tied parameter in one unit",
            got=", ".join(f"{label} in {unit or 'the root'}" for label, unit in others.items()),
            why="FSDP2 would shard it once per unit, and train separate copies",
            fix="omit these owners from units, so that the root all-gathers it, or make one unit of a module that "
            "contains them all, or exempt it: te_fsdp.fsdp_no_shard(parameter)",
        )


def _replicated_modules(model: nn.Module, rows: Mapping[Key, ParameterPlan]) -> frozenset[str]:
    """Return the names of modules whose parameters (at least one, in submodules too) are all replicated."""
    around: dict[bool, set[str]] = {True: set(), False: set()}
    for owner in param_owners(model, remove_duplicate=False):
        prefixes = around[rows[id(owner.module), owner.name].storage.is_replicated]
        prefixes.update(("", *itertools.accumulate(owner.path.split("."), "{}.{}".format)))
    return frozenset(around[True] - around[False])


def _with_module_rows(
    placed: Mapping[Key, ParameterPlan], modules: Iterable[ModulePlan]
) -> dict[Key, ParameterPlan]:
    """Return the plans, completed from the modules' plans, with the names after binding."""
    planned = {id(item.module): item for item in modules}
    rows, labels = {}, {}
    for (owner, name), row in placed.items():
        item = planned.get(owner)
        if item is not None:
            registered_name = item.registered(name)
            # Binding renames parameters of experts to their global numbers, also for the other owners of a tied
            # parameter.
            labels[row.label] = row.label.removesuffix(name) + registered_name
            row = replace(
                row,
                label=labels[row.label],
                name=registered_name,
                rule=item.rules.get(name, item.rules.get(registered_name)),
                experts=item.experts is not None
                or (name in item.distributed and item.distributed[name].is_expert),
                fsdp_dim=item.fsdp_dims.get(registered_name),
            )
        rows[owner, name] = row
    return {
        key: replace(row, owners=tuple(dict.fromkeys(labels.get(label, label) for label in row.owners)))
        for key, row in rows.items()
    }


def replicated_parameters(model: nn.Module, rows: Mapping[Key, ParameterPlan]) -> list[ReplicatedParameter]:
    """Return the replicated parameters, each once, in an order that is the same on all ranks. Local operation."""
    modules = {id(module): module for module in model.modules()}
    by_label = {
        row.label: ReplicatedParameter(row, modules[owner])
        for (owner, _), row in rows.items()
        if row.storage.is_replicated and row.label == row.owners[0]
    }
    return list(by_label.values())


# --- requests


def check_option(option: str, value: Any) -> str:
    """Return the value of an option of :data:`OPTIONS`; the error for other values suggests the most similar one."""
    options = OPTIONS[option]
    if isinstance(value, str) and value in options:
        return value
    elsewhere = {theirs: ours for ours, many in _OTHER_LIBRARIES[option].items() for theirs in many.split()}
    guess = suggest(value, options, elsewhere)
    fix = f"{option}={guess if guess is None or guess.startswith(chr(39)) else repr(guess)}"
    raise PlacementError(
        f"fully_shard: {option}",
        expected=f"one of {options}",
        got=repr(value),
        fix=fix if guess is not None else f"use one of these, or omit {option}",
    )


def find_units(
    model: nn.Module, units: UnitSpec | None, strategy: str | Mapping[type | str, str]
) -> dict[str, str]:
    """Map the root and the modules that become units to their strategies, outer before inner. Local operation.

    Args:
        model: The root.
        units: Classes or names; ``None``: every ``te.TransformerLayer``.
        strategy: One for all units, or one per class or name. A key applies to the module that it names, which becomes
            a unit, and to its submodules, unless they have a key of their own. ``""`` is the root. Modules without a
            key get :data:`DEFAULT_STRATEGY`.

    Raises:
        PlacementError: A class or name matches no module, or two classes select different strategies for a module.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    if units is None:
        layer = _te.module_class("TransformerLayer") if _te.is_loaded() else ()
        chosen = {name for name, module in names.items() if isinstance(module, layer)}
    else:
        selectors = units if isinstance(units, Iterable) and not isinstance(units, str) else [units]
        chosen = {name for selector in selectors for name in _find(names, selector)}
    strategies: dict[str, str] = {}
    if isinstance(strategy, Mapping):
        # Classes first, so that a name overrides the strategy of its class.
        for selector in sorted(strategy, key=lambda selector: isinstance(selector, str)):
            choice = check_option("strategy", strategy[selector])
            for name in _find(names, selector):
                other_name = isinstance(selector, str) and not selector.endswith(".*") and selector != name
                if (isinstance(selector, type) or other_name) and choice != strategies.get(name, choice):
                    raise PlacementError(
                        f"{name or 'model'}: two strategies",
                        expected="one class or name of the mapping that selects it, or equal strategies",
                        got=f"{strategies[name]} and {choice}",
                        fix="add the module's name to the mapping",
                    )
                for unit in _expand(names, name):
                    strategies[unit] = choice
        chosen |= strategies.keys()
    else:
        strategies[""] = check_option("strategy", strategy)
    # In the order of the model, outer units before inner ones, each module under its first name.
    inner = [name for name, _ in model.named_modules() if name in chosen and name]
    return {name: nearest_strategy(name, strategies) for name in ["", *inner]}


def _find(names: dict[str, nn.Module], selector: type | str) -> list[str]:
    """Return the names of the modules that a class, a name or a name with ``.*`` selects, each module once."""
    first: dict[int, str] = {}
    for name, module in names.items():
        first.setdefault(id(module), name)
    if isinstance(selector, type):
        matches = [n for n, m in names.items() if isinstance(m, selector)]
    elif not isinstance(selector, str):
        raise PlacementError(
            f"fully_shard: a {type(selector).__name__} as a unit or as a key of strategy",
            expected="a class, or a name in the tree",
            fix="use names of model.named_modules()",
        )
    elif selector.endswith(".*"):
        prefix = selector[:-1]
        matches = [n for n in names if n.startswith(prefix) and "." not in n[len(prefix) :]]
    else:
        matches = [selector] if selector in names else []
    if not matches:
        guess = None if isinstance(selector, type) or selector.endswith(".*") else suggest(selector, names)
        kinds = {type(module).__name__ for module in names.values()}
        raise PlacementError(
            f"fully_shard: unit {selector if isinstance(selector, str) else selector.__name__!r} matches no module",
            expected=f"a class or one of the names {shorten([n for n in names if n], 8)}",
            fix=f"pass the class {selector} itself, not its name"
            if selector in kinds
            else f"write {guess!r}, if you mean that module"
            if guess
            else "use names of model.named_modules()",
        )
    return list(dict.fromkeys(first[id(names[name])] for name in matches))


def _expand(names: dict[str, nn.Module], name: str) -> list[str]:
    """Return the module's name, or those of a container's children, because a container cannot be all-gathered."""
    if not name or not _unshardable.is_container(names[name]):
        return [name]
    return [unit for child, _ in names[name].named_children() for unit in _expand(names, f"{name}.{child}")]


def nearest_strategy(name: str, strategies: Mapping[str, str]) -> str:
    """Return the strategy of the innermost module around ``name`` that has one."""
    while name not in strategies and name:
        name = name.rpartition(".")[0]
    return strategies.get(name, DEFAULT_STRATEGY)


# --- errors


def _check_policies(request: ShardRequest) -> None:
    """Raise PrecisionError or PlacementError for policies of a wrong class, or several. One rank may raise alone."""
    if request.precision is not None and request.mp_policy is not None:
        raise PrecisionError(
            "fully_shard: precision and mp_policy",
            expected="only one of them",
            got="both",
            why="Each of them sets the dtypes of compute and reduction",
            fix="omit mp_policy",
        )
    for argument, value, kind in (
        ("precision", request.precision, MixedPrecisionPolicy),
        ("mp_policy", request.mp_policy, Fsdp2Policy),
    ):
        if value is not None and not isinstance(value, kind):
            raise PrecisionError(
                f"fully_shard: {argument}",
                expected=f"a {kind.__module__.split('.')[0]} MixedPrecisionPolicy",
                got=f"{type(value).__module__}.{type(value).__name__}",
                fix="pass precision=te_fsdp.MixedPrecisionPolicy(...), or "
                "mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
            )
    policy = request.offload_policy
    if policy is not None and type(policy) is not OffloadPolicy:  # torch's base class offloads nothing
        raise PlacementError(
            f"fully_shard: offload_policy={type(policy).__name__}",
            expected="None, or OffloadPolicy(): shards, gradients and optimizer state stay on the device",
            got=policy,
            why="Quantization, TE's optimizers, gradient norms and checks over ranks read shards on the device, and "
            "TE cannot quantize on the CPU",
            fix="omit it; to save device memory, use strategy='optim_grads_params', a larger dp_shard, "
            "outer_strategy='optim' or bf16 moments of FusedAdam",
        )
