"""What the arguments of Megatron-FSDP mean here: mapped ones, and those that have no meaning, with their equivalents.

Source: the documentation of megatron-fsdp 0.6.1, and its behaviour where that says nothing.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import PlacementError, require_flag_fields
from te_fsdp.sharding.precision import MixedPrecisionPolicy as NativePolicy

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("te_fsdp")

_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_BUFFERS = (
    "buffers come from torch's caching allocator, which has the same blocks for them in each step; "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keeps it from breaking them up"
)
_REGISTERED = (
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK=1 in the environment registers torch's memory with NCCL, buffers "
    "included; it does so the conventional way"
)
_SEPARATE = "set_separate_reduce_scatter_group(True) of FSDP2's modules (torch 2.13 and later)"

#: Argument -> equivalent. They are taken, and named in a warning when they are not at their default.
WITHOUT_MEANING: Mapping[str, str] = {
    "hybrid_fsdp_group": "the group is derived from dp_outer_dim and dp_shard_dim",
    "hybrid_fsdp_expt_group": "the group is derived from expt_device_mesh",
    "fsdp_group_ag": _SEPARATE,
    "expt_fsdp_group_ag": _SEPARATE,
    "overlap_grad_reduce": "FSDP2 always overlaps reductions with backward",
    "overlap_param_gather": "FSDP2 always gathers ahead; see set_modules_to_forward_prefetch of its modules",
    "preproc_state_dict_for_dcp_ckpt": "state dicts hold DTensors that DCP reads as they are; te_fsdp.checkpoint.save "
    "and load move them onto any other mesh",
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
    "cuda_graph_mode": "a whole step is recorded by te_fsdp.graphed_step, which needs nothing of the model",
}


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Megatron-FSDP's policy; :meth:`native` is te_fsdp's.

    Attributes:
        main_params_dtype: Of the weights that the optimizer updates; ``None``: the model's own.
        main_grads_dtype: Of gradients while they add up; ``None``: the model's own.
        grad_comm_dtype: Of gradients on the wire; ``None``: ``main_grads_dtype``.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def native(self) -> NativePolicy:
        """The same as :class:`te_fsdp.MixedPrecisionPolicy`.

        Raises:
            PrecisionError: A dtype that te_fsdp does not know.
        """
        return NativePolicy(self.main_params_dtype, self.main_grads_dtype, self.grad_comm_dtype)


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``fully_shard_model`` after the module, in megatron-fsdp 0.6.1's order, with its defaults.

    Attributes:
        device_mesh: Mesh with the axes named below; ``None``: all ranks in one axis.
        dp_shard_dim: Axis that shards; the name of a flattened one will do.
        dp_outer_dim: Axis of HSDP or HFSDP.
        tp_dim: Tensor-parallel axis.
        expt_device_mesh: Mesh of expert parameters, with the same names of axes.
        fsdp_unit_modules: Classes, or import paths of classes, whose instances are gathered as one; ``None``: every
            ``te.TransformerLayer``.
        zero_dp_strategy: 0 to 3, or ``no_shard``, ``optim``, ``optim_grads``, ``optim_grads_params``.
        outer_dp_sharding_strategy: 0 or ``no_shard`` (HSDP), 1 or ``optim`` (HFSDP).
        device: Where the model is moved before it is sharded; ``None``: the current device.
        init_model_with_meta_device: Initialise parameters on meta, each rank its shards, by ``reset_parameters`` or
            ``_reset_parameters``.
        mixed_precision_policy: Dtypes of main weights, main gradients and the wire.
        sync_model_each_microbatch: Whether each backward counts as the last one of its step.
        report_nan_in_param_grad: Raise before a step on gradients that are not finite; names parameter and rank.
        calculate_per_token_loss: Sum gradients over data parallel; the caller divides by the number of tokens.

    The others have no meaning here: :data:`WITHOUT_MEANING`.
    """

    device_mesh: DeviceMesh | None = None
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: ProcessGroup | None = None
    hybrid_fsdp_expt_group: ProcessGroup | None = None
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: ProcessGroup | None = None
    expt_fsdp_group_ag: ProcessGroup | None = None
    fsdp_unit_modules: Sequence[type | str] | None = None
    zero_dp_strategy: str | int = 3
    outer_dp_sharding_strategy: str | int = 0
    device: torch.device | None = None
    init_model_with_meta_device: bool = False
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
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

    def say_what_has_no_meaning(self) -> None:
        """Warn of arguments that are not at their defaults and change nothing here, each with its equivalent."""
        say_what_has_no_meaning(self, WITHOUT_MEANING)


