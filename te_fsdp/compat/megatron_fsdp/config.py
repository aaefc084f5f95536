"""``DistributedDataParallelConfig``: the options of ``MegatronFSDP(module, dist_index, ddp_config)``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from te_fsdp.compat.megatron_fsdp.arguments import WITHOUT_MEANING

__all__ = ["CONFIG_WITHOUT_MEANING", "DistributedDataParallelConfig"]

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
