"""Gradients of units that a backward does not reach."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

import te_fsdp

HIDDEN = 16


class Branches(nn.Module):
    """Three units, of which a forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor, plan: list[int], weights: list[float]) -> torch.Tensor:
        """Run the layers of ``plan``, -1 raises. A weight of 0 keeps a layer out of the graph."""
        for number, weight in zip(plan, weights, strict=True):
            if number == -1:
                raise ValueError("a batch that cannot be used")
            y = self.layers[number](x)
            x = x + y * weight if weight else x
        return x


def _models(strategy: str) -> tuple[Branches, Branches]:
    torch.manual_seed(0)
    alone = Branches().to(harness.device())
    model = Branches().to(harness.device())
    model.load_state_dict(alone.state_dict())
    te_fsdp.fully_shard(
        model, te_fsdp.Meshes.build(dp_shard=dist.get_world_size()), units=[nn.Linear], strategy=strategy
    )
    return alone, model


def _batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    # Inputs with gradients let FSDP2 reduce the first layer last, also on a rank that does not use it.
    return torch.randn(8, HIDDEN, generator=generator).to(harness.device()).requires_grad_()


#: Layers of each step with their factors, for rank 0 and for the other ranks.
PLANS = {
    "left out": [([0, 1, 2], [1.0, 1.0, 1.0]), ([0, 2], [1.0, 1.0]), ([0, 1, 2], [1.0, 1.0, 1.0])],
    "not reached": [([0, 1, 2], [1.0, 1.0, 1.0]), ([0, 1, 2], [1.0, 0.0, 1.0])],
    "one rank": [([0, 1, 2], [1.0, 1.0, 1.0]), ([0, 1, 2], [0.5, 1.0, 1.0])],
    "inputs alone": [([0, 1, 2], [1.0, 1.0, 1.0]), ([0, 1, 2], [1.0, 1.0, 1.0])],
}


def steps_in_hooks(strategy: str, kind: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Train with an optimizer step in each parameter's hook. Return each weight, and that of one process."""
    alone, model = _models(strategy)
    for each in (alone, model):
        for parameter in each.parameters():
            _step_in_hook(parameter)
    ranks = dist.get_world_size()
    for step, (plan, weights) in enumerate(PLANS[kind]):

        def of(rank: int, weights: list[float] = weights) -> list[float]:
            return [0.0 if kind == "one rank" and w == 0.5 and rank == 0 else w for w in weights]

        model(_batch(step, dist.get_rank()), plan, of(dist.get_rank())).square().mean().backward()
        losses = [alone(_batch(step, rank), plan, of(rank)).square().mean() for rank in range(ranks)]
        (sum(losses) / ranks).backward()  # type: ignore[union-attr]
        if kind == "inputs alone":
            x = _batch(step, dist.get_rank())
            torch.autograd.grad(model(x, plan, weights).sum(), x)
    ours = dict(model.named_parameters())
    return {
        name: (harness.full(ours[name].detach()).cpu(), p.detach().cpu())
        for name, p in alone.named_parameters()
    }


def _step_in_hook(parameter: Any) -> None:
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.1)

    def update(given: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(update)


def backward_of_inner_unit(strategy: str, how: str) -> dict[str, tuple[Any, Any]]:
    """Clear a microbatch that is not reduced, run one unit alone. Return each gradient, and that of one process."""
    alone, model = _models(strategy)
    everything = list(model.parameters())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    with te_fsdp.no_sync(model):
        model(_batch(0, rank), [0, 1, 2], [1.0, 1.0, 1.0]).square().mean().backward()
    if how == "loop":
        for parameter in everything:
            parameter.grad = None
    else:
        model.zero_grad()
    model.layers[1](_batch(1, rank)).square().mean().backward()
    te_fsdp.finish_grad_reduce(model)
    losses = [alone.layers[1](_batch(1, each)).square().mean() for each in range(ranks)]
    (sum(losses) / ranks).backward()  # type: ignore[union-attr]
    ours = dict(zip(dict(alone.named_parameters()), everything, strict=True))
    return {
        name: (
            None if ours[name].grad is None else harness.full(ours[name].grad).cpu(),
            None if p.grad is None else p.grad.cpu(),
        )
        for name, p in alone.named_parameters()
    }


def change_after(strategy: str, event: str, change: str) -> dict[str, tuple[Any, Any]]:
    """Do ``event`` after a backward, then ``change``. Return gradients of the next one, and those of one process."""
    alone, model = _models(strategy)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    everything, ones = dict(model.named_parameters()), [1.0, 1.0, 1.0]
    for step in range(2):
        model(_batch(step, rank), [0, 1, 2], ones).square().mean().backward()
        losses = [alone(_batch(step, each), [0, 1, 2], ones).square().mean() for each in range(ranks)]
        (sum(losses) / ranks).backward()  # type: ignore[union-attr]
        if step == 1:
            break
        if event == "inner":
            with torch.no_grad():
                model.layers[1](_batch(5, rank))
        else:
            with contextlib.suppress(ValueError), torch.set_grad_enabled(event == "raise"):
                model(_batch(5, rank), [0, 1, -1], ones)
        for each in (model, alone):
            parameters = dict(each.named_parameters())
            if change == "clear":
                for parameter in parameters.values():
                    parameter.grad = None
            elif change == "freeze":
                parameters["layers.1.weight"].requires_grad_(False)
            else:
                with torch.no_grad():
                    parameters["layers.1.weight"].mul_(2.0)
    return {
        name: (
            None if everything[name].grad is None else harness.full(everything[name].grad).cpu(),
            None if p.grad is None else p.grad.cpu(),
        )
        for name, p in alone.named_parameters()
    }


def write_after_prefetch() -> tuple[torch.Tensor, torch.Tensor]:
    """Write after an evaluation that skips a prefetched unit. Return the next output, and that of one process."""
    alone, model = _models("optim_grads_params")
    x, ones = _batch(0, dist.get_rank()), [1.0, 1.0, 1.0]
    model(x, [0, 1, 2], ones)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    with torch.no_grad():
        model(x, [0, 2], [1.0, 1.0])
        for parameter in (*model.parameters(), *alone.parameters()):
            parameter.mul_(1.5)
    return model(x, [0, 1, 2], ones).detach().cpu(), alone(x, [0, 1, 2], ones).detach().cpu()
