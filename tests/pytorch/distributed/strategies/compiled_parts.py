"""Bodies: blocks or steps under ``torch.compile``, compared bit for bit with one process."""

from __future__ import annotations

import functools
from typing import Any

import harness
import torch
from torch import nn

SIZE, STEPS = 32, 2


class Block(nn.Module):
    """A module whose ``te.Linear`` torch.compile traces."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.linear = te.Linear(SIZE, SIZE, device=harness.device(), params_dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.linear(x))


def equal_to_one_process(way: str) -> int:
    """Train with the same batch on all ranks; return how many values equal one process bit for bit.

    ``way`` is "before" or "after" for blocks compiled before or after ``fully_shard``, "torch" for torch's own
    ``fully_shard``, or "step" for a compiled step.
    """
    checks = harness.Comparisons()
    single, compiled = _train(""), _train(way)
    torch._dynamo.reset()
    for name, value in single.items():
        checks.bitwise_equal(name, compiled[name], value)
    return len(single)


def _train(way: str) -> dict[str, torch.Tensor]:
    import te_fsdp

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if way == "before":
        _compile(model)
    if way == "torch":
        meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
        te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight)
        for unit in (*model, model):
            torch.distributed.fsdp.fully_shard(unit, mesh=meshes.fsdp)
    elif way:
        if way == "after":
            te_fsdp.fsdp_no_shard(model[0].linear)
        meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
        te_fsdp.fully_shard(model, meshes, units=[Block])
    if way in ("after", "torch"):
        _compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = functools.partial(_step, model)
    if way == "step":
        step = torch.compile(functools.partial(_step, model), backend="eager")
    results = {}
    for number in range(STEPS):
        x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(number)).to(harness.device())
        results[f"loss {number}"] = step(x).detach()
        for name, parameter in model.named_parameters():
            gradient = harness.full(parameter.grad)
            assert gradient.any()
            results[f"gradient {number} {name.replace('_orig_mod.', '')}"] = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
    return results


def _compile(model: Any) -> None:
    for index, block in enumerate(model):
        model[index] = torch.compile(block, backend="eager")


def _step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss
