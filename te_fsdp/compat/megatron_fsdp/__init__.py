"""Megatron-FSDP's interface on te_fsdp. A training script migrates by changing one import.

    from te_fsdp.compat.megatron_fsdp import fully_shard_model    # was: from megatron_fsdp import
    fully_shard_model

Differences: gradients are correct in cases in which megatron-fsdp 0.6.1 computes wrong ones (accumulation under
``no_shard``, ``optim`` and HSDP; HFSDP). An optimizer keeps its parameter groups. A warning names arguments
without effect. The interface follows megatron-fsdp 0.6.1's documentation. The implementation is te_fsdp's own.
"""

from __future__ import annotations

from te_fsdp.compat.megatron_fsdp.arguments import (
    DistributedDataParallelConfig,
    FSDPDistributedIndex,
    MixedPrecisionPolicy,
)
from te_fsdp.compat.megatron_fsdp.sharding import (
    MegatronFSDP,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from te_fsdp.replicated_params import fsdp_no_shard

__all__ = [
    "DistributedDataParallelConfig",
    "FSDPDistributedIndex",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "fsdp_no_shard",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
