"""Bodies: averages of weights, compared with those of one process."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn
from torch.optim import swa_utils

WIDTH = 16


class Block(nn.Module):
    """A layer of TE and a normalization whose statistics are buffers."""

    def __init__(self, te: Any) -> None:
        super().__init__()
        self.linear = te.Linear(WIDTH, WIDTH, device=harness.device())
        self.norm = nn.BatchNorm1d(WIDTH, device=harness.device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


class Net(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(te), Block(te))
        self.head = nn.Linear(WIDTH, 4, device=harness.device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def _batch(seed: int) -> torch.Tensor:
    """The same on all ranks, so that statistics are those of one process."""
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).to(harness.device())


def _evaluate(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        result = model(_batch(100))
    model.train()
    return result


def _pair(strategy: str) -> tuple[nn.Module, nn.Module, Any]:
    """A plain model, one that is not sharded yet with the same weights, and the meshes."""
    import transformer_engine.pytorch as te

    import te_fsdp

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net(te))
    return models[0], models[1], te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())


def averaged(strategy: str, average: str) -> list[float]:
    """``AveragedModel`` of a model, both sharded: the largest error of each evaluation, and whether values change."""
    import te_fsdp

    functions = {
        "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.5)},
        "swa": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
        "own": {"avg_fn": lambda old, new, _: 0.5 * old + 0.5 * new},
    }
    plain, model, meshes = _pair(strategy)
    averages = [swa_utils.AveragedModel(one, **functions[average]) for one in (plain, model)]
    for one in (model, averages[1].module):
        te_fsdp.fully_shard(one, meshes, strategy=strategy, units=[Block], checks="setup")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (plain, model)]
    errors, before = [], None
    for step in range(4):
        results = []
        for one, mean, optimizer in zip((plain, model), averages, optimizers, strict=True):
            one(_batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(one)
            swa_utils.update_bn([_batch(50 + step)], mean)
            results.append(_evaluate(mean))
        errors.append((results[0] - results[1]).abs().max().item())
        # The control: an evaluation of the previous average would differ by more.
        assert before is None or (results[0] - before).abs().max() > 1e-3
        before = results[0]
    return errors


def copied(strategy: str) -> float:
    """Weights of another model by ``torch._foreach_copy_`` between two evaluations: the error of the second."""
    import te_fsdp

    plain, model, meshes = _pair(strategy)
    te_fsdp.fully_shard(model, meshes, strategy=strategy, units=[Block], checks="setup")
    before = _evaluate(model)
    with torch.no_grad():
        for one in (plain, model):
            parameters = [*one.parameters()]
            torch._foreach_copy_(parameters, [p.detach() * 0.5 for p in parameters])
    expected, got = _evaluate(plain), _evaluate(model)
    assert (expected - before).abs().max() > 1e-3
    return (expected - got).abs().max().item()
