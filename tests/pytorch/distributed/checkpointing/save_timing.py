"""Saves in the middle of a step, which a checkpoint cannot represent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from checkpointing.mistakes import AXES, Small, error_of


class Chain(Small):
    """A model with a forward, in two units."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def save_between_microbatches(directory: str, how: str) -> dict[str, Any]:
    """Save with unreduced gradients, then after the step. The first save raises and drops nothing.

    ``how`` is a strategy, or "torch" for a model that torch's own ``fully_shard`` has sharded.
    """
    import te_fsdp

    torch.manual_seed(0)
    model: Any = Chain()
    meshes = te_fsdp.Meshes.build(**AXES, device_type=harness.device_type())
    if how == "torch":
        fully_shard(model.second, mesh=meshes.fsdp)
        fully_shard(model, mesh=meshes.fsdp)
    else:
        te_fsdp.fully_shard(model, meshes, units=["second"], strategy=how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(2, 4, device=harness.device())

    def backward(last: bool) -> None:
        if how == "torch":
            model.set_requires_gradient_sync(last)
            model(x).sum().backward()
        else:
            with te_fsdp.microbatch(model, is_last=last):
                model(x).sum().backward()

    backward(last=True)
    expected = {name: 2 * gradient(p) for name, p in model.named_parameters()}
    te_fsdp.checkpoint.save(Path(directory, "before"), model, optimizer)  # complete gradients are no reason
    optimizer.zero_grad()

    backward(last=False)
    refused = error_of(lambda: te_fsdp.checkpoint.save(Path(directory, "refused"), model, optimizer))
    backward(last=True)
    kept = {name: torch.equal(gradient(p), expected[name]) for name, p in model.named_parameters()}
    optimizer.step()
    te_fsdp.checkpoint.save(Path(directory, "after"), model, optimizer)
    backward(last=False)
    if how == "torch":
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.zero_grad()
    else:
        te_fsdp.zero_grad(model)
        te_fsdp.checkpoint.save(Path(directory, "discarded"), model, optimizer)
    return {"refused": refused, "kept": kept, "there": sorted(p.name for p in Path(directory).iterdir())}


def gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad.clone()
