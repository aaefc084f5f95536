"""Bodies: a registered method that the unit's own forward, or a different registered method, calls."""

from __future__ import annotations

import copy
import logging
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

WIDTH = 8


class Block(nn.Module):
    """Two linear modules in one unit; `encode` uses the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, device=harness.device()) for _ in range(2))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.encode(x))


class Net(Block):
    """A root with weights of its own around a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(self.block(x)))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.encode(x)) + self(x)


def unsharded(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def train_with_nested_methods(
    strategy: str, registered: list[str], own_weights: bool = True
) -> dict[str, Any]:
    """Train and score a model whose methods call each other; return messages, and the largest difference.

    Args:
        strategy: Of all units.
        registered: Units ("" is the root) whose methods are registered.
        own_weights: Of the root, outside of the unit in it.
    """
    import te_fsdp

    torch.manual_seed(0)
    reference = Net()
    if not own_weights:
        reference.first, reference.second = nn.Identity(), nn.Identity()
    model: Any = copy.deepcopy(reference)
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, units=[Block], strategy=strategy)
    for name in registered:
        unit = model.get_submodule(name)
        for method in ["encode", "score"] if unit is model else ["encode"]:
            te_fsdp.register_forward_method(unit, method)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("te_fsdp").addHandler(handler)
    everything = torch.randn(4 * dist.get_world_size(), WIDTH, generator=torch.Generator().manual_seed(1))
    everything = everything.to(harness.device())
    results = []
    for net, x in (
        (reference, everything),
        (model, everything.chunk(dist.get_world_size())[dist.get_rank()]),
    ):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        for _ in range(2):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            scores = [net.score(everything) if "" in registered else net(everything), net(everything)]
        results.append([*scores, *map(unsharded, net.parameters())])
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(*results, strict=True))
    assert not messages, messages
    if "" in registered:  # after an exception, a direct call recovers and all-gathers
        with pytest.raises(RuntimeError):
            model(everything[:, 1:])
        with torch.no_grad():
            again = model.encode(everything)
            worst = max(worst, float((again - reference.encode(everything)).abs().max()))
        assert len(messages) == (strategy != "no_shard"), messages  # without FSDP2 there is nothing to reset
    logging.getLogger("te_fsdp").removeHandler(handler)
    return {"worst": worst}
