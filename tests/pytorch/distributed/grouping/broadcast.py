"""Body: weights with all experts of a layer after `te_fsdp.broadcast_params`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from experts.single_parameter import sharded


def broadcast_experts(recipe: str) -> dict[str, Any]:
    """Change the bytes of the experts on the second rank, and broadcast.

    Returns:
        Names of the weights, those that differ between the ranks before and after the broadcast, and those with a
        transpose that is not that of the data.
    """
    import te_fsdp
    from te_fsdp.upstream import torch_dtensor as _torch

    axes = {"dp_replicate": 2, "dp_shard": 1}
    _, model = sharded(axes, recipe, "quantized", experts=4)
    weights = {name: _torch.local_of(p) for name, p in model.named_parameters() if name.startswith("mixture")}
    if dist.get_rank():
        for weight in weights.values():
            weight.get_metadata()["rowwise_data"].add_(1)
    before = _differing(weights)
    te_fsdp.broadcast_params(model)
    stale = []
    for name, weight in weights.items():
        for expert in weight.experts:
            parts = expert.get_metadata()
            transpose = parts.get("data_transpose")
            if transpose is not None and not torch.equal(transpose, parts["data"].t()):
                stale.append(name)
    return {"names": list(weights), "before": before, "after": _differing(weights), "stale": stale}


def _differing(weights: dict[str, Any]) -> list[str]:
    """Compare the values of all ranks. Collective."""
    differ = []
    for name, weight in weights.items():
        values = torch.stack([expert.dequantize() for expert in weight.experts])
        everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, values)
        if not all(torch.equal(everyone[0], other) for other in everyone):
            differ.append(name)
    return differ
