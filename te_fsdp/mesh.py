"""Meshes: one validated object for the device meshes that a sharded TE model needs.

    axes        dp_replicate   dp_shard   tp
    .fsdp       [------------------]               (or dp_shard alone): what FSDP2 shards and replicates over
    .tp                                   [--]     what TE's tensor parallelism cuts weights over
    .weight                    [-------------]     all axes that cut one weight: the amax group of per-tensor
    recipes

Axes are bound by name, never by position, and always used in the order above.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.errors import MeshError, message

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "Meshes", "check_1d", "check_ascending", "default_device_type"]

#: The axes that cut or copy parameters, in mesh order.
AXES = ("dp_replicate", "dp_shard", "tp")

# Named by the design, but no part of this version can use them: refused rather than ignored.
_LATER_AXES = ("cp", "ep")


@dataclass(frozen=True)
class Meshes:
    """Named axes over all ranks of a job.

    Build with :meth:`build` or :meth:`from_device_mesh`, not by hand.

    Attributes:
        device_mesh: 3-D mesh with the axes :data:`AXES` in that order; size-1 axes included.
    """

    device_mesh: DeviceMesh

    @classmethod
    def build(
        cls,
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        ep: int = 1,
        tp: int = 1,
        device_type: str | None = None,
    ) -> Meshes:
        """Arrange all ranks of the job on named axes.

        Collective over the world: call on all ranks. Starts ``torch.distributed`` when it is not running:
        from torchrun's environment, or as a job of one process when there is none.

        Args:
            dp_replicate: Copies of the whole sharded model (HSDP's outer axis).
            dp_shard: Ranks that FSDP2 shards each weight over; ``-1`` takes what the other axes leave.
            cp: Context parallelism; must be 1 in this version.
            ep: Expert parallelism; must be 1 in this version.
            tp: Tensor parallelism.
            device_type: ``"cuda"`` or ``"cpu"``; by default the machine's accelerator, else the CPU.

        Raises:
            MeshError: A size is not a positive integer, or their product is not the world size.
        """
        for axis, size in (("cp", cp), ("ep", ep)):
            if size != 1:
                raise MeshError(
                    message(
                        f"Meshes.build: axis {axis!r}",
                        expected="size 1",
                        got=size,
                        why="This version shards parameters over dp_replicate, dp_shard and tp only",
                        fix=f"leave {axis}=1",
                    )
                )
        device_type = device_type or default_device_type()
        _start_distributed(device_type)
        sizes = _fill({"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}, dist.get_world_size())
        mesh = dist.init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)
        return cls(mesh)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Meshes:
        """Adopt a mesh that exists already; its axes are found by name, in any order.

        Collective over the mesh's ranks when the axes must be reordered or an axis is missing (new process
        groups are made then); otherwise local.

        Raises:
            MeshError: Unnamed axes, unknown names, cp/ep axes larger than 1, or ranks that do not ascend along an
                axis.
        """
        names = mesh.mesh_dim_names
        if not names:
            raise MeshError(
                message(
                    "Meshes.from_device_mesh: the mesh has unnamed axes",
                    expected=f"names out of {AXES}",
                    got=f"shape {tuple(mesh.shape)} without mesh_dim_names",
                    fix='init_device_mesh(..., mesh_dim_names=("dp_shard", "tp"))',
                )
            )
        for name, size in zip(names, mesh.shape, strict=True):
            if name not in AXES and not (name in _LATER_AXES and size == 1):
                raise MeshError(
                    message(
                        f"Meshes.from_device_mesh: axis {name!r} of size {size}",
                        expected=f"axes out of {AXES}",
                        got=tuple(names),
                        why="te_fsdp binds axes by name",
                        fix="rename the axis to the one of these that it means, or slice it away",
                    )
                )
        check_ascending(mesh, "mesh", "Meshes.from_device_mesh")
        if tuple(names) == AXES:
            return cls(mesh)
        kept = [name for name in AXES if name in names]
        ranks = mesh.mesh.permute([names.index(n) for n in [*kept, *(n for n in names if n not in AXES)]])
        shape = tuple(mesh.shape[names.index(n)] if n in names else 1 for n in AXES)
        from torch.distributed.device_mesh import DeviceMesh

        return cls(DeviceMesh(mesh.device_type, ranks.reshape(shape), mesh_dim_names=AXES))

    def size(self, axis: str) -> int:
        """Size of one of :data:`AXES`."""
        if axis not in AXES:
            raise MeshError(message("Meshes.size: unknown axis", expected=f"one of {AXES}", got=repr(axis)))
        return int(self.device_mesh.shape[AXES.index(axis)])

    @property
    def tp(self) -> DeviceMesh | None:
        """1-D mesh of the tensor-parallel axis, ``None`` when its size is 1."""
        return self.device_mesh["tp"] if self.size("tp") > 1 else None

    @property
    def fsdp(self) -> DeviceMesh | None:
        """``dp_shard``, or (``dp_replicate``, ``dp_shard``) for HSDP; ``None`` when both have size 1."""
        if self.size("dp_replicate") == 1 and self.size("dp_shard") == 1:
            return None
        return self.fsdp_with_size_one

    @property
    def fsdp_with_size_one(self) -> DeviceMesh:
        """As :attr:`fsdp`, but a 1-D mesh of one rank where that is ``None``: FSDP2 needs a mesh in any case."""
        if self.size("dp_replicate") > 1:
            return self.device_mesh["dp_replicate", "dp_shard"]
        return self.device_mesh["dp_shard"]

    @property
    def weight(self) -> DeviceMesh | None:
        """1-D flattening of the axes that cut a weight (``dp_shard`` x ``tp``); ``None`` when nothing is cut.

        Collective over the world on first use when both axes are larger than 1 (a process group is made),
        cached later.
        """
        if self.size("tp") == 1:
            return self.device_mesh["dp_shard"] if self.size("dp_shard") > 1 else None
        if self.size("dp_shard") == 1:
            return self.device_mesh["tp"]
        return _torch.flatten_mesh(self.device_mesh["dp_shard", "tp"], "weight")

    @property
    def device_type(self) -> str:
        """``"cuda"``, ``"cpu"``, ..."""
        return self.device_mesh.device_type

    @property
    def device(self) -> torch.device:
        """This rank's device: the accelerator's current one, or the CPU."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, torch.get_device_module(self.device_type).current_device())

    def te_kwargs(self) -> dict[str, object]:
        """Keywords for TE constructors: ``tp_group`` and ``tp_size`` of this mesh."""
        tp = self.tp
        return {"tp_group": tp.get_group() if tp is not None else None, "tp_size": self.size("tp")}

    def __str__(self) -> str:
        return " x ".join(f"{axis}={self.size(axis)}" for axis in AXES)


