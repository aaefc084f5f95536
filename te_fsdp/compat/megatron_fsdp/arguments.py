"""Translation of Megatron-FSDP's arguments to te_fsdp's.

Source: the documentation of megatron-fsdp 0.6.1, or its behavior if the documentation does not specify it.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.agreement import on_any_rank
from te_fsdp.errors import MeshError, PlacementError, require_flag_fields, require_kind
from te_fsdp.layout import STRATEGIES
from te_fsdp.mesh import Meshes, default_device_type
from te_fsdp.precision import MixedPrecisionPolicy as NativePolicy
from te_fsdp.upstream import torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

_BUFFERS = (
    "torch's allocator reuses buffers; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids fragmentation"
)
_REGISTERED = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 registers torch's memory with NCCL, buffers included"
)
_SEPARATE = "set_separate_reduce_scatter_group(True) of FSDP2's modules (torch 2.13 and later)"

#: Argument -> equivalent. These arguments are accepted. A warning names them if they are not at their defaults.
UNUSED_ARGUMENTS: Mapping[str, str] = {
    "hybrid_fsdp_group": "the group is derived from dp_outer_dim and dp_shard_dim",
    "hybrid_fsdp_expt_group": "the group is derived from expt_device_mesh",
    "fsdp_group_ag": _SEPARATE,
    "expt_fsdp_group_ag": _SEPARATE,
    "overlap_grad_reduce": "FSDP2 always overlaps reductions with backward",
    "overlap_param_gather": "FSDP2 always prefetches; see set_modules_to_forward_prefetch of its modules",
    "preproc_state_dict_for_dcp_ckpt": "state dicts contain DTensors, which DCP reads; te_fsdp.checkpoint loads them "
    "on any mesh",
    "average_in_collective": "FSDP2 averages in the collective wherever the transport can",
    "disable_bucketing": "a unit is one bucket; choose units with fsdp_unit_modules",
    "keep_fp8_transpose_cache": 'zero_dp_strategy="optim_grads" keeps gathered weights with their transposes',
    "nccl_ub": _REGISTERED,
    "fsdp_double_buffer": _BUFFERS,
    "fsdp_db_use_persist_buf_on_alloc_fail": _BUFFERS,
    "maxpool_double_buffer": _BUFFERS,
    "disable_symmetric_registration": _REGISTERED,
    "enable_fine_grained_param_gather": "name smaller modules in fsdp_unit_modules",
    "use_decoupled_grad": "FusedAdam reads .grad, which has main_grads_dtype",
    "cuda_graph_mode": "te_fsdp.graphed_step records a full step",
}


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Megatron-FSDP's mixed precision policy. :meth:`native` converts it to te_fsdp's.

    Attributes:
        main_params_dtype: Dtype of the weights that the optimizer updates; ``None``: the model's own.
        main_grads_dtype: Dtype of accumulated gradients; ``None``: the model's own.
        grad_comm_dtype: Dtype of gradients in reductions; ``None``: ``main_grads_dtype``.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def native(self) -> NativePolicy:
        """Return te_fsdp's equivalent policy; raise PrecisionError for an unsupported dtype."""
        return NativePolicy(self.main_params_dtype, self.main_grads_dtype, self.grad_comm_dtype)


