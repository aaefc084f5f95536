"""Bound units of torch's own ``fully_shard`` after a step or an evaluation.

FSDP2 keeps the root unsharded after a forward, and any unit with ``reshard_after_forward=False`` or
``set_reshard_after_backward(False)``. A step then updates the shards, and the next forward reads the unsharded weights
from before the step, without an error. After an evaluation ``model.parameters()`` would return unsharded parameters,
whose changes the next reshard drops.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.errors import MeshError
from te_fsdp.lifecycle import Step, runs_if
from te_fsdp.mesh_checks import check_ascending
from te_fsdp.records import binding_of, get_record, module_record
from te_fsdp.upstream import (
    fsdp2_state as _fsdp2,
    fsdp2_units,
    te_modules as _te_modules,
    torch_dtensor as _torch,
)
from te_fsdp.upstream.torch_autograd import current_node, refuse_hooks, second_backward, second_derivatives
from te_fsdp.upstream.torch_mixed_lists import foreach_writes
from te_fsdp.upstream.torch_rows import sharding_meshes

#: The models of ``set_device_mesh`` and FSDP2's roots of them. Their unsharded units are resharded after every step of
#: their optimizer.
bound_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def unsharded_params() -> Iterator[torch.Tensor]:
    """Yield the unsharded parameters of bound units that FSDP2 has all-gathered at least once. Local operation."""
    for model in list(bound_models):
        for unit in model.modules() if module_record(model).sharded is None else ():
            if fsdp2_units.is_fsdp_module(unit):
                for parameter, managed in _fsdp2.unsharded_parameters(unit):
                    if parameter is not _fsdp2.sharded_param_of(managed):
                        yield parameter


def explain_mesh(meshes: list[DeviceMesh], error: Exception) -> None:
    """Raise for a mesh that torch's ``fully_shard`` cannot combine with the one of a bound parameter. Local operation.

    ``meshes`` are those of the call and of the parameter; ``error`` is torch's.
    """
    for model in list(bound_models):
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor) and parameter.device_mesh is meshes[-1]:
                raise MeshError(
                    f"fully_shard: mesh of a unit of {type(model).__name__}, whose {name} is on {meshes[-1]}",
                    expected="data-parallel axes with names, of the mesh from which tp_mesh and ep_mesh were sliced",
                    got=f"{meshes[0]}; without mesh= torch takes one axis over all ranks",
                    why=f"FSDP2 adds the axes of the parameter to those of the call ({error})",
                    fix='fully_shard(module, mesh=mesh["dp_shard"]), or mesh=te_fsdp.Meshes(...).fsdp',
                ) from error


@runs_if("has_bound_params")
def reshard_units(step: Step) -> None:
    """Reshard bound units that are unsharded and have parameters in the optimizer. Local operation."""
    stepped: set[int] | None = None
    for model in list(bound_models):
        # ``te_fsdp.fully_shard`` releases its own units.
        for unit in model.modules() if module_record(model).sharded is None else ():
            if not fsdp2_units.is_fsdp_module(unit) or not _fsdp2.is_unit_unsharded(unit):
                continue
            if stepped is None:
                stepped = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
            if not stepped.isdisjoint(map(id, _fsdp2.sharded_parameters(unit))):
                unit.reshard()  # type: ignore[operator]


def reshard_after_evaluations(module: nn.Module, shard: torch.Tensor | None) -> None:
    """Register the shards of the units around a bound module after forwards without gradients. Local operation.

    ``shard`` is a parameter of the module that FSDP2 unshards for the first time.
    """
    record = None if shard is None else get_record(shard)
    if isinstance(shard, DTensor):
        sharding_meshes[id(shard.device_mesh)] = shard.device_mesh
    if record is not None and record.state is not None:
        return  # te_fsdp.fully_shard keeps its units
    if isinstance(shard, DTensor):
        check_ascending(shard.device_mesh, "mesh of FSDP2", type(module).__name__)
    around = fsdp2_units.units_around(module)
    # A forward of another model may have raised, and is then still in progress.
    for root in [root for root in fsdp2_units.roots_in_forward() if root in around] or around:
        if _end_evaluation in module_record(root).hooks:
            continue
        bound_models.add(root)  # if it has bound parts, and was not itself bound
        for unit in filter(fsdp2_units.is_fsdp_module, root.modules()):
            refuse_hooks(fsdp2_units.named_shards(unit))
            if _end_evaluation not in (hooks := module_record(unit).hooks):
                hooks.add(_end_evaluation)
                unit.register_forward_hook(_torch.disable_compile(_end_evaluation))
                unit.register_forward_pre_hook(_torch.disable_compile(_before_forward), prepend=True)
                fsdp2_units.after_methods(unit, _end_evaluation)
                fsdp2_units.before_unshard(unit, functools.partial(_restore, unit))


def _before_forward(unit: nn.Module, args: Any) -> None:
    if _torch.backward_id() != -1:
        _fsdp2.allow_recompute(unit)


def _end_evaluation(unit: nn.Module, args: Any, output: Any) -> None:
    """Register the shards of all units after the outermost forward of a unit without gradients. Local operation."""
    if torch.is_grad_enabled() or _torch.backward_id() != -1 or fsdp2_units.is_root_in_forward(unit):
        return
    for inner in _fsdp2.units_of_tree(unit):
        if not _fsdp2.is_unit_unsharded(inner) or fsdp2_units.is_kept_root(inner):
            # No backward follows, for which FSDP2 keeps the root, or shards units over fewer ranks.
            inner.reshard()  # type: ignore[operator]
            continue
        # With ``reshard_after_forward=False`` the next forward needs no all-gather, unless the shards change.
        register_shards(inner)
        for group in fsdp2_units.fsdp_parameter_groups(inner):
            group_record = fsdp2_units.record_of_group(group)
            if group_record.exposed is None:
                group_record.exposed = _torch.versions_of(fsdp2_units.shards_of(group))
                foreach_writes().count(group)


def _restore(unit: nn.Module, group: Any) -> None:
    """Register a group's unsharded parameters again before it is used; free them if the shards changed. Local."""
    group_record = fsdp2_units.record_of_group(group)
    versions, group_record.exposed = group_record.exposed, None
    before, group_record.backward = group_record.backward, _torch.backward_id()
    if group_record.backward != -1 and (torch.is_grad_enabled() or before not in (-1, group_record.backward)):
        _refuse_second(group)
    if versions is None:
        return
    foreach_writes().ignore(group)
    if _torch.versions_of(fsdp2_units.shards_of(group)) != versions:
        fsdp2_units.free_group(group)
    elif _fsdp2.is_unit_unsharded(unit):
        register_unsharded(unit)


