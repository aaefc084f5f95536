"""Bodies: one FSDP2 unit for all experts of a layer, in place of one for each ``GroupedLinear``."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from experts.bodies import training
from experts.model import build


def units(model: nn.Module) -> list[str]:
    """Return the names of FSDP2's units."""
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def sharded(axes: dict[str, int], requested: list[str], dense: bool) -> list[str]:
    """Return the units of a mixture of experts; `dense`: with a parameter of the mixture itself."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build("none", "fp32", 4, meshes, "meta", bias=True)
    if dense:
        model.mixture.scale = nn.Parameter(torch.ones(64, device="meta"))
    te_fsdp.fully_shard(model, meshes, units=requested)
    return units(model)


def trained(axes: dict[str, int], recipe: str, weights: str, **how: Any) -> dict[str, Any]:
    """Train with one unit for all experts, by value."""
    return training(axes, recipe, weights, 4, False, "every", units=["mixture"], **how)