@dataclass(frozen=True)
class Arguments:
    """Arguments of ``fully_shard_model`` after the module, in megatron-fsdp 0.6.1's order with its defaults.

    Attributes:
        device_mesh: Mesh with axes, or flattened axes, named ``dp_shard_dim`` (sharding), ``dp_outer_dim`` (HSDP or
            HFSDP) and ``tp_dim``; ``None``: one axis of all ranks.
        expt_device_mesh: Mesh of expert parameters with the same axis names.
        fsdp_unit_modules: Classes, or import paths of classes, whose instances become FSDP2 units; ``None``:
            every ``te.TransformerLayer``.
        zero_dp_strategy: 0 to 3, or ``no_shard``, ``optim``, ``optim_grads``, ``optim_grads_params``.
        outer_dp_sharding_strategy: 0 or ``no_shard`` (HSDP), 1 or ``optim`` (HFSDP).
        device: Device to which the model is moved before sharding; ``None``: the current device.
        init_model_with_meta_device: Initialize meta parameters with ``reset_parameters`` or
            ``_reset_parameters``. Each rank initializes its shards only.
        mixed_precision_policy: Dtypes of main weights, main gradients and reductions; ``None``: the default policy.
        sync_model_each_microbatch: Whether every backward counts as the last one of its step.
        report_nan_in_param_grad: Raise before a step if a gradient is not finite. The error names parameter and rank.
        calculate_per_token_loss: Sum gradients over data parallel. The caller divides by the number of tokens.

    The other arguments have no effect here. A warning says so (:data:`UNUSED_ARGUMENTS`).
    """

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None
    fsdp_unit_modules: Sequence[type | str] | None = None
    zero_dp_strategy: str | int = 3
    outer_dp_sharding_strategy: str | int = 0
    device: torch.device | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: MixedPrecisionPolicy | None = MixedPrecisionPolicy()
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    sync_model_each_microbatch: bool = True
    preproc_state_dict_for_dcp_ckpt: bool = True
    report_nan_in_param_grad: bool = False
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    disable_symmetric_registration: bool = False
    enable_fine_grained_param_gather: bool = False
    use_decoupled_grad: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False

    def __post_init__(self) -> None:
        require_flag_fields(self, "fully_shard_model")
        warn_about_unused(self, UNUSED_ARGUMENTS)


def warn_about_unused(options: Any, table: Mapping[str, str]) -> None:
    """Warn about fields of a dataclass that are not at their defaults and have no effect according to ``table``."""
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in table and value is not field.default and value != field.default:
            _log.warning("megatron_fsdp: %s=%r has no effect: %s", field.name, value, table[field.name])


def native_strategy(value: str | int, argument: str, names: Sequence[str] = STRATEGIES) -> str:
    """Return the name of a strategy given by name or number; raise PlacementError if there is none."""
    if value in names:
        return str(value)
    # A bool is an int in Python, but `True` as a strategy is a mistake.
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    numbered = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
    raise PlacementError(
        f"fully_shard: {argument}",
        expected=numbered,
        got=repr(value),
        fix="pass one of these names or numbers",
    )


def native_units(units: Sequence[type | str] | None) -> list[type] | None:
    """Return the classes of ``fsdp_unit_modules``; raise PlacementError if an import path is not that of a class."""
    if units is None:
        return None
    classes: list[type] = []
    for unit in units:
        try:
            cls: Any = pkgutil.resolve_name(unit) if isinstance(unit, str) else unit
        except (ImportError, AttributeError, ValueError) as error:
            raise PlacementError(
                f"fully_shard: fsdp_unit_modules: {unit!r}",
                expected="a class, or the import path of one",
                got=str(error),
                fix='"package.module.Class"',
            ) from error
        require_kind("fully_shard", f"fsdp_unit_modules: {unit!r}", cls, type, expected="a class")
        classes.append(cls)
    return classes


@dataclass
class DistributedDataParallelConfig:
    """Options of :class:`MegatronFSDP` with megatron-fsdp 0.6.1's names and defaults.

    Attributes:
        data_parallel_sharding_strategy: ``no_shard`` (default, as in megatron-fsdp), ``optim``, ``optim_grads``
            or ``optim_grads_params``.
        outer_dp_sharding_strategy: ``no_shard`` (HSDP) or ``optim`` (HFSDP).
        check_for_nan_in_grad: Raise before a step if a gradient is not finite. The error names parameter and rank.

    Options in :data:`UNUSED_OPTIONS` have no effect here.
    """

    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        require_flag_fields(self, "DistributedDataParallelConfig")


