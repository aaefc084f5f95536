"""Bodies about `te.ops` modules."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn


def build(device: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    how: dict[str, Any] = {"device": device, "dtype": torch.float32}
    layers = te.ops.LayerNorm(32, **how), te.ops.Linear(32, 64, **how), te.ops.GELU()
    return te.ops.Sequential(*layers, te.ops.Linear(64, 32, bias=False, **how))


def train_from_meta(strategy: str) -> dict[str, float]:
    """Build on meta and compare bits with one process at first, and values after three steps."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    torch.manual_seed(3)
    reference, model = build(harness.device()), build("meta")
    te_fsdp.fully_shard(model, meshes, strategy=strategy)
    te_fsdp.materialize(model, seed=3)
    assert max(_distance(model, reference)) == 0.0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(harness.device())
        model(x.chunk(meshes.data_size)[meshes.data_rank]).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    te_fsdp.release_params(model)
    return {"worst": max(_distance(model, reference))}


def _distance(model: nn.Module, reference: nn.Module) -> list[float]:
    results = []
    for name, parameter in reference.named_parameters():
        mine = model.get_parameter(name).detach()
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        results.append(float((mine - parameter.detach()).abs().max()))
    return results


def error_of_quantized_ops(device: str, strategy: str) -> None:
    """Raise on every rank, except for `no_shard`."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    import te_fsdp

    with te.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        where = "meta" if device == "meta" else harness.device()
        model = te.ops.Sequential(te.ops.Linear(32, 64, device=where, dtype=torch.bfloat16))
    te_fsdp.fully_shard(
        model, te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type()), strategy=strategy
    )