def check_1d(mesh: DeviceMesh | None, argument: str, where: str) -> None:
    """Raise :class:`MeshError` unless ``mesh`` is ``None`` or has exactly one axis.

    Args:
        mesh: The mesh to look at.
        argument: Name of the argument, for the message.
        where: Name of the module or function, for the message.
    """
    if mesh is None:
        return
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "ndim"):
        raise MeshError(
            message(f"{where}: {argument}", expected="a 1-D DeviceMesh or None", got=type(mesh).__name__)
        )
    if mesh.ndim != 1:
        raise MeshError(
            message(
                f"{where}: {argument}",
                expected="a 1-D DeviceMesh",
                got=f"{mesh.ndim}-D mesh of shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}",
                fix=f'pass one axis, for example {argument}=mesh["tp"], or the flattened weight mesh of te_fsdp.Meshes',
            )
        )


def check_ascending(mesh: DeviceMesh, argument: str, where: str) -> None:
    """Raise :class:`MeshError` unless ranks ascend along every axis of ``mesh``.

    Process groups number their ranks in ascending order, whatever the order in the mesh. DTensor goes by the mesh,
    FSDP2 and TE go by the group: on another order a shard would be taken for its neighbour.

    Args:
        mesh: The mesh to look at.
        argument: Name of the argument, for the message.
        where: Name of the module or function, for the message.
    """
    if any((mesh.mesh.diff(dim=axis) < 0).any() for axis in range(mesh.ndim)):
        raise MeshError(
            message(
                f"{where}: {argument}",
                expected="ranks that ascend along every axis",
                got=mesh.mesh.tolist(),
                why="Process groups number their ranks in ascending order, so that shards would change places",
                fix="build the mesh from ascending ranks, as init_device_mesh does",
            )
        )


def default_device_type() -> str:
    """The machine's accelerator if torch sees one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def _start_distributed(device_type: str) -> None:
    """Start torch.distributed unless it runs already; one process without torchrun becomes a world of one."""
    if dist.is_initialized():
        return
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _fill(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Resolve one ``-1`` and check that the axes fill the world exactly."""
    text = " * ".join(f"{axis}({size})" for axis, size in sizes.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1 or any(
        isinstance(s, bool) or not isinstance(s, int) or s < -1 or s == 0 for s in sizes.values()
    ):
        raise MeshError(
            message(
                f"Meshes.build: {text}",
                expected="positive sizes, at most one of them -1",
                got=tuple(sizes.values()),
                fix="give every axis a size of 1 or more; one alone may be -1, which dp_shard is by default",
            )
        )
    product = 1
    for size in sizes.values():
        product *= size if size != -1 else 1
    if free and world_size % product == 0:
        return {axis: world_size // product if size == -1 else size for axis, size in sizes.items()}
    if not free and product == world_size:
        return sizes
    others = product // (sizes["dp_shard"] if sizes["dp_shard"] != -1 else 1)
    fitting = [n for n in (world_size // others,) if n >= 1 and n * others == world_size]
    fix = (
        f"dp_shard={fitting[0]}, or dp_shard=-1 to use what is left"
        if fitting
        else "sizes whose product is WORLD_SIZE"
    )
    raise MeshError(
        message(
            f"Meshes.build: {text} = {product}{' * ?' if free else ''}",
            expected=f"a product equal to WORLD_SIZE = {world_size}",
            got=f"{product}" if not free else f"{product}, which does not divide {world_size}",
            fix=fix,
        )
    )