#: Field -> equivalent, as :data:`UNUSED_ARGUMENTS`. The two ``overlap`` fields are missing because FSDP2 always
#: overlaps.
UNUSED_OPTIONS: Mapping[str, str] = {
    field.name: UNUSED_ARGUMENTS[argument]
    for field in fields(DistributedDataParallelConfig)
    if (argument := field.name.removeprefix("megatron_fsdp_")) in UNUSED_ARGUMENTS
    and not argument.startswith("overlap_")
} | {
    "bucket_size": UNUSED_ARGUMENTS["disable_bucketing"],
    "fp8_param_gather": "quantized weights are always sent quantized",
    "gradient_reduce_div_fusion": UNUSED_ARGUMENTS["average_in_collective"],
    "suggested_communication_unit_size": UNUSED_ARGUMENTS["disable_bucketing"],
    "fsdp_all_gather_in_start_param_sync": "start_param_sync() always gathers the root's own parameters",
    "fsdp_manual_registration": UNUSED_ARGUMENTS["nccl_ub"],
    "megatron_fsdp_max_pool_double_buffer": UNUSED_ARGUMENTS["maxpool_double_buffer"],
    **{
        f"megatron_fsdp_{dtype}_dtype": "pass mixed_precision_policy to the constructor"
        for dtype in ("main_params", "main_grads", "grad_comm")
    },
}


# --------------------------------------------------------------------------------------------------------------- meshes


def default_index(dp_shard_dim: str | None = None, tp_dim: str | None = None) -> FSDPDistributedIndex:
    """Build an index with a sharding axis of all ranks and a tp axis of size 1. Collective over the world."""
    meshes = Meshes.build(device_type=default_device_type())  # initializes torch.distributed
    names = (dp_shard_dim or "fsdp", tp_dim or "tp")
    mesh = dist.init_device_mesh(meshes.device_type, (dist.get_world_size(), 1), mesh_dim_names=names)
    index = FSDPDistributedIndex(mesh, dp_shard_dim=names[0], tp_dim=names[1])
    index.meshes = meshes
    return index


