"""``broadcast_params``: make all copies of each replicated parameter equal."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from te_fsdp.collectives.redistribute import broadcast
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.features.param_gather import release_params
from te_fsdp.mesh_checks import AXES
from te_fsdp.quantized.boxed import weights_of
from te_fsdp.quantized.components import components_of, drop_derived_state
from te_fsdp.records import ParamOwner, first_owners, plan_of, require_model, require_optimizer
from te_fsdp.sharded_model import ShardedModel, get_sharded_model, mesh_of
from te_fsdp.upstream import te as _te, torch_dtensor as _torch


def replica_groups_of_dtensor(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that have identical copies of a parameter, by its mesh."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, axes = parameter.device_mesh, enumerate(parameter.placements)
    return [mesh.get_group(axis) for axis, p in axes if p.is_replicate() and mesh.size(axis) > 1]


def replica_groups_of_plan(state: ShardedModel, owner: ParamOwner) -> list[dist.ProcessGroup]:
    """Return the groups of data-parallel ranks that have identical copies of a parameter outside its mesh."""
    plan, meshes = plan_of(owner.parameter) or state.plans.get(owner.label), state.meshes
    if plan is None:
        return []  # registered by the user after fully_shard
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    axes = owner.parameter.device_mesh.mesh_dim_names if isinstance(owner.parameter, DTensor) else ()
    replicated = [axis for axis, letter in zip(AXES, plan.storage.parameter, strict=False) if letter == "R"]
    return [root.get_group(axis) for axis in replicated if axis not in (axes or ()) and root[axis].size() > 1]


def broadcast_params(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Broadcast every replicated parameter from the first rank that has it; all copies are then bitwise equal.

    Use it after values were written on single ranks, or after steps of an optimizer that is not torch's (with torch's
    optimizer hooks, te_fsdp keeps copies equal). Copies exist over tp, over ``dp_replicate``, and over data parallel
    for parameters that are not sharded. Unsharded weights are freed.

    Collective over every axis along which a parameter is replicated: call on all ranks.

    Args:
        model: The sharded model, from :func:`te_fsdp.fully_shard`, or from :func:`te_fsdp.set_device_mesh` only. In
            the second case copies over data parallel are not broadcast.
        optimizer: Also broadcast its states: tensors with the shape of their parameter's shard.

    Raises:
        OrderError: The call is made during backward.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    require_model(model, "broadcast_params(model)")
    if optimizer is not None:
        require_optimizer(optimizer, "broadcast_params")
    mesh = mesh_of(model)
    with torch.no_grad(), collective_call("broadcast_params", mesh) if mesh is not None else nullcontext():
        state = get_sharded_model(model)
        if state is not None:
            # Unsharded copies would keep the values from before the broadcast.
            release_params(model)
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        quantized = []
        for owner in first_owners(model).values():
            parameter, local = owner.parameter, _torch.local_of(owner.parameter)
            buffers = [local]
            if _te.is_quantized(local):
                # The bytes and scales themselves are sent, so that copies are equal without quantizing again.
                components = [components_of(weight, "broadcast_params") for weight in weights_of(local)]
                buffers = [component.tensor for of_weight in components for component in of_weight]
                quantized.append(local)
            states = optimizer.state.get(parameter, {}).values() if optimizer is not None else ()
            # Step counters and other states of a different shape do not follow the parameter's placement.
            shapes = (parameter.shape, local.shape)
            states = [s for s in states if isinstance(s, torch.Tensor) and s.shape in shapes]
            for group in replica_groups_of_dtensor(parameter):
                by_group.setdefault(group, []).extend([*buffers, *map(_torch.local_of, states)])
            # States that are not sharded over further axes are equal on data-parallel ranks.
            axes = parameter.device_mesh.ndim if isinstance(parameter, DTensor) else 0
            unsharded = [s for s in states if not isinstance(s, DTensor) or s.device_mesh.ndim <= axes]
            for group in replica_groups_of_plan(state, owner) if state is not None else ():
                by_group.setdefault(group, []).extend([*buffers, *map(_torch.local_of, unsharded)])
        for group, tensors in by_group.items():
            broadcast(tensors, group)
        for local in quantized:
            # TE has derived transposes and other buffers from data that are overwritten now.
            drop_derived_state(local)
