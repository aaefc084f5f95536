"""Assignments to ``.data`` of DTensors that are not parameters, which torch drops without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from strategies.models import SEED, Model, batch, sharded
from torch import nn


def _gradients(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.grad is not None):
            parameter.grad.data = parameter.grad.data * 0.5 + parameter.grad.data.sign() * 0.1


def _states(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].data = state["momentum_buffer"].data * 0.3


class AssigningSGD(torch.optim.SGD):
    """SGD that assigns its results, as optimizers of earlier versions of torch."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.data = parameter.data - group["lr"] * parameter.grad.data


#: Name -> class of the optimizer, assignment before each step, dtype of the model.
CASES: dict[str, tuple[type[torch.optim.SGD], Callable[[Any], None], torch.dtype]] = {
    "gradients": (torch.optim.SGD, _gradients, torch.float32),
    "states": (torch.optim.SGD, _states, torch.float32),
    "main weights": (AssigningSGD, lambda optimizer: None, torch.bfloat16),
}


def error_of_training(case: str, tp: int) -> float:
    """Train three steps. Return the largest relative error of a parameter."""
    import te_fsdp

    optimizer_class, assign, dtype = CASES[case]
    meshes = te_fsdp.Meshes.build(dp_shard=-1, tp=tp, device_type=harness.device_type())
    model = sharded(meshes, "optim_grads_params", dtype=dtype)
    torch.manual_seed(SEED)
    models: list[nn.Module] = [model, Model(harness.device(), dtype)]
    optimizers = [optimizer_class(one.parameters(), lr=0.5, momentum=0.9) for one in models]
    if dtype != torch.float32:
        for one, optimizer in zip(models, optimizers, strict=True):
            te_fsdp.main_weights(one, optimizer)
    for step in range(3):
        x = batch(step, meshes.data_size, 1)[0].to(dtype)
        for one, data in zip(models, (x[meshes.data_rank], x.flatten(0, 1)), strict=True):
            one(data).float().square().mean().backward()
        for optimizer in optimizers:
            assign(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    mine, wanted = ([harness.full(p).float() for p in one.parameters()] for one in models)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(mine, wanted, strict=True) if b.any())


@pytest.mark.parametrize(
    "tp", [pytest.param(1, marks=pytest.mark.ranks(2)), pytest.param(2, marks=pytest.mark.ranks(4))]
)
@pytest.mark.parametrize("case", CASES)
def test_data_assignments_equal_one_process(pool, case, tp):
    # fp32: sums in a different order. bf16: rounded gradients. Lost assignments: 4e-2 and more.
    tolerance = 1e-5 if CASES[case][2] == torch.float32 else 1e-2
    for error in pool.run(error_of_training, 2 * tp, case=case, tp=tp):
        assert error < tolerance
