"""Process groups of the ranks that store the same copy of a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from te_fsdp.mesh_checks import AXES
from te_fsdp.records import plan_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from te_fsdp.records import ParamOwner
    from te_fsdp.sharded_model import ShardedModel


def replica_groups_of_dtensor(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that have identical copies of a parameter, by its own mesh."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, axes = parameter.device_mesh, enumerate(parameter.placements)
    return [mesh.get_group(axis) for axis, p in axes if p.is_replicate() and mesh.size(axis) > 1]


def replica_groups_of_plan(state: ShardedModel, owner: ParamOwner) -> list[dist.ProcessGroup]:
    """Return the groups of data-parallel ranks that have identical copies of a parameter outside its own mesh."""
    plan, meshes = plan_of(owner.parameter) or state.plans.get(owner.label), state.meshes
    if plan is None:
        return []  # the user's own, since fully_shard
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    axes = owner.parameter.device_mesh.mesh_dim_names if isinstance(owner.parameter, DTensor) else ()
    alike = [axis for axis, letter in zip(AXES, plan.storage.parameter, strict=False) if letter == "R"]
    return [root.get_group(axis) for axis in alike if axis not in (axes or ()) and root[axis].size() > 1]
