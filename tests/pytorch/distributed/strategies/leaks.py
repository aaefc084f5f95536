"""Bodies: models that are created, trained for one step and dropped."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import harness
import torch
from torch import nn

KINDS = (
    "Linear",
    "LayerNormLinear",
    "LayerNormMLP",
    "GroupedLinear",
    "TransformerLayer",
    "quantized",
    "nn.Linear",
)


class _Grouped(nn.Module):
    """Two experts, each of which gets half of the rows."""

    def __init__(self, options: dict[str, Any]) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.experts = te.GroupedLinear(2, 16, 16, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, [x.shape[0] // 2] * 2)


def _layer(kind: str) -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    options: dict[str, Any] = {"device": harness.device(), "params_dtype": torch.bfloat16}
    if kind == "nn.Linear":
        return nn.Linear(16, 16, device=harness.device(), dtype=torch.bfloat16)
    if kind == "GroupedLinear":
        return _Grouped(options)
    if kind == "LayerNormMLP":
        return te.LayerNormMLP(16, 32, **options)
    if kind == "TransformerLayer":
        return te.TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, **options)
    if kind == "quantized":
        with te.quantized_model_init(recipe=Float8CurrentScaling()):
            return te.Linear(16, 16, **options)
    return getattr(te, kind)(16, 16, **options)


def _live_and_die(meshes: Any, kind: str, strategy: Any, outer: str) -> weakref.ref[nn.Module]:
    """Create a model of two units, train it for one step, and drop it."""
    import te_fsdp

    torch.manual_seed(0)
    model = nn.Sequential(_layer(kind), _layer(kind))
    options: dict[str, Any] = {"strategy": strategy, "outer_strategy": outer, "check_inputs": False}
    te_fsdp.fully_shard(model, meshes, units=("0", "1"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if outer == "optim":
        te_fsdp.shard_optimizer(optimizer)
    elif kind == "quantized":
        te_fsdp.main_weights(model, optimizer)
    x = torch.randn(16, 1, 16) if kind == "TransformerLayer" else torch.randn(16, 16)
    x = x.to(harness.device(), torch.bfloat16)
    with te_fsdp.no_sync(model):
        model(x).float().square().mean().backward()
    with te_fsdp.microbatch(model, is_last=True):
        model(x).float().square().mean().backward()
    te_fsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    model.zero_grad()
    return weakref.ref(model)


def _counts() -> dict[str, int]:
    """Return the numbers of process groups, threads, descriptors and tensors of this process."""
    from torch.distributed import distributed_c10d

    gc.collect()
    tensors = sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return {
        "groups": len(distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tensors": tensors,
    }


def dropped(
    strategy: Any, models: int, dp_replicate: int = 1, outer: str = "no_shard", leak: bool = False
) -> dict[str, int]:
    """Return the growth of each count over ``models`` models of all kinds, after a warm-up with each kind.

    Args:
        strategy: The strategy.
        models: The number of models.
        dp_replicate: Size of the mesh axis.
        outer: The outer strategy.
        leak: Keep a model in each round: the negative control.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, device_type=harness.device_type())
    # Shared groups and caches of torch and TE are created once and stay.
    for kind in (*KINDS, *KINDS):
        _live_and_die(meshes, kind, strategy, outer)
    before, kept = _counts(), []
    for number in range(models):
        model = _live_and_die(meshes, KINDS[number % len(KINDS)], strategy, outer)
        if leak:
            kept.append(model())
        gc.collect()
        assert leak or model() is None, KINDS[number % len(KINDS)]
    after = _counts()
    del kept
    return {name: after[name] - before[name] for name in before}
