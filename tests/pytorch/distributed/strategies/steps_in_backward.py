"""Train with an optimizer for each parameter that steps in a hook of backward."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from torch import nn

import te_fsdp

STEPS, HIDDEN, UNITS = 3, 16, 4


def train(in_backward: bool, strategy: str) -> dict[str, Any]:
    """Return the final weights and the collectives of each step of two microbatches."""
    meshes = te_fsdp.Meshes.build(dp_replicate=2, dp_shard=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(UNITS))).to(harness.device())
    te_fsdp.fully_shard(model, meshes, units=[str(unit) for unit in range(UNITS)], strategy=strategy)
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    if in_backward:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    called = []
    for number in range(STEPS):
        torch.manual_seed(10 * number + dist.get_rank())
        with recorded() as collectives:
            for last in (False, True):
                x = torch.randn(4, HIDDEN, device=harness.device())
                with te_fsdp.microbatch(model, is_last=last):
                    model(x).square().mean().backward()
            for parameter in () if in_backward else each:
                step(parameter)
        called.append([one.kind for one in collectives])
    weights = {name: harness.full(parameter) for name, parameter in model.named_parameters()}
    return {"weights": weights, "collectives": called}
