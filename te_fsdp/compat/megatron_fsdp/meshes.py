"""Megatron-FSDP's device meshes as :class:`te_fsdp.Meshes`, and its index of process groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.agree import on_any_rank
from te_fsdp.errors import MeshError
from te_fsdp.mesh import Meshes, default_device_type

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def native_meshes(
    device_mesh: DeviceMesh,
    dp_shard_dim: str | None,
    dp_outer_dim: str | None,
    tp_dim: str | None,
    expt_device_mesh: DeviceMesh | None = None,
) -> Meshes:
    """te_fsdp's meshes over the ranks of a mesh whose axes have other names. Collective over the world.

    Args:
        device_mesh: Any mesh.
        dp_shard_dim: The axis that shards; may be the name of a flattened one.
        dp_outer_dim: The axis of HSDP or HFSDP, or ``None``.
        tp_dim: The tensor-parallel axis, or ``None``.
        expt_device_mesh: Mesh of expert parameters with the same names; its ``dp_shard_dim`` is the shorter by the
            expert-parallel size.

    Raises:
        MeshError: A name that the mesh lacks, axes that do not take in all ranks, or an order of ranks that differs
            from te_fsdp's (outer, shard, tp).
    """
    device_type = device_mesh.device_type
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
    _check_order(mine, places)
    return meshes


def _expert_parallel(shards: int, expert_shards: int) -> int:
    """Size of the expert-parallel axis: the rest of those that shard dense parameters."""
    if shards % expert_shards:
        raise MeshError(
            "fully_shard: expt_device_mesh",
            expected=f"a dp_shard_dim whose size divides that of device_mesh, {shards}",
            got=expert_shards,
            fix="let the axes of expt_device_mesh take in the ranks that device_mesh does",
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
            f"fully_shard: axis {name!r} for {role}",
            expected=f"one of {mesh.mesh_dim_names}, or a flattened axis of this mesh",
            got=str(error),
        ) from error


def _check_order(mine: Sequence[int], places: Sequence[int]) -> None:
    """Every rank must have the same place on te_fsdp's meshes and on the given ones; all ranks raise the same."""
    if on_any_rank(list(mine) != list(places)):
        raise MeshError(
            "fully_shard: device_mesh or expt_device_mesh",
            expected="ranks in the order (outer, shard, tp), of experts (outer, shard, ep, tp), the last varying "
            "fastest",
            got="another order",
            why="te_fsdp's meshes number their ranks that way",
            fix="init_device_mesh(device, (outer, shard, tp), mesh_dim_names=...)",
        )


def default_index(dp_shard_dim: str | None = None, tp_dim: str | None = None) -> FSDPDistributedIndex:
    """All ranks in one axis that shards, with a tp axis of size 1. Collective over the world.

    Args:
        dp_shard_dim: Name of that axis; ``None``: ``"fsdp"``.
        tp_dim: Name of the tp axis; ``None``: ``"tp"``.
    """
    meshes = Meshes.build(device_type=default_device_type())  # starts torch.distributed
    names = (dp_shard_dim or "fsdp", tp_dim or "tp")
    mesh = dist.init_device_mesh(meshes.device_type, (dist.get_world_size(), 1), mesh_dim_names=names)
    index = FSDPDistributedIndex(mesh, dp_shard_dim=names[0], tp_dim=names[1])
    index.meshes = meshes
    return index


