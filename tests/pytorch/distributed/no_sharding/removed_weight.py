"""Body: replicated parameters that are removed after a first forward."""

from __future__ import annotations

import harness
import torch
from torch import nn
from torch.nn.utils import parametrize


class Double(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def error_of_removed_weight(kind: str) -> str:
    """Remove the weight of a replicated layer after a backward; return the error of the next forward."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=1, device_type=harness.device_type())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(harness.device())
    te_fsdp.fully_shard(model, meshes, strategy="no_shard")
    batch = torch.ones(2, 8, device=harness.device())
    model(batch).sum().backward()
    if kind == "parametrized":
        parametrize.register_parametrization(model[1], "weight", Double())
    elif kind == "deleted":
        del model[1].weight
    else:
        model[1].weight = None
    try:
        model(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
