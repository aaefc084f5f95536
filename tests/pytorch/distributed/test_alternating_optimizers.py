"""Two optimizers with main weights of the same quantized weights, which step alternately."""

from __future__ import annotations

from typing import Any

import harness
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

WIDTH = 64


def error_after_another_optimizer(by: str, recipe: str) -> float:
    """Return how far a step with a rate of zero moves weights that another optimizer has updated."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    import te_fsdp

    with te.quantized_model_init(recipe=getattr(recipes, recipe)()):
        model = nn.Sequential(*(te.Linear(WIDTH, WIDTH, device=harness.device()) for _ in range(2)))
    if by != "one process":
        meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
        if by == "torch":
            te_fsdp.set_device_mesh(model, None, meshes.weight)
            fully_shard(model, mesh=meshes.fsdp)
        else:
            te_fsdp.fully_shard(model, meshes, strategy=by)
    optimizers = [torch.optim.SGD(model.parameters(), lr=4.0) for _ in range(2)]
    for optimizer in optimizers:
        te_fsdp.main_weights(model, optimizer)
    rows = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0)).to(harness.device())

    def step(optimizer: Any) -> torch.Tensor:
        (model(rows) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat([harness.full(p).flatten() for p in model.parameters()])

    first, second = optimizers
    step(first)
    step(first)
    before = step(first)
    step(second)
    expected = step(second)
    moved = float((expected - before).norm() / expected.norm())
    assert 0.02 < moved < 1.0, moved
    first.param_groups[0]["lr"] = 0.0
    return float((step(first) - expected).norm() / expected.norm())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipe", ["DelayedScaling", "Float8CurrentScaling"])
@pytest.mark.parametrize("by", ["one process", "torch", "no_shard", "optim_grads_params"])
def test_step_starts_from_the_weights_of_another_optimizer(pool, by, recipe):
    for error in pool.run(error_after_another_optimizer, 2, by=by, recipe=recipe):
        assert (
            error < 1e-3
        )  # rounding of the largest value, which determines the scale. Old main weights: 0.1
