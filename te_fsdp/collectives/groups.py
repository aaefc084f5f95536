"""Process groups that te_fsdp creates, shared by all models of a process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.upstream import torch_dtensor as _torch

#: The groups by default process group, so that they are dropped with it.
_groups: weakref.WeakKeyDictionary[Any, dict[Any, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


# [Note: shared groups] A process group uses threads and file descriptors until the program destroys it. torch
# cannot destroy one without a collective, so not when a model is garbage-collected. Models on the same ranks
# therefore share groups. This is safe because all ranks run their models in the same order. Each purpose
# within a model has its own group, since ranks may start the collectives of two purposes in different orders.
def shared_group(key: Any, make: Callable[[], Any]) -> Any:
    """Return the group of a key, and create it in the first call. All ranks of the group pass the same key."""
    groups = _groups.setdefault(dist.group.WORLD, {})
    if key not in groups:
        groups[key] = run_while_all_live(make)
    return groups[key]


def separate_group(
    root: DeviceMesh, axis: str, purpose: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a process group of the ranks of one axis, for one purpose.

    Collectives that ranks may start in different orders must not share a group, such as FSDP2's own and these when
    ranks use different units. The first call is collective over the world. Every rank creates the groups of all
    pipeline stages, since torch names groups by counting them. ``root`` is the mesh of the job, or of this rank's
    stage. ``backend=None``: the default backend of the job.
    """
    dim = (root.mesh_dim_names or ()).index(axis)
    stages = _torch.root_mesh(root).mesh.reshape(-1, *root.shape)
    rows = stages.movedim(dim + 1, -1).reshape(-1, root.size(dim)).tolist()

    def make() -> dist.ProcessGroup:
        group, _ = dist.new_subgroups_by_enumeration(rows, backend=backend)
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        return group

    return shared_group((purpose, backend, tuple(map(tuple, rows))), make)


def group_of_ranks(ranks: Sequence[int], purpose: str, backend: str | None = None) -> dist.ProcessGroup:
    """Return a process group of some ranks, for one purpose. The first call is collective over them."""
    members = tuple(sorted(ranks))

    def make() -> Any:
        return dist.new_group(list(members), backend=backend, use_local_synchronization=True)

    return shared_group((purpose, backend, members), make)


def ranks_along(mesh: DeviceMesh, axes: Collection[int]) -> list[int]:
    """Return the ranks that have this rank's coordinates on all other axes of a mesh, in its order. Local operation."""
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    index = tuple(slice(None) if axis in axes else place for axis, place in enumerate(coordinate))
    return mesh.mesh[index].flatten().tolist()
