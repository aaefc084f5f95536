"""Megatron-FSDP's device meshes as :class:`te_fsdp.Meshes`, and its index of process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp.errors import MeshError, message
from te_fsdp.mesh import Meshes, default_device_type

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FSDPDistributedIndex", "native_meshes"]


def native_meshes(
    device_mesh: DeviceMesh | None,
    dp_shard_dim: str | None,
    dp_outer_dim: str | None,
    tp_dim: str | None,
    expt_device_mesh: DeviceMesh | None = None,
) -> Meshes:
    """te_fsdp's meshes over the ranks of a mesh whose axes have other names. Collective over the world.

    Args:
        device_mesh: Any mesh, or ``None`` for all ranks in one axis.
        dp_shard_dim: The axis that shards; may be the name of a flattened one.
        dp_outer_dim: The axis of HSDP or HFSDP, or ``None``.
        tp_dim: The tensor-parallel axis, or ``None``.
        expt_device_mesh: Mesh of expert parameters with the same names; its ``dp_shard_dim`` is the shorter by the
            expert-parallel size.

    Raises:
        MeshError: A name that the mesh lacks, axes that do not take in all ranks, or an order of ranks that differs
            from te_fsdp's (outer, shard, tp).
    """
    device_type = device_mesh.device_type if device_mesh is not None else default_device_type()
    if device_mesh is None:
        return Meshes.build(device_type=device_type)
    sizes, places = {}, []
    for axis, name in (("dp_replicate", dp_outer_dim), ("dp_shard", dp_shard_dim), ("tp", tp_dim)):
        submesh = _axis(device_mesh, name, axis)
        sizes[axis] = submesh.size() if submesh is not None else 1
        places.append(submesh.get_local_rank() if submesh is not None else 0)
    ep, experts = 1, None
    if expt_device_mesh is not None:
        experts = _axis(expt_device_mesh, dp_shard_dim, "dp_shard")
        ep = _expert_parallel(sizes["dp_shard"], experts.size() if experts is not None else 1)
    meshes = Meshes.build(
        dp_replicate=sizes["dp_replicate"],
        dp_shard=sizes["dp_shard"] // ep,
        ep=ep,
        tp=sizes["tp"],
        device_type=device_type,
    )
    mine = list(meshes.device_mesh.get_coordinate() or ())
    if meshes.expert_mesh is not None:
        mine.append(meshes.expert_mesh["dp_shard"].get_local_rank())
        places.append(experts.get_local_rank() if experts is not None else 0)
    _check_order(meshes, mine, places)
    return meshes


def _expert_parallel(shards: int, expert_shards: int) -> int:
    """Size of the expert-parallel axis: the rest of those that shard dense parameters."""
    if shards % expert_shards:
        raise MeshError(
            message(
                "fully_shard: expt_device_mesh",
                expected=f"a dp_shard_dim whose size divides that of device_mesh, {shards}",
                got=expert_shards,
                fix="let the axes of expt_device_mesh take in the ranks that device_mesh does",
            )
        )
    return shards // expert_shards


def _axis(mesh: DeviceMesh, name: str | None, role: str) -> DeviceMesh | None:
    """The 1-D submesh of a name."""
    if name is None:
        return None
    try:
        return mesh[name]
    except (KeyError, RuntimeError, ValueError) as error:
        raise MeshError(
            message(
                f"fully_shard: axis {name!r} for {role}",
                expected=f"one of {mesh.mesh_dim_names}, or a flattened axis of this mesh",
                got=str(error),
            )
        ) from error


def _check_order(meshes: Meshes, mine: Sequence[int], places: Sequence[int]) -> None:
    """Every rank must have the same place on te_fsdp's meshes and on the given ones; all ranks raise the same."""
    wrong = torch.tensor([int(list(mine) != list(places))], device=meshes.device)
    dist.all_reduce(wrong, op=dist.ReduceOp.MAX)
    if wrong.item():
        raise MeshError(
            message(
                "fully_shard: device_mesh or expt_device_mesh",
                expected="ranks in the order (outer, shard, tp), of experts (outer, shard, ep, tp), the last varying "
                "fastest",
                got="another order",
                why="te_fsdp's meshes number their ranks that way",
                fix="init_device_mesh(device, (outer, shard, tp), mesh_dim_names=...)",
            )
        )


class FSDPDistributedIndex:
    """Megatron-FSDP's lookup of process groups and meshes, over :class:`te_fsdp.Meshes`.

    Attributes:
        meshes: The meshes themselves.
    """

    def __init__(self, meshes: Meshes) -> None:
        self.meshes = meshes

    def _mesh(self, is_expert_parallel: bool) -> DeviceMesh:
        if is_expert_parallel:
            return self.meshes.expert_fsdp_with_size_one
        return self.meshes.fsdp_with_size_one

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """The mesh with all axes."""
        expert = self.meshes.expert_mesh
        return expert if is_expert_parallel and expert is not None else self.meshes.device_mesh

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """A part of :meth:`get_root_mesh` by te_fsdp's names of axes."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        return self.get_root_mesh(is_expert_parallel)[names]

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup:
        """The group that weights are sharded over."""
        mesh = self._mesh(is_expert_parallel)
        return mesh.get_group(mesh.ndim - 1)

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """The group of HSDP's or HFSDP's outer axis, ``None`` without one."""
        mesh = self._mesh(is_expert_parallel)
        return mesh.get_group(0) if mesh.ndim == 2 else None

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup:
        """All ranks among which gradients are averaged. Collective over the world at the first call."""
        mesh = self._mesh(is_expert_parallel)
        if mesh.ndim == 1:
            return mesh.get_group()
        from te_fsdp import _torch

        return _torch.flatten_mesh(mesh, "expert_dp" if is_expert_parallel else "dp").get_group()

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """This rank's place when parameters are cut over the shard axis first and then over the outer one."""
        mesh = self._mesh(is_expert_parallel)
        if mesh.ndim == 1:
            return int(mesh.get_local_rank())
        outer, inner = mesh.get_coordinate() or (0, 0)
        return int(inner * mesh.size(0) + outer)
