"""Bodies: HFSDP checkpoints with main weights that have not stepped."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn


def continues(axes: dict[str, int]) -> dict[str, Any]:
    """Check that runs continue after a save before the first step or with a frozen layer, here and on other axes.

    Args:
        axes: Of the mesh that loads; the other one is HFSDP's.
    """
    import te_fsdp

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    hybrid = {"dp_replicate": 2, "dp_shard": -1}
    twin, other = _made(hybrid), _made(hybrid)
    for place in ("first", "second"):
        te_fsdp.checkpoint.save(Path(folder[0], place), *other)
        other = _made(axes if place == "second" else hybrid)
        te_fsdp.checkpoint.load(Path(folder[0], place), *other)
        for model, optimizer in (twin, other):
            _step(model, optimizer)
    for model, _ in (twin, other):
        model[1].requires_grad_(True)
    for model, optimizer in (twin, other):
        _step(model, optimizer)
    checks = harness.Comparisons()
    for (name, actual), expected in zip(other[0].named_parameters(), twin[0].parameters(), strict=True):
        why = "bf16 weights, whose gradients are sums in a different order"
        checks.close(name, actual, expected, rtol=2**-7, why=why)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    return checks.require(4)


def _made(axes: dict[str, int]) -> tuple[nn.Module, Any]:
    """Return a model whose second layer is frozen, and its optimizer."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    options = {"params_dtype": torch.bfloat16, "device": "meta"}
    model = nn.Sequential(te.Linear(32, 32, **options), te.Linear(32, 32, **options))
    model[1].requires_grad_(False)
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim" if "dp_replicate" in axes else "no_shard")
    te_fsdp.materialize(model, seed=3)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=0.1, eps=1.0, master_weights=True)
    return model, te_fsdp.shard_optimizer(optimizer)


def _step(model: nn.Module, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(16, 32, generator=generator).to(harness.device(), torch.bfloat16)
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