def _refuse_second(group: Any) -> None:
    """Raise for a backward with ``create_graph=True``, or a second one through a forward of TE. Local operation."""
    if torch.is_grad_enabled():
        if fsdp2_units.is_in_backward(group):  # not in a forward that recomputes activations
            raise second_derivatives(fsdp2_units.name_of_group(group))
    elif _te_modules.is_graph_consumed(current_node()):
        raise second_backward(fsdp2_units.name_of_group(group))


def register_shards(unit: nn.Module) -> None:
    """Register the sharded parameters of an unsharded unit in its modules. No memory is freed. Local operation."""
    for parameter, managed in _fsdp2.unsharded_parameters(unit):
        for module, attr in fsdp2_units.owners_of(managed):
            if module._parameters.get(attr) is parameter:
                _set_shard_exposed(module, attr, True)
                # Not by an assignment, after which a quantized weight would free its data.
                module._parameters[attr] = _fsdp2.sharded_param_of(managed)


def register_unsharded(unit: nn.Module) -> None:
    """Undo :func:`register_shards`. Local operation."""
    for parameter, managed in _fsdp2.unsharded_parameters(unit):
        shard = _fsdp2.sharded_param_of(managed)
        # The user may have frozen the sharded parameter, which model.parameters() returned meanwhile.
        if parameter.requires_grad != shard.requires_grad:
            parameter.requires_grad_(shard.requires_grad)
        for module, attr in fsdp2_units.owners_of(managed):
            _set_shard_exposed(module, attr, False)
            setattr(module, attr, parameter)


def _set_shard_exposed(module: nn.Module, name: str, is_shard_exposed: bool) -> None:
    binding = binding_of(module)
    pair = None if binding is None else binding.fsdp.pairs.get(name)
    if pair is not None:
        pair.is_shard_exposed = is_shard_exposed
