"""Body: gradients that autograd expands, or returns for two parameters, of hand-written modules over tp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

FORMS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "sum of a parameter": lambda m, x: x.sum() + m.a.sum() * x.mean(),
    "sum of the output": lambda m, x: (x + m.a).sum(),
    "expanded parameter": lambda m, x: (m.a.expand(x.shape[0], -1) * x).sum(),
    "sum of two parameters": lambda m, x: (x * (m.a + m.b)).sum(),
    "two views of one sum": lambda m, x: (x * (m.a + m.b.view(-1))).mean() + (m.a + m.b).sum(),
}


class Part(nn.Module):
    """Two vectors, marked or not."""

    def __init__(self, form: str, marked: bool) -> None:
        super().__init__()
        self.form = form
        self.a = nn.Parameter(torch.ones(8, device=harness.device()))
        self.b = nn.Parameter(torch.full((8,), 0.5, device=harness.device()))
        for parameter in self.parameters():
            parameter.sequence_parallel = marked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORMS[self.form](self, x)


class Model(nn.Module):
    """A layer of TE before it, so that the model is split over tp."""

    def __init__(self, form: str, marked: bool, **options: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.inner = te.LayerNorm(8, device=harness.device(), **options)
        self.part = Part(form, marked)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.inner(x))


def trained(strategy: str | None, form: str, marked: bool) -> list[float]:
    """Return how far the hand-written module's parameters are from those of one process, after two steps.

    Two microbatches a step, and clipping. Marked ones see a different half of the rows on each rank of tp.

    Args:
        strategy: Of ``fully_shard``; ``None`` for ``set_device_mesh`` alone.
        form: A key of :data:`FORMS`.
        marked: Whether the module is marked ``sequence_parallel``.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(tp=2, device_type=harness.device_type())
    model, reference = Model(form, marked, sequence_parallel=marked), Model(form, marked)
    if strategy is None:
        te_fsdp.set_device_mesh(model, tp_mesh=meshes.tp, check_inputs=False)
    else:
        te_fsdp.fully_shard(model, meshes, units=("part", "inner"), strategy=strategy, check_inputs=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    rank = dist.get_rank()
    for step in range(2):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            x = torch.randn(4, 8, generator=generator).to(harness.device())
            mine = x[2 * rank : 2 * rank + 2] if marked else x
            model(mine).backward()
            for half in (x[:2], x[2:]) if marked else (x,):
                reference(half).backward()
        norms = [
            float(te_fsdp.clip_grad_norm_(model, 0.5)),
            float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5)),
        ]
        assert abs(norms[0] - norms[1]) < 1e-5 * norms[1], (
            norms
        )  # fp32 sums of few terms in a different order
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.part.parameters(), reference.part.parameters(), strict=True)
    return [float((ours.full_tensor() - theirs).abs().max()) for ours, theirs in pairs]
