"""Trainings whose units reduce all gradients as one, or each as FSDP2's own record."""

from __future__ import annotations

from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist

import te_fsdp
from te_fsdp.upstream import fsdp2_reduce

HIDDEN, TOKENS, STEPS = 64, 16, 3


class _Model(torch.nn.Module):
    """A gated MLP with a frozen bias; without tp also a layer whose rows no number of ranks divides."""

    def __init__(self, tp: dict[str, Any]) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"activation": "swiglu", "device": "meta", "params_dtype": torch.bfloat16, **tp}
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options)
        self.mlp.fc2_bias.requires_grad_(False)
        if tp:  # gradients of other modules would need a sum over the parts of the sequence
            return
        self.head = torch.nn.Linear(HIDDEN, 5, device="meta", dtype=torch.bfloat16)
        self.unused = torch.nn.Parameter(torch.empty(3, device="meta", dtype=torch.bfloat16))

    def reset_parameters(self) -> None:
        if hasattr(self, "unused"):
            torch.nn.init.constant_(self.unused, 0.3)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.mlp(x)
        if not hasattr(self, "head"):
            return y
        y = self.head(y)
        return y * self.unused.sum() if use else y


def train(
    axes: dict[str, int],
    stock: bool,
    microbatches: int = 1,
    policy: dict[str, Any] | None = None,
    hook: bool = False,
    unused: bool = False,
) -> dict[str, Any]:
    """Return the gradients of all steps, the final weights, and the number of reductions as one gradient."""
    meshes = te_fsdp.Meshes.build(**axes)
    tp = (
        {**meshes.te_kwargs(), "set_parallel_mode": True, "sequence_parallel": True}
        if axes.get("tp", 1) > 1
        else {}
    )
    model = _Model(tp)
    names = {} if policy is None else {"precision": te_fsdp.MixedPrecisionPolicy(**policy)}
    te_fsdp.fully_shard(model, meshes, units=["mlp"], **names)
    te_fsdp.materialize(model, seed=0)
    called, reduced, gradients = [], [], []
    if hook:
        model.mlp.fc1_weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad is not None))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    reduce = fsdp2_reduce.OneGradient.reduce

    def counted(one: Any, group: Any, *args: Any) -> bool:
        reduced.append(False if stock else reduce(one, group, *args))
        return reduced[-1]

    with mock.patch.object(fsdp2_reduce.OneGradient, "reduce", counted):
        for step in range(STEPS):
            for number in range(microbatches):
                torch.manual_seed(100 * step + 10 * number + dist.get_rank())
                x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=harness.device())
                use = not unused or (step == 1 and dist.get_rank() == 0)
                model(x, use).float().square().mean().backward()
            # A parameter without a gradient has none in the list of either training.
            gradients += [
                (f"{step} {name}", harness.full(parameter.grad).float().clone())
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            ]
            optimizer.step()
            optimizer.zero_grad()
    weights = [(name, harness.full(p).float()) for name, p in model.named_parameters()]
    return {"tensors": gradients + weights, "as one": sum(reduced), "called": called}
