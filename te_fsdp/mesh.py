"""The validated device meshes of a sharded TE model.

    axes of the job      dp_replicate   dp_shard   cp   ep   tp
    dense parameters
      .fsdp              [---------------------------------]         (or without dp_replicate): the mesh for FSDP2;
                                        dp_shard, cp and ep are one axis, called dp_shard
      .tp                                                    [--]    TE's tensor parallelism
      .weight                           [-----------------------]    all axes that shard one weight: the amax group
                                        of per-tensor recipes
    expert parameters: each ep rank has different experts
      .ep                                           [--]             the experts are distributed over this axis
      .expert_fsdp       [---------------------]                     (or without dp_replicate)
      .expert_weight                    [------]    +        [--]    never ep: each expert has its own scale
    pipeline stages have different weights: all of the above covers this rank's stage
      .pp                the ranks at the same position in each stage

Axes are bound by name, never by position, and always used in the order above. With ``ep`` = 1 the expert meshes equal
the dense meshes. Ranks along ``cp`` (context parallelism) process different tokens of the same sequences. For
parameters, ``cp`` is data parallelism. TE runs the attention over ``cp``; ``fully_shard`` sets its process group.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp import mesh_checks
from te_fsdp.collectives.agreement import rank_messenger
from te_fsdp.collectives.rendezvous import collective_call, is_simulated
from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.errors import MeshError, require_kind
from te_fsdp.mesh_checks import ALL_AXES, AXES, STAGES
from te_fsdp.upstream import torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

# Axes that form a single axis for dense parameters.
_SHARD_AXES = ("dp_shard", "cp", "ep")
#: Attribute of :attr:`Meshes.fsdp` that contains a :class:`_PartOf`.
_PART_OF = "_te_fsdp_part_of"


@dataclass(frozen=True)
class Meshes:
    """Named axes over all ranks of a job. Build with :meth:`build` or :meth:`from_device_mesh`, not by hand.

    Attributes:
        device_mesh: 3-D mesh of dense parameters with the axes :data:`AXES` in that order, size-1 axes included. Its
            ``dp_shard`` axis covers the job's ``dp_shard`` x ``cp`` x ``ep``.
        expert_mesh: 4-D mesh of expert parameters with the axes (``dp_replicate``, ``dp_shard``, ``ep``, ``tp``). Its
            ``dp_shard`` axis covers ``dp_shard`` x ``cp``. ``None`` when ``ep`` has size 1.
        cp: 1-D mesh of the context-parallel axis. ``None`` when its size is 1.
        pp: 1-D mesh of the pipeline stages, first to last. ``None`` without stages. The other meshes cover this rank's
            stage.
    """

    device_mesh: DeviceMesh
    expert_mesh: DeviceMesh | None = None
    cp: DeviceMesh | None = None
    pp: DeviceMesh | None = None
    _flattened_names: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    #: Batch shapes that ``context_parallel_shard`` has compared over ``cp``.
    seen_batches: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        *,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        ep: int = 1,
        tp: int = 1,
        device_type: str | None = None,
    ) -> Meshes:
        """Arrange all ranks of the job on named axes.

        Collective over the world: call on all ranks. Initializes ``torch.distributed`` if necessary, from torchrun's
        environment, or as a single-process job without one.

        Args:
            pp: Pipeline stages, over contiguous blocks of ranks. Each stage is a separate model.
            dp_replicate: Replicas of the sharded model (HSDP's outer axis).
            dp_shard: Ranks that FSDP2 shards each weight over, without ``cp`` and ``ep``. ``-1`` infers the size from
                the world size and the other axes.
            cp: Context parallelism. Dense and expert weights are also sharded over it.
            ep: Expert parallelism: each rank has different experts. Dense weights are also sharded over it.
            tp: Tensor parallelism.
            device_type: ``"cuda"`` or ``"cpu"``. Default: the machine's accelerator, or the CPU without one.

        Raises:
            MeshError: A size is not a positive integer, or the product is not the world size. Also for an unknown
                device type, or several processes that torchrun did not start: each would be a separate job.
        """
        device_type = mesh_checks.check_device_type(
            default_device_type() if device_type is None else device_type
        )
        # tp is the innermost axis: its ranks exchange activations in every layer, so they should share a
        # node. dp_replicate is the outermost one: its ranks communicate once per step.
        requested = dict(zip((STAGES, *ALL_AXES), (pp, dp_replicate, dp_shard, cp, ep, tp), strict=True))
        _start_distributed(device_type, requested)
        sizes = mesh_checks.fill_sizes(requested, dist.get_world_size())
        shards = math.prod(sizes[axis] for axis in _SHARD_AXES)
        shape = (sizes["dp_replicate"], shards, sizes["tp"])

        def create() -> Meshes:
            if sizes[STAGES] == 1:
                mesh = dist.init_device_mesh(device_type, shape, mesh_dim_names=AXES)
                return cls._from_dense(mesh, sizes["cp"], sizes["ep"])
            mesh = dist.init_device_mesh(device_type, (sizes[STAGES], *shape), mesh_dim_names=(STAGES, *AXES))
            return cls._from_dense(mesh[AXES], sizes["cp"], sizes["ep"], mesh[STAGES])

        with collective_call("Meshes.build"):
            return run_while_all_live(create) if mesh_checks.select_device(device_type) else create()

    @classmethod
    def _from_dense(cls, mesh: DeviceMesh, cp: int = 1, ep: int = 1, pp: DeviceMesh | None = None) -> Meshes:
        """Return the meshes of a dense mesh, whose shard axis contains ``cp`` and ``ep``. Collective over the world.

        Warns about axes that cross nodes, and creates the process groups of a pipeline stage.
        """
        shards = mesh.shape[AXES.index("dp_shard")]
        # Only the shard axis is split. The other axes keep their process groups, because each NCCL communicator takes
        # GPU memory and start-up time.
        experts = context = None
        if ep > 1:
            experts = _torch.unflatten_dp_shard(mesh, {"dp_shard": shards // ep, "ep": ep})
        if cp > 1:
            sizes = {"dp_shard": shards // ep // cp, "cp": cp}
            context = _torch.unflatten_dp_shard(experts or mesh, sizes)["cp"]
        meshes = cls(mesh, experts, context, pp)
        if meshes.nodes > 1 and dist.get_rank() == 0:
            groups = {}
            for part in filter(None, (mesh, experts)):
                for position, axis in enumerate(part.mesh_dim_names or ()):
                    if part.size(position) > 1 and (part is mesh or axis == "ep"):
                        groups[axis] = part.mesh.movedim(position, -1).flatten(0, -2)
            for warning in mesh_checks.slow_axes(groups, mesh_checks.ranks_of_a_node(dist.get_world_size())):
                _log.warning("Meshes: %s", warning)
        if pp is not None:
            # A stage may not need a group that a different stage needs, but creating a group requires all ranks of the
            # job.
            _ = meshes.weight, meshes.expert_weight, meshes.amax, meshes.expert_amax
            if not is_simulated():
                rank_messenger()
        return meshes

    @classmethod
    def from_device_mesh(
        cls, mesh: DeviceMesh, *, names: Mapping[str, str | None] | None = None, pp: DeviceMesh | None = None
    ) -> Meshes:
        """Adopt an existing mesh. Its axes are matched by name, in any order.

        Ranks along a pipeline axis (``"pp"``), or along an axis mapped to ``None``, have different weights. The result
        then has the axes of this rank's stage, and the pipeline axis as :attr:`pp`. Axes of size 1 may have any name.

        Collective over the world if the axes must be reordered, or if an axis or ranks are missing, because new process
        groups are created. Call it on all ranks, each with the mesh that contains the rank. Otherwise local.

        Args:
            mesh: Its axes are data, context, expert and tensor parallelism, and others.
            names: Maps the mesh's axis names to those of te_fsdp, for example ``{"data_parallel": "dp_shard"}``. Use
                ``"pp"`` for the stages of one model, ``None`` for an axis whose ranks have unrelated models.
            pp: The 1-D mesh of the stages if ``mesh`` covers only this rank's stage: ``world["pp"]``.

        Raises:
            MeshError: Unnamed axes, unknown names, or ranks that do not ascend along an axis. Also for dp_shard, cp and
                ep that are not nested in this order, or a ``pp`` mesh that does not cross ``mesh`` in this rank.
        """
        require_kind(
            "Meshes.from_device_mesh", "mesh", mesh, DeviceMesh, expected="a DeviceMesh", error=MeshError
        )
        if not mesh.mesh_dim_names:
            raise MeshError(
                "Meshes.from_device_mesh: the mesh has unnamed axes",
                expected=f"names out of {ALL_AXES}",
                got=f"shape {tuple(mesh.shape)} without mesh_dim_names",
                fix='init_device_mesh(..., mesh_dim_names=("dp_shard", "tp"))',
            )
        axes = mesh_checks.internal_axis_names(mesh, names)
        mesh_checks.check_ascending(mesh, "mesh", "Meshes.from_device_mesh")
        mesh_checks.check_stages(mesh, axes, pp)
        # A mesh with all ranks and te_fsdp's own axes needs no new process groups.
        has_all_ranks = mesh.size() == dist.get_world_size()
        if has_all_ranks and tuple(axes) == AXES and tuple(mesh.mesh_dim_names) == AXES:
            return cls._from_dense(mesh)
        sizes = {axis: mesh.shape[axes.index(axis)] if axis in axes else 1 for axis in (STAGES, *ALL_AXES)}
        # The order of axes: unrelated models, the stages of each model, and the ranks of each stage.
        order = [axes.index(name) for name in (STAGES, *ALL_AXES) if name in axes]
        order = [*(axis for axis in range(mesh.ndim) if axis not in order), *order]
        shards = math.prod(sizes[axis] for axis in _SHARD_AXES)
        shape = (sizes[STAGES], sizes["dp_replicate"], shards, sizes["tp"])
        ranks = mesh.mesh.permute(order).reshape(-1, *shape)
        for stage in ranks.flatten(0, 1):
            mesh_checks.check_nested(stage, mesh)
        with collective_call("Meshes.from_device_mesh"):
            stage_mesh, stages = mesh_checks.mesh_of_stage(mesh.device_type, ranks)
            is_part = stage_mesh.size() < dist.get_world_size() and pp is stages is None and not names
            if is_part and dist.get_rank() == int(stage_mesh.mesh.min()):
                _log.warning(
                    "Meshes: a mesh of %d of %d ranks. Models on other ranks are treated as separate models: "
                    "clip_grad_norm_ uses this one alone, and te_fsdp.checkpoint raises. For stages of one model, "
                    'pass the mesh with its axis "pp", or from_device_mesh(mesh, pp=job_mesh["pp"])',
                    stage_mesh.size(),
                    dist.get_world_size(),
                )
            pipeline = pp or stages
            return run_while_all_live(lambda: cls._from_dense(stage_mesh, sizes["cp"], sizes["ep"], pipeline))

    def size(self, axis: str) -> int:
        """Return the size of an axis. ``dp_shard`` is that of dense parameters, which includes ``cp`` and ``ep``."""
        if axis in AXES:
            return int(self.device_mesh.shape[AXES.index(axis)])
        if axis not in ALL_AXES:
            fix = "for stages use meshes.pp.size()"
            raise MeshError("Meshes.size: axis", expected=f"one of {ALL_AXES}", got=repr(axis), fix=fix)
        mesh = self.cp if axis == "cp" else self.ep
        return 1 if mesh is None else int(mesh.size())

    @property
    def nodes(self) -> int:
        """Return the number of nodes according to torchrun's ``LOCAL_WORLD_SIZE``, or 1 if it is not set."""
        return dist.get_world_size() // mesh_checks.ranks_of_a_node(dist.get_world_size())

    @property
    def tp(self) -> DeviceMesh:
        """Return the 1-D mesh of the tensor-parallel axis. At size 1, a mesh of this rank alone with local rank 0."""
        return self.device_mesh["tp"]

    @functools.cached_property
    def tp_or_none(self) -> DeviceMesh | None:
        """Return :attr:`tp`, or ``None`` when its size is 1."""
        return self.tp if self.size("tp") > 1 else None

    @property
    def fsdp(self) -> DeviceMesh | None:
        """Return the mesh ``dp_shard``, or (``dp_replicate``, ``dp_shard``) for HSDP. ``None`` if both have size 1."""
        mesh = self.fsdp_with_size_one
        # fully_shard(model, meshes.fsdp), the call that FSDP2 users write, must not lose the other axes.
        setattr(mesh, _PART_OF, _PartOf(self))
        return mesh if mesh.size() > 1 else None

    @property
    def fsdp_with_size_one(self) -> DeviceMesh:
        """Return :attr:`fsdp`, or a 1-D mesh of one rank if that is ``None``, because FSDP2 requires a mesh."""
        return self._fsdp_of(self.device_mesh)

    def _fsdp_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the axes of ``mesh`` that FSDP2 uses. Local operation."""
        return mesh["dp_replicate", "dp_shard"] if self.size("dp_replicate") > 1 else mesh["dp_shard"]

    @property
    def weight(self) -> DeviceMesh | None:
        """Return the flattened 1-D mesh of the axes that shard a weight (``dp_shard`` x ``tp``). ``None`` at size 1.

        Collective over the world on first use when both axes are larger than 1, because a process group is created.
        Cached later.
        """
        return self._weight_of(self.device_mesh, self.size("dp_shard"), "weight")

    def _weight_of(self, mesh: DeviceMesh, shards: int, name: str) -> DeviceMesh | None:
        """Return the 1-D mesh of ``dp_shard`` (of size ``shards``) and ``tp``. Collective as :attr:`weight`."""
        tp = self.size("tp")
        # A slice of one axis has a process group already. Only two axes together need a new one.
        if tp > 1 and shards > 1:
            return self._flattened(mesh["dp_shard", "tp"], name)
        return mesh["dp_shard" if tp == 1 else "tp"] if shards * tp > 1 else None

    @property
    def ep(self) -> DeviceMesh | None:
        """Return the 1-D mesh of the expert-parallel axis. ``None`` when its size is 1."""
        return None if self.expert_mesh is None else self.expert_mesh["ep"]

    def cp_parts(self, inner: int) -> tuple[DeviceMesh, DeviceMesh]:
        """Split ``cp`` into two 1-D meshes: groups of ``inner`` consecutive ranks, and one rank of each group.

        Collective over the world, because process groups are created. ``inner`` must divide ``cp``.
        """
        cp = self.size("cp")
        sizes = {"dp_shard": self.expert_shards // cp, "cp_outer": cp // inner, "cp_inner": inner}
        parts = _torch.unflatten_dp_shard(self.expert_mesh or self.device_mesh, sizes)
        return parts["cp_inner"], parts["cp_outer"]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """Return :attr:`fsdp` for expert parameters, without ``ep``."""
        mesh = self.expert_fsdp_with_size_one
        return mesh if mesh.size() > 1 else None

    @property
    def expert_fsdp_with_size_one(self) -> DeviceMesh:
        """Return :attr:`expert_fsdp`, or a 1-D mesh of one rank if that is ``None``."""
        return self._fsdp_of(self.expert_mesh or self.device_mesh)

    @property
    def expert_weight(self) -> DeviceMesh | None:
        """Return :attr:`weight` for expert parameters: the axes that shard one expert's weight, never ``ep``.

        Collective over the world on first use when it flattens two axes (creates a process group). Cached later.
        """
        if self.expert_mesh is None:
            return self.weight
        return self._weight_of(self.expert_mesh, self.expert_shards, "expert_weight")

    @property
    def amax(self) -> DeviceMesh | None:
        """Return the 1-D mesh of this stage's ranks, for the amax of delayed scaling.

        ``None`` without stages, where all ranks of the job are used. Collective over the world on first use, cached
        later.
        """
        if self.device_mesh.size() == dist.get_world_size():
            return None
        return self._amax_of(self.device_mesh, self.weight, "amax")

    def _amax_of(self, mesh: DeviceMesh, weight: DeviceMesh | None, name: str) -> DeviceMesh:
        """Return the 1-D mesh of all replicas of the ranks of ``weight``. Collective as :attr:`amax`."""
        if self.size("dp_replicate") == 1:
            # Without replicas these are the ranks of one weight, whose process group exists already.
            return weight or mesh["dp_shard"]
        return self._flattened(mesh["dp_replicate", "dp_shard", "tp"], name)

    @property
    def expert_amax(self) -> DeviceMesh | None:
        """Return the 1-D mesh of all ranks with the same experts, for the amax of their activations (delayed scaling).

        Without ``ep``, same as :attr:`amax`. Collective over the world on first use, cached later.
        """
        if self.expert_mesh is None:
            return self.amax
        return self._amax_of(self.expert_mesh, self.expert_weight, "expert_amax")

    def _flattened(self, mesh: DeviceMesh, name: str) -> DeviceMesh:
        """Flatten several axes into one. Collective over all ranks at the first request of a name, local afterwards."""
        if name in self._flattened_names:
            return _torch.flatten_mesh(mesh, name)
        # A rank that creates the group alone would hang in torch, where te_fsdp has no timeout.
        with collective_call(f"Meshes.{name}", self.device_mesh):
            flat = run_while_all_live(lambda: _torch.flatten_mesh(mesh, name))
        self._flattened_names.add(name)
        return flat

    @property
    def data_size(self) -> int:
        """Return the number of data shards: ``dp_replicate`` x ``dp_shard`` x ``ep``. Local operation.

        Ranks of ``tp`` use the same data. Ranks of ``cp`` use different tokens of the same sequences.
        """
        return self.size("dp_replicate") * self.size("dp_shard") // self.size("cp")

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's data shard among :attr:`data_size`. Local operation.

        Use it as ``DistributedSampler(..., num_replicas=meshes.data_size, rank=meshes.data_rank)``.
        """
        replica, shard = map(self.device_mesh.get_local_rank, ("dp_replicate", "dp_shard"))
        cp, ep = self.size("cp"), self.size("ep")
        # The dp_shard axis nests dp_shard, cp and ep in this order.
        outer, expert = shard // (cp * ep), shard % ep
        return (replica * (self.size("dp_shard") // (cp * ep)) + outer) * ep + expert

    @property
    def expert_shards(self) -> int:
        """Return the number of ranks that FSDP2 shards each expert's weight over."""
        return self.size("dp_shard") // self.size("ep")

    def experts(self, total: int) -> range:
        """Return the global indices of this rank's experts of ``total``, ``num_gemms`` in number. Local operation.

        Experts are distributed over ``ep`` as in ``torch.chunk``: all ranks have the same number, except that the last
        ranks may have fewer. Raises ``MeshError`` if a rank would have none.
        """
        ep = self.size("ep")
        # As Shard(0) of DTensor distributes a single parameter for all experts, and as DCP then reads it.
        step = -(-total // ep)
        if total < 1 or step * (ep - 1) >= total:
            raise MeshError(
                f"Meshes.experts: {total} experts over ep={ep}",
                expected="at least one expert on every rank",
                got=[max(0, min(step, total - rank * step)) for rank in range(ep)],
                why="A GroupedLinear needs at least one GEMM",
                fix="choose an ep size that divides the number of experts",
            )
        rank = 0 if self.ep is None else self.ep.get_local_rank()
        return range(rank * step, min((rank + 1) * step, total))

    @property
    def device_type(self) -> str:
        """Return the device type: ``"cuda"``, ``"cpu"``, ..."""
        return self.device_mesh.device_type

    @property
    def device(self) -> torch.device:
        """Return this rank's device: the current accelerator, or the CPU."""
        return device_of(self.device_type)

    def te_kwargs(self) -> dict[str, Any]:
        """Return the arguments for TE constructors: ``tp_group`` and ``tp_size`` of this mesh."""
        tp = self.tp_or_none
        return {"tp_group": tp.get_group() if tp is not None else None, "tp_size": self.size("tp")}

    def __str__(self) -> str:
        sizes = {axis: f"{axis}={self.size(axis)}" for axis in AXES}
        inner = [(axis, self.size(axis)) for axis in ("cp", "ep") if self.size(axis) > 1]
        if inner:
            shards = self.size("dp_shard") // math.prod(size for _, size in inner)
            parts = [str(shards), *(f"{axis}={size}" for axis, size in inner)]
            sizes["dp_shard"] += f" ({' x '.join(parts)})"
        return " x ".join(sizes.values())


class _PartOf:
    """Reference from a sliced mesh to its :class:`Meshes`. Pickles of DTensors on the slice omit it."""

    def __init__(self, meshes: Meshes) -> None:
        self.meshes = meshes

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OrderedDict, ()  # an empty object of a class that torch.load(weights_only=True) accepts


def as_meshes(passed: object, where: str) -> Meshes:
    """Return the :class:`Meshes` of a ``meshes`` argument; raise ``MeshError`` for other types.

    A torch mesh is adopted. :attr:`Meshes.fsdp` is resolved to the :class:`Meshes` that it belongs to.
    """
    if isinstance(passed, Meshes):
        return passed
    if isinstance(passed, DeviceMesh):
        # A slice of a te_fsdp mesh refers to its Meshes, because the plan needs all axes.
        part = getattr(passed, _PART_OF, None)
        return part.meshes if isinstance(part, _PartOf) else Meshes.from_device_mesh(passed)
    raise MeshError(
        f"{where}: meshes",
        expected="te_fsdp.Meshes, or a DeviceMesh with named axes",
        got=type(passed).__name__,
        fix="pass meshes = te_fsdp.Meshes.build(dp_shard=-1, tp=...) itself, whose meshes.fsdp is None on one rank"
        if passed is None
        else "te_fsdp.Meshes.build(dp_shard=-1, tp=...)",
    )


def device_of(device_type: str) -> torch.device:
    """Return this process' device of a type: the current accelerator, or the CPU. Local operation."""
    index = None if device_type == "cpu" else torch.get_device_module(device_type).current_device()
    return torch.device(device_type) if index is None else torch.device(device_type, index)


def default_device_type() -> str:
    """Return the type of the machine's accelerator if torch finds one, else ``"cpu"``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def _start_distributed(device_type: str, sizes: Mapping[str, int]) -> None:
    """Initialize torch.distributed if necessary. One process without torchrun becomes a world of size 1."""
    if dist.is_initialized():
        return
    mesh_checks.check_started(sizes)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # With torch 2.13, connecting to a dead rank's address is retried until the timeout.
        _log.warning(
            "Meshes.build: torchrun has restarted this rank (%s) with the store of the previous start, which contains "
            "addresses of dead ranks. If it hangs here: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun",
            restarts,
        )
    if device_type != "cpu":
        # Before the process group exists: NCCL uses the current device, which is GPU 0 on every rank by
        # default.
        torch.get_device_module(device_type).set_device(mesh_checks.device_of_rank(device_type))
    # gloo next to NCCL: errors and checkpoints are exchanged on the CPU, without a wait for the GPU.
    backend = "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        # A store in memory needs no address and no free port.
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
