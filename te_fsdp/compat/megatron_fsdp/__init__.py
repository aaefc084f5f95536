"""Megatron-FSDP's names on te_fsdp: a training script moves by changing one import.

    from te_fsdp.compat.megatron_fsdp import fully_shard_model    # was: from megatron_fsdp import fully_shard_model

What differs: gradients are right where megatron-fsdp 0.6.1 has them wrong (accumulation under ``no_shard``, ``optim``
and HSDP; HFSDP), an optimizer keeps its parameter groups, and arguments that have no meaning here are named in a
warning. The interface is that of megatron-fsdp 0.6.1's documentation; the code behind it is te_fsdp's own.
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