class FSDPDistributedIndex:
    """Megatron-FSDP's lookup of process groups and meshes, by the names that the user's own meshes have.

    Args:
        device_mesh: The mesh; its axes have the names below, or are flattened to them.
        dp_shard_dim: The axis that shards; it must be named.
        dp_outer_dim: The axis of HSDP or HFSDP, or ``None``.
        tp_dim: The tensor-parallel axis, or ``None``.
        hybrid_fsdp_group: What :meth:`get_dp_group` gives with ``dp_outer_dim``; ``None``: made when asked for.
        hybrid_fsdp_expt_group: The same for experts.
        hsdp_outer_dp_shard: Whether optimizer state is cut over ``dp_outer_dim`` (HFSDP).
        expt_device_mesh: Mesh of expert parameters, with the same names.
        fsdp_group_ag: What ``get_fsdp_group(independent_all_gather=True)`` gives; no gather uses it.
        expt_fsdp_group_ag: The same for experts.

    Attributes:
        use_hybrid_fsdp: Whether there is a ``dp_outer_dim``.
        fsdp_group: Group of ``dp_shard_dim``.
        outer_fsdp_group: Group of ``dp_outer_dim``, or ``None``.
        expt_fsdp_group: Group of ``dp_shard_dim`` of ``expt_device_mesh``, or ``None``.
        expt_outer_fsdp_group: Group of ``dp_outer_dim`` of ``expt_device_mesh``, or ``None``.

    The arguments are attributes as well. Local operation.

    Raises:
        MeshError: No ``dp_shard_dim``, or a name that a mesh lacks.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        dp_shard_dim: str | None = None,
        dp_outer_dim: str | None = None,
        tp_dim: str | None = None,
        hybrid_fsdp_group: dist.ProcessGroup | None = None,
        hybrid_fsdp_expt_group: dist.ProcessGroup | None = None,
        hsdp_outer_dp_shard: bool = False,
        expt_device_mesh: DeviceMesh | None = None,
        fsdp_group_ag: dist.ProcessGroup | None = None,
        expt_fsdp_group_ag: dist.ProcessGroup | None = None,
    ) -> None:
        self.device_mesh = device_mesh
        self.dp_shard_dim, self.dp_outer_dim, self.tp_dim = dp_shard_dim, dp_outer_dim, tp_dim
        self.hybrid_fsdp_group, self.hybrid_fsdp_expt_group = hybrid_fsdp_group, hybrid_fsdp_expt_group
        self.use_hybrid_fsdp = dp_outer_dim is not None
        self.hsdp_outer_dp_shard = hsdp_outer_dp_shard
        self.expt_device_mesh = expt_device_mesh
        self.fsdp_group_ag, self.expt_fsdp_group_ag = fsdp_group_ag, expt_fsdp_group_ag
        if dp_shard_dim is None:
            raise MeshError(
                "FSDPDistributedIndex: dp_shard_dim",
                expected=f"the axis that shards, one of {device_mesh.mesh_dim_names}",
                got=None,
                fix="dp_shard_dim=...",
            )
        self.fsdp_group = self._group(dp_shard_dim, False)
        self.outer_fsdp_group = self._group(dp_outer_dim, False)
        self.expt_fsdp_group = self._group(dp_shard_dim, True)
        self.expt_outer_fsdp_group = self._group(dp_outer_dim, True)
        if tp_dim is not None:
            self.get_submesh(tp_dim)

    @functools.cached_property
    def meshes(self) -> Meshes:
        """The same ranks by te_fsdp's names. Collective over the world at the first use."""
        names = (self.dp_shard_dim, self.dp_outer_dim, self.tp_dim)
        return native_meshes(self.device_mesh, *names, self.expt_device_mesh)

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """The mesh that was given, or that of experts."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str] | None, is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """A part of :meth:`get_root_mesh`, by its own names of axes. Local operation.

        Raises:
            MeshError: No such axis, or no mesh of experts.
        """
        mesh = self.get_root_mesh(is_expert_parallel)
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names or ())
        try:
            if mesh is None or not names:
                raise KeyError(mesh_dim_names)
            return mesh[names[0] if len(names) == 1 else names]
        except (KeyError, RuntimeError, ValueError) as error:
            raise MeshError(
                f"FSDPDistributedIndex.get_submesh({mesh_dim_names!r}, {is_expert_parallel=})",
                expected=f"axes of {getattr(mesh, 'mesh_dim_names', None)}, or flattened ones of that mesh",
                got=str(error),
                fix="name an axis of size 1 where there is none, also tp_dim",
            ) from error

    def _group(self, name: str | None, is_expert_parallel: bool) -> dist.ProcessGroup | None:
        if name is None or self.get_root_mesh(is_expert_parallel) is None:
            return None
        return self.get_submesh(name, is_expert_parallel).get_group()

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """The group that weights are sharded over; that of experts is ``None`` without a mesh of theirs."""
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return self.expt_fsdp_group if is_expert_parallel else self.fsdp_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """The group of HSDP's or HFSDP's outer axis, ``None`` without one."""
        return self.expt_outer_fsdp_group if is_expert_parallel else self.outer_fsdp_group

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """The ranks that hold parts or copies of the same parameters: with an outer axis, that and the one that shards.

        Collective over the world at the first call with an outer axis whose group was not given.
        """
        if not self.use_hybrid_fsdp or (is_expert_parallel and self.expt_device_mesh is None):
            return self.get_fsdp_group(is_expert_parallel)
        given = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        if given is not None:
            return given
        meshes = self.meshes
        mesh = meshes.expert_fsdp_with_size_one if is_expert_parallel else meshes.fsdp_with_size_one
        if mesh.ndim == 1:
            return mesh.get_group()
        return _torch.flatten_mesh(mesh, "expert_dp" if is_expert_parallel else "dp").get_group()

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """This rank's place when parameters are cut over the axis that shards first and then over the outer one.

        Raises:
            MeshError: Optimizer state is not cut over an outer axis.
        """
        outer, inner = self.get_outer_fsdp_group(is_expert_parallel), self.get_fsdp_group(is_expert_parallel)
        if not self.hsdp_outer_dp_shard or outer is None or inner is None:
            raise MeshError(
                "FSDPDistributedIndex.get_logical_hybrid_fsdp_rank",
                expected="HFSDP: hsdp_outer_dp_shard=True with a dp_outer_dim",
                got=f"hsdp_outer_dp_shard={self.hsdp_outer_dp_shard}, dp_outer_dim={self.dp_outer_dim!r}",
                fix="outer_dp_sharding_strategy='optim'; without an outer axis use get_fsdp_group().rank()",
            )
        return inner.rank() * outer.size() + outer.rank()
