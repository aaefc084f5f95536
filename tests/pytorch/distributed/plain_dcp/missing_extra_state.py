"""Body: ``set_model_state_dict`` of modules without parameters."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)


def load(broadcast: bool, keep: bool, **options: Any) -> list[str]:
    """Load a full state dict; return the names of parameters with different values."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = nn.Sequential(te.MultiheadAttention(32, 2, fuse_qkv_params=True, device="meta", **options))
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    values = {name: torch.full(p.shape, 0.5, dtype=p.dtype) for name, p in model.named_parameters()}
    saved = (full if keep else {}) | values
    saved = saved if torch.distributed.get_rank() == 0 or not broadcast else {}
    set_model_state_dict(
        model,
        saved,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=keep),
    )
    return [n for n, p in model.named_parameters() if not torch.equal(harness.full(p), values[n])]
