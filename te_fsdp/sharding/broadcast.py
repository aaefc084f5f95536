"""``broadcast_params``: copies of parameters made equal, whoever holds them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.all_ranks import collective_call
from te_fsdp.axes import AXES
from te_fsdp.move.start import broadcast
from te_fsdp.parameters import Place, places_of, plan_of
from te_fsdp.quantized.components import components_of, finish_writing
from te_fsdp.sharding.gathers import release_params
from te_fsdp.sharding.state import mesh_of, sharding_state

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn
    from torch.optim import Optimizer

    from te_fsdp.sharding.state import ShardingState

__all__ = ["broadcast_params"]


def broadcast_params(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Make all copies of every parameter equal to that of the first rank which holds it, bit for bit.

    Mends copies that have drifted apart, over tp, over ``dp_replicate``, or over data parallel where parameters are not
    sharded: after an optimizer that is not one of torch's (te_fsdp keeps copies equal through torch's optimizer hooks),
    or after values that were written rank by rank. Gathered weights are released.

    Collective over every axis along which a parameter is replicated: call on all ranks.

    Args:
        model: The sharded model: that of :func:`te_fsdp.fully_shard`, or of :func:`te_fsdp.set_device_mesh` alone,
            where nothing is known of data parallelism.
        optimizer: Also make its states equal: tensors of the shape of their parameter's shard.

    Raises:
        OrderError: A call from inside of backward.
        CollectiveError: Some ranks did not make the call within :func:`te_fsdp.set_collective_timeout`.
    """
    mesh = mesh_of(model)
    with collective_call("broadcast_params", mesh) if mesh is not None else nullcontext():
        _make_equal(model, optimizer)


@torch.no_grad()
def _make_equal(model: nn.Module, optimizer: Optimizer | None) -> None:
    """:func:`broadcast_params`, once all ranks have come."""
    state = sharding_state(model)
    if state is not None:
        release_params(model)
    places: dict[int, Place] = {}
    for place in places_of(model):
        places.setdefault(id(place.parameter), place)
    found: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    quantized = []
    for place in places.values():
        parameter, local = place.parameter, _torch.local_of(place.parameter)
        buffers = [local]
        if _te.is_quantized(local):
            buffers = [component.tensor for component in components_of(local, "broadcast_params")]
            quantized.append(local)
        states = optimizer.state.get(parameter, {}).values() if optimizer is not None else ()
        shapes = (parameter.shape, local.shape)
        states = [s for s in states if isinstance(s, torch.Tensor) and s.shape in shapes]
        for group in _own_groups(parameter):
            found.setdefault(group, []).extend([*buffers, *map(_torch.local_of, states)])
        # Data-parallel ranks hold those states alike that are not cut over further axes.
        whole = [_torch.local_of(s) for s in states if _axes(s) <= _axes(parameter)]
        for group in _holders(state, place) if state is not None else ():
            found.setdefault(group, []).extend([*buffers, *whole])
    for group, tensors in found.items():
        broadcast(tensors, group)
    for local in quantized:
        finish_writing(local)


def _axes(tensor: torch.Tensor) -> int:
    """Number of axes of a DTensor's mesh, 0 for a plain tensor."""
    return tensor.device_mesh.ndim if isinstance(tensor, DTensor) else 0


def _own_groups(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """Groups of ranks that hold a parameter alike, by its own mesh."""
    if not isinstance(parameter, DTensor):
        return []
    mesh, axes = parameter.device_mesh, enumerate(parameter.placements)
    return [mesh.get_group(axis) for axis, p in axes if p.is_replicate() and mesh.size(axis) > 1]


def _holders(state: ShardingState, place: Place) -> list[dist.ProcessGroup]:
    """Groups of data-parallel ranks that hold a parameter alike, of which its own mesh says nothing."""
    plan, meshes = plan_of(place.parameter) or state.plans.get(place.label), state.meshes
    if plan is None:
        return []  # the user's own, since fully_shard
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    own = place.parameter.device_mesh.mesh_dim_names if isinstance(place.parameter, DTensor) else ()
    alike = [axis for axis, letter in zip(AXES, plan.storage.parameter, strict=False) if letter == "R"]
    return [root.get_group(axis) for axis in alike if axis not in (own or ()) and root[axis].size() > 1]
