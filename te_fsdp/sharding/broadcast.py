"""``broadcast_params``: copies of parameters made equal, whoever holds them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from te_fsdp.all_ranks import collective_call
from te_fsdp.axes import AXES
from te_fsdp.modules.copies import make_equal
from te_fsdp.parameters import Place, places_of
from te_fsdp.sharding.gathers import release_params
from te_fsdp.sharding.state import mesh_of, sharding_state

if TYPE_CHECKING:
    import torch
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


def _make_equal(model: nn.Module, optimizer: Optimizer | None) -> None:
    """:func:`broadcast_params`, once all ranks have come."""
    state = sharding_state(model)
    if state is not None:
        release_params(model)
    held: dict[int, tuple[torch.Tensor, list[dist.ProcessGroup]]] = {}
    for place in places_of(model):
        groups = _holders(state, place) if state is not None else []
        held.setdefault(id(place.parameter), (place.parameter, groups))
    make_equal(held.values(), optimizer)


def _holders(state: ShardingState, place: Place) -> list[dist.ProcessGroup]:
    """Groups of data-parallel ranks that hold a parameter alike, of which its own mesh says nothing."""
    plan, meshes = state.plans[place.label], state.meshes
    root = meshes.expert_mesh if plan.experts and meshes.expert_mesh is not None else meshes.device_mesh
    own = place.parameter.device_mesh.mesh_dim_names if isinstance(place.parameter, DTensor) else ()
    alike = [axis for axis, letter in zip(AXES, plan.storage.parameter, strict=False) if letter == "R"]
    return [root.get_group(axis) for axis in alike if axis not in (own or ()) and root[axis].size() > 1]
