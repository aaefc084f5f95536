"""Different initial values per tp rank for models that are built on the device from equal seeds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def shift_rows_by_rank(model: nn.Module, group: Any, *, experts: bool = False) -> nn.Module:
    """Rotate the rows of each weight shard of TE's modules by the rank's number in ``group``.

    Every rank of the pool draws the same numbers, so the shards of a weight would be equal, which te_fsdp refuses.
    Replicated parameters stay equal.

    Args:
        model: With stock TE modules on the device, or on meta (then nothing is done), not bound to meshes.
        group: The tensor-parallel process group, or `None`.
        experts: All parameters, over an expert-parallel group.
    """
    rows = 0 if group is None else dist.get_rank(group)
    for parameter in model.parameters() if rows else ():
        if (experts or getattr(parameter, "tensor_model_parallel", False)) and not parameter.is_meta:
            with torch.no_grad():
                quantized = hasattr(parameter, "get_metadata")
                parameter.copy_((parameter.dequantize() if quantized else parameter.clone()).roll(rows, 0))
                if hasattr(parameter, "_high_precision_init_val"):
                    parameter._high_precision_init_val = parameter._high_precision_init_val.roll(rows, 0)
    return model
