"""A small model with units whose root has its own parameters: uneven, frozen."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import harness
import torch
from torch import nn

HIDDEN, FFN, CLASSES, BLOCKS, ROWS = 16, 32, 7, 2, 4
SEED = 7


class Model(nn.Module):
    """Two blocks of TE, or a different number, and a head whose 7 rows no mesh divides."""

    def __init__(
        self, device: Any, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS, **kwargs: Any
    ) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"device": device, "params_dtype": dtype, **kwargs}
        self.blocks = nn.ModuleList(te.LayerNormMLP(HIDDEN, FFN, **options) for _ in range(blocks))
        self.head = nn.Linear(HIDDEN, CLASSES, device=device, dtype=dtype)
        self.head.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Run a further method, as a library defines it."""
        return self(x)


def sharded(
    meshes: Any,
    strategy: str | Mapping[Any, str],
    outer: str = "no_shard",
    dtype: torch.dtype = torch.float32,
    precision: Any = None,
    transport: str = "auto",
    zero_copy: bool | str = "auto",
    activation: str = "gelu",
) -> nn.Module:
    """Return the model on its meshes."""
    import te_fsdp

    kwargs = meshes.te_kwargs() | ({"set_parallel_mode": True} if meshes.size("tp") > 1 else {})
    model = Model("meta", dtype, activation=activation, **kwargs)
    options = {"strategy": strategy, "outer_strategy": outer, "precision": precision, "transport": transport}
    te_fsdp.fully_shard(model, meshes, units="blocks.*", zero_copy_gradients=zero_copy, **options)
    return te_fsdp.materialize(model, seed=SEED)


def one_process() -> nn.Module:
    """Return the same in one process."""
    torch.manual_seed(SEED)
    return Model(harness.device())


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer with two groups.

    Adam divides by the gradient's own size, which makes rounding of a gradient near zero as large as the gradient of
    others: a large eps keeps what is compared proportional to gradients.
    """
    from transformer_engine.pytorch.optimizers import FusedAdam

    params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": params[:3], "lr": 2e-2}, {"params": params[3:], "lr": 1e-2}]
    if name == "SGD":
        return torch.optim.SGD(groups, momentum=0.9)
    if name == "AdamW":
        return torch.optim.AdamW(groups, eps=1e-3)
    return FusedAdam(groups, eps=1e-3, weight_decay=0.01)


def batch(step: int, copies: int, microbatches: int) -> torch.Tensor:
    """Return inputs: microbatches x data-parallel ranks x rows x hidden."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (microbatches, copies, ROWS, HIDDEN)
    return torch.randn(shape, generator=generator).to(harness.device())


def step_both(pairs: list[tuple[Any, Any]], meshes: Any, number: int) -> None:
    """Train a sharded model and its reference in one process, each with its optimizer, on the same batch."""
    x = batch(number, meshes.data_size, 1)[0]
    pairs[0][0](x[meshes.data_rank]).square().mean().backward()
    pairs[1][0](x.flatten(0, 1)).square().mean().backward()
    for _, optimizer in pairs:
        optimizer.step()
        optimizer.zero_grad()


def gradients_and_weights(
    model: nn.Module, data: list[torch.Tensor], recipe: Any = None
) -> list[torch.Tensor]:
    """Train a model that returns its loss by SGD. Return the gradients of each step, and the last weights."""
    import transformer_engine.pytorch as te

    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    for x in data:
        optimizer.zero_grad()
        with te.autocast(recipe=recipe) if recipe is not None else contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        found += [harness.full(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found + [harness.full(p.detach()) for p in model.parameters()]


def error_of_training(model: nn.Module, alone: nn.Module, meshes: Any) -> tuple[float, int]:
    """Return the largest relative error of three steps against one process, and the number of tensors."""
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            theirs.copy_(harness.full(mine.detach()))
    data = [batch(step, meshes.data_size, 1)[0] for step in range(3)]
    found = gradients_and_weights(model, [x[meshes.data_rank] for x in data])
    expected = gradients_and_weights(alone, [x.flatten(0, 1) for x in data])
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True) if b.any()]
    return max(errors), len(errors)