def say_what_has_no_meaning(given: Any, table: Mapping[str, str]) -> None:
    """Warn of fields of a dataclass that are not at their defaults and change nothing here.

    Args:
        given: An instance.
        table: Name of a field -> its equivalent.
    """
    for field in fields(given):
        value = getattr(given, field.name)
        if field.name in table and value is not field.default and value != field.default:
            _log.warning("megatron_fsdp: %s=%r has no effect: %s", field.name, value, table[field.name])


def native_strategy(value: str | int, argument: str, names: Sequence[str] = _STRATEGIES) -> str:
    """Name of a strategy that was given by name or number.

    Raises:
        PlacementError: Neither.
    """
    if value in names:
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    numbered = ", ".join(f"{number} or {name!r}" for number, name in enumerate(names))
    raise PlacementError(f"fully_shard: {argument}", expected=numbered, got=repr(value))


def native_units(units: Sequence[type | str] | None) -> list[type] | None:
    """Classes of ``fsdp_unit_modules``, which may be given by import path; ``None`` stays ``None``.

    Raises:
        PlacementError: A path that leads to no class.
    """
    if units is None:
        return None
    return [unit if isinstance(unit, type) else _imported(unit) for unit in units]


def _imported(path: str) -> type:
    place, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlacementError(
            f"fully_shard: fsdp_unit_modules: {path!r}",
            expected="a class, or the import path of one",
            got=str(error),
            fix='"package.module.Class"',
        ) from error
    if not isinstance(found, type):
        raise PlacementError(
            f"fully_shard: fsdp_unit_modules: {path!r}", expected="a class", got=type(found).__name__
        )
    return found


_POLICY = "give the constructor a mixed_precision_policy"
_UNITS = WITHOUT_MEANING["disable_bucketing"]

#: Field -> equivalent. They are taken, and named in a warning when they are not at their default. The two ``overlap``
#: fields are not among them: what they ask for is what happens.
CONFIG_WITHOUT_MEANING: Mapping[str, str] = {
    "bucket_size": _UNITS,
    "average_in_collective": WITHOUT_MEANING["average_in_collective"],
    "fp8_param_gather": "quantized weights always travel quantized",
    "gradient_reduce_div_fusion": WITHOUT_MEANING["average_in_collective"],
    "suggested_communication_unit_size": _UNITS,
    "keep_fp8_transpose_cache": WITHOUT_MEANING["keep_fp8_transpose_cache"],
    "nccl_ub": WITHOUT_MEANING["nccl_ub"],
    "fsdp_double_buffer": WITHOUT_MEANING["fsdp_double_buffer"],
    "fsdp_all_gather_in_start_param_sync": "start_param_sync() always begins to gather the root's own parameters",
    "fsdp_db_use_persist_buf_on_alloc_fail": WITHOUT_MEANING["fsdp_db_use_persist_buf_on_alloc_fail"],
    "disable_symmetric_registration": WITHOUT_MEANING["disable_symmetric_registration"],
    "fsdp_manual_registration": WITHOUT_MEANING["nccl_ub"],
    "megatron_fsdp_main_params_dtype": _POLICY,
    "megatron_fsdp_main_grads_dtype": _POLICY,
    "megatron_fsdp_grad_comm_dtype": _POLICY,
    "megatron_fsdp_use_decoupled_grad": WITHOUT_MEANING["use_decoupled_grad"],
    "megatron_fsdp_cuda_graph_mode": WITHOUT_MEANING["cuda_graph_mode"],
    "megatron_fsdp_enable_fine_grained_param_gather": WITHOUT_MEANING["enable_fine_grained_param_gather"],
    "megatron_fsdp_max_pool_double_buffer": WITHOUT_MEANING["maxpool_double_buffer"],
}


@dataclass
class DistributedDataParallelConfig:
    """Options of :class:`MegatronFSDP`, with megatron-fsdp 0.6.1's names and defaults.

    Attributes:
        data_parallel_sharding_strategy: ``no_shard`` (the default here, as there), ``optim``, ``optim_grads`` or
            ``optim_grads_params``.
        outer_dp_sharding_strategy: ``no_shard`` (HSDP) or ``optim`` (HFSDP).
        check_for_nan_in_grad: Raise before a step on gradients that are not finite; names parameter and rank.

    Of the others, those in :data:`CONFIG_WITHOUT_MEANING` have no meaning here.
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
