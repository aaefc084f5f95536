"""Units of the parameters that are distributed over ``ep``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

from te_fsdp.errors import PlacementError, shorten
from te_fsdp.layout import Storage
from te_fsdp.mesh import Meshes
from te_fsdp.modules.grouped import Selection, find_experts
from te_fsdp.modules.plan import user_dtensors
from te_fsdp.modules.user_dtensors import place_user_dtensor
from te_fsdp.records import ParamOwner, param_owners
from te_fsdp.unshardable_models import MOST


# [Note: units of the user's DTensors] FSDP2 shards a parameter over fewer ranks if ``ep`` distributes it. A unit has
# one mesh, and FSDP2's outer units skip all modules of an inner unit. Therefore the module that reads the parameter
# becomes a separate unit, its children become units of the dense mesh, and small dense parameters of the module
# itself are replicated.
def expert_units(
    model: nn.Module, meshes: Meshes, experts: Selection, requested: Collection[str]
) -> set[str]:
    """Return the names of the modules that become units because of parameters over ``ep``. Local operation.

    These are the ``GroupedLinear`` modules of ``experts``, and the modules in [Note: units of the user's DTensors]. A
    requested unit whose parameters all belong to such modules is one unit for all of them: one all-gather, one
    reduce-scatter.
    """
    modules = dict(model.named_modules())
    owners = list(_sharded_over_ep(model, meshes))
    readers = {_reading_module(modules, owner.path) for owner in owners}
    grouped = find_experts(model, experts)
    units = readers | {name for name in grouped if not _has_unit(modules, name, grouped, requested)}
    units |= {child for reader in readers for child in _children(modules[reader], reader)}
    return units - ({owner.path for owner in owners} - readers)


def _has_unit(
    modules: Mapping[str, nn.Module], name: str, grouped: Collection[str], requested: Collection[str]
) -> bool:
    """Return whether the innermost requested unit around a ``GroupedLinear`` has no other parameters than experts'."""
    while name and name not in requested:
        name = name.rpartition(".")[0]
    expert_modules = {id(modules[name]) for name in grouped}
    return bool(name) and all(id(o.module) in expert_modules for o in param_owners(modules[name]))


def _sharded_over_ep(model: nn.Module, meshes: Meshes) -> Iterator[ParamOwner]:
    if meshes.ep is None:
        return
    for owner in param_owners(model):
        parameter = user_dtensors(owner.module).get(owner.name)
        if (
            parameter is not None
            and place_user_dtensor(owner.label, parameter, meshes.tp_or_none, meshes.ep).is_expert
        ):
            yield owner


def _reading_module(modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the name of the innermost module around a parameter whose forward may read it. FSDP2 needs its hooks."""
    while path:
        # TE's own forward does not read the parameter. The module that calls TE's module does.
        is_of_te = type(modules[path]).__module__.partition(".")[0] == "transformer_engine"
        if _has_forward(modules[path]) and not is_of_te:
            break
        path = path.rpartition(".")[0]
    return path


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not torch.nn.Module.forward


def _children(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the outermost modules with a forward and parameters below a module."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if not _has_forward(child):
            yield from _children(child, path)
        elif any(True for _ in child.parameters()):
            yield path


def dense_params_in_expert_units(
    model: nn.Module, meshes: Meshes, units: Mapping[str, Storage], experts: Selection
) -> set[int]:
    """Return the ``id`` of each dense parameter in a unit of experts, which must be replicated.

    Raises PlacementError if they are too large to replicate.
    """
    expert_owners = list(_sharded_over_ep(model, meshes))
    if not expert_owners:
        return set()
    names = dict(model.named_modules())
    modules = {id(names[name]) for name in find_experts(model, experts)}
    expert_params = {id(owner.parameter) for owner in expert_owners}
    readers = {_reading_module(names, owner.path) for owner in expert_owners}
    replicated = set()
    for unit in readers:
        if units[unit].is_replicated:
            continue
        once: dict[int, ParamOwner] = {}
        for owner in param_owners(model):
            path = owner.path
            while path not in units:
                path = path.rpartition(".")[0]
            if path == unit and id(owner.module) not in modules and id(owner.parameter) not in expert_params:
                once[id(owner.parameter)] = owner
        elements = sum(owner.parameter.numel() for owner in once.values())
        if elements > MOST:
            raise PlacementError(
                f"{shorten([owner.label for owner in once.values()], 3)}: dense parameters of module "
                f"{unit or 'the root'}, which has DTensor parameters over ep",
                expected=f"at most {MOST:,} elements, which are replicated",
                got=f"{elements:,} elements",
                why="FSDP2 shards the parameters of one module over one mesh",
                fix="register them in a submodule with a forward, or call te_fsdp.fsdp_no_shard(parameter)",
            )
        replicated.update(once)
    return replicated
