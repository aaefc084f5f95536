"""Body: values of parameters after ``redistribute``."""

from __future__ import annotations

import harness
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard


def differing(recipe: str, axes: dict[str, int], uneven: bool) -> list[str]:
    """Return parameters and placements whose ``redistribute`` changes values, or rows of the first axis."""
    import transformer_engine.pytorch as te
    from checkpointing import models

    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    assert meshes.tp is not None
    options = {"tp_size": meshes.tp.size(), "tp_group": meshes.tp.get_group(), "set_parallel_mode": True}
    width, inner = (10, 20) if uneven else (128, 256)
    with te.quantized_model_init(enabled=recipe != "none", recipe=models.recipe_of(recipe)):
        model = nn.Sequential(te.LayerNormMLP(width, inner, activation="swiglu", device="meta", **options))
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    results = []
    for name, parameter in model.named_parameters():
        mesh, full = parameter.device_mesh, harness.full(parameter.detach().full_tensor())
        everywhere, first = [Replicate()] * mesh.ndim, [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
        for placements in (parameter.placements, everywhere, first, [Shard(0)] * mesh.ndim):
            moved = parameter.detach().redistribute(placements=placements)
            same = torch.equal(harness.full(moved.full_tensor()), full)
            if placements is first:
                rank = mesh.get_coordinate()[0]
                rows = [*full.chunk(mesh.size(0)), *[full[:0]] * mesh.size(0)][rank]
                same &= torch.equal(harness.full(moved.to_local()), rows)
            results += [] if same else [f"{name}: {placements}"]
    return results