@dataclass(eq=False, repr=False)
class FSDPDistributedIndex:
    """Megatron-FSDP's index of process groups and meshes, by the axis names of the user's meshes. Local operation.

    Args:
        device_mesh: Mesh of all ranks.
        dp_shard_dim: Name of the sharding axis; required. Like the other names, it may refer to a flattened axis.
        dp_outer_dim: Name of the axis of HSDP or HFSDP.
        tp_dim: Name of the tensor-parallel axis.
        hybrid_fsdp_group: Result of :meth:`get_dp_group` with ``dp_outer_dim``; ``None``: created on first use.
        hybrid_fsdp_expt_group: The same for experts.
        hsdp_outer_dp_shard: Whether optimizer state is sharded over ``dp_outer_dim`` (HFSDP).
        expt_device_mesh: Mesh of expert parameters with the same names. Its ``dp_shard_dim`` is smaller by a factor of
            the expert-parallel size.
        fsdp_group_ag: Result of ``get_fsdp_group(independent_all_gather=True)``. No all-gather uses it.
        expt_fsdp_group_ag: The same for experts.

    Attributes:
        use_hybrid_fsdp: Whether there is a ``dp_outer_dim``.
        fsdp_group, outer_fsdp_group: Process groups of ``dp_shard_dim`` and ``dp_outer_dim``.
        expt_fsdp_group, expt_outer_fsdp_group: The same for ``expt_device_mesh``.

    The arguments are attributes as well.

    Raises:
        MeshError: ``dp_shard_dim`` is missing, or a mesh has no axis of a given name.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: dist.ProcessGroup | None = None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: dist.ProcessGroup | None = None
    expt_fsdp_group_ag: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.dp_shard_dim is None:
            names = self.device_mesh.mesh_dim_names
            raise MeshError(
                "FSDPDistributedIndex: dp_shard_dim",
                expected=f"the name of the sharding axis, one of {names}",
                got=None,
                fix=f"dp_shard_dim={(names or ('dp_shard',))[0]!r}",
            )
        self.use_hybrid_fsdp = self.dp_outer_dim is not None
        # Resolve all names now, so that a wrong one raises here and not in the first use of the index.
        self.fsdp_group, self.expt_fsdp_group = (self._group(self.dp_shard_dim, on) for on in (False, True))
        self.outer_fsdp_group, self.expt_outer_fsdp_group = (
            self._group(self.dp_outer_dim, on) for on in (False, True)
        )
        if self.tp_dim is not None:
            self.get_submesh(self.tp_dim)

    @functools.cached_property
    def meshes(self) -> Meshes:
        """Build te_fsdp's meshes over the same ranks. Collective over the world at first use.

        Raises:
            MeshError: The axes do not include all ranks, or the order of ranks differs from te_fsdp's (outer, shard,
                tp). All ranks raise the last error.
        """
        axes = {"dp_replicate": self.dp_outer_dim, "dp_shard": self.dp_shard_dim, "tp": self.tp_dim}
        named = {axis: self.get_submesh(name) for axis, name in axes.items() if name is not None}
        sizes = {axis: mesh.size() for axis, mesh in named.items()}
        positions = [named[axis].get_local_rank() if axis in named else 0 for axis in axes]
        experts = None if self.expt_device_mesh is None else self.get_submesh(self.dp_shard_dim, True)
        if experts is not None:
            # Dense parameters are sharded over the ranks of dp_shard and ep together.
            shards = sizes["dp_shard"]
            if shards % experts.size():
                raise MeshError(
                    "fully_shard: expt_device_mesh",
                    expected=f"a dp_shard_dim whose size divides that of device_mesh, {shards}",
                    got=experts.size(),
                    fix="build expt_device_mesh over the same ranks as device_mesh",
                )
            sizes |= {"dp_shard": experts.size(), "ep": shards // experts.size()}
        meshes = Meshes.build(**sizes, device_type=self.device_mesh.device_type)
        coordinate = list(meshes.device_mesh.get_coordinate() or ())
        if meshes.expert_mesh is not None and experts is not None:
            coordinate.append(meshes.expert_mesh["dp_shard"].get_local_rank())
            positions.append(experts.get_local_rank())
        # The order may be right for some ranks by chance, and all must raise.
        if on_any_rank(coordinate != positions):
            raise MeshError(
                "fully_shard: device_mesh or expt_device_mesh",
                expected="ranks in the order (outer, shard, tp), for experts (outer, shard, ep, tp), with the last "
                "axis varying fastest",
                got="a different order",
                why="te_fsdp's meshes use this order of ranks",
                fix="init_device_mesh(device, (outer, shard, tp), mesh_dim_names=...)",
            )
        return meshes

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh | None:
        """Return the given mesh, or the given mesh of experts."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh

    def get_submesh(
        self, mesh_dim_names: str | Sequence[str] | None, is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return a submesh of :meth:`get_root_mesh` by the axis names of that mesh. Local operation.

        Raises:
            MeshError: The axis or the mesh of experts does not exist.
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
                expected=f"axes of {getattr(mesh, 'mesh_dim_names', None)}, or flattened axes of that mesh",
                got=str(error),
                fix="give the mesh an axis of size 1 for each missing axis, including tp_dim",
            ) from error

    def _group(self, name: str | None, is_expert_parallel: bool) -> dist.ProcessGroup | None:
        if name is None or self.get_root_mesh(is_expert_parallel) is None:
            return None
        return self.get_submesh(name, is_expert_parallel).get_group()

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> dist.ProcessGroup | None:
        """Return the process group over which weights are sharded; ``None`` for experts without their own mesh."""
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return self.expt_fsdp_group if is_expert_parallel else self.fsdp_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the process group of the outer axis (HSDP or HFSDP); ``None`` without one."""
        return self.expt_outer_fsdp_group if is_expert_parallel else self.outer_fsdp_group

    def get_dp_group(self, is_expert_parallel: bool = False) -> dist.ProcessGroup | None:
        """Return the data-parallel group: the sharding axis, together with the outer axis if there is one.

        Collective over the world at the first call, if there is an outer axis without a given group.
        """
        if not self.use_hybrid_fsdp or (is_expert_parallel and self.expt_device_mesh is None):
            return self.get_fsdp_group(is_expert_parallel)
        group = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        if group is not None:
            return group
        meshes = self.meshes
        mesh = meshes.expert_fsdp_with_size_one if is_expert_parallel else meshes.fsdp_with_size_one
        if mesh.ndim == 1:
            return mesh.get_group()
        return _torch.flatten_mesh(mesh, "expert_dp" if is_expert_parallel else "dp").get_group()

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Return this rank's index if parameters are sharded over the sharding axis first and the outer axis second.

        Raises:
            MeshError: Optimizer state is not sharded over an outer axis.
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
