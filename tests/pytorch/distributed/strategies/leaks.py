"""Bodies: models that are dropped after one step."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Sequence
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
    "RMSNorm",
    "ops",
    "quantized",
    "mxfp8",
    "nn.Linear",
)
#: Kinds with quantized weights.
QUANTIZED = ("quantized", "mxfp8")


class _Grouped(nn.Module):
    """Two experts, each of which gets half of the rows. With ``ep`` a rank has one of them."""

    def __init__(self, experts: int, options: dict[str, Any]) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.experts = te.GroupedLinear(experts, 16, 16, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.experts.num_gemms
        return self.experts(x, [x.shape[0] // count] * count)


def _layer(kind: str, meshes: Any) -> nn.Module:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling

    options: dict[str, Any] = {"device": harness.device(), "params_dtype": torch.bfloat16}
    if meshes.size("tp") > 1:
        options |= {"set_parallel_mode": True, **meshes.te_kwargs()}
    if kind == "nn.Linear":
        return nn.Linear(16, 16, device=harness.device(), dtype=torch.bfloat16)
    if kind == "GroupedLinear":
        return _Grouped(2 // meshes.size("ep"), options)
    if kind == "LayerNormMLP":
        return te.LayerNormMLP(16, 32, **options)
    if kind == "TransformerLayer":
        return te.TransformerLayer(16, 32, 2, hidden_dropout=0.0, attention_dropout=0.0, **options)
    if kind == "RMSNorm":
        return te.RMSNorm(16, device=harness.device(), dtype=torch.bfloat16)
    if kind == "ops":
        return te.ops.Sequential(te.ops.Linear(16, 16, device=harness.device(), dtype=torch.bfloat16))
    if kind in QUANTIZED:
        blocks = kind == "mxfp8" and te.is_mxfp8_available()  # not on Hopper
        recipe = MXFP8BlockScaling() if blocks else Float8CurrentScaling()
        with te.quantized_model_init(recipe=recipe):
            return te.Linear(64, 64, **options)
    return getattr(te, kind)(16, 16, **options)


def _train_and_drop(meshes: Any, kind: str, strategy: Any, outer: str) -> weakref.ref[nn.Module]:
    """Create a model of two units, train it for one step, and drop it."""
    import te_fsdp

    torch.manual_seed(0)
    model = nn.Sequential(_layer(kind, meshes), _layer(kind, meshes))
    options: dict[str, Any] = {"strategy": strategy, "outer_strategy": outer, "checks": "setup"}
    te_fsdp.fully_shard(model, meshes, units=("0", "1"), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if outer == "optim":
        te_fsdp.shard_optimizer(optimizer)
    elif kind in QUANTIZED:
        te_fsdp.main_weights(model, optimizer)
    width = 64 if kind in QUANTIZED else 16
    x = torch.randn(32, 1, width) if kind == "TransformerLayer" else torch.randn(32, width)
    x = x.to(harness.device(), torch.bfloat16)
    with te_fsdp.no_sync(model):
        model(x).float().square().mean().backward()
    with te_fsdp.microbatch(model, is_last=True):
        model(x).float().square().mean().backward()
    te_fsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()
    model.zero_grad()
    return weakref.ref(model)


#: Seconds in which counts have to fall to their limits.
WAIT = 10.0


def _released_within(model: weakref.ref[nn.Module], seconds: float) -> bool:
    """Return whether a dropped model is released in time.

    NCCL keeps the tensors of a collective until a thread of its own sees that the GPU has finished it.
    """
    until = time.monotonic() + seconds
    while True:
        gc.collect()
        if model() is None or time.monotonic() >= until:
            return model() is None
        time.sleep(0.05)


def _counts_within(limits: dict[str, int], seconds: float) -> dict[str, int]:
    """Return the counts once none exceeds its limit, or after the given time.

    A thread of Gloo can refer to the tensor of a collective for some time after ``wait()`` has returned.
    """
    until = time.monotonic() + seconds
    while True:
        counts = _counts()
        if all(counts[name] <= limit for name, limit in limits.items()) or time.monotonic() >= until:
            return counts
        time.sleep(0.05)


def _counts() -> dict[str, int]:
    """Return the numbers of process groups, threads, descriptors and tensors of this process."""
    from torch.distributed import distributed_c10d

    gc.collect()
    tensors = sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    return {
        "groups": len(distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tensors": tensors,
    }


def growth_of_counts(
    strategy: Any,
    models: int,
    outer: str = "no_shard",
    kinds: Sequence[str] = KINDS,
    leak: bool = False,
    **axes: int,
) -> dict[str, int]:
    """Return the growth of each count over ``models`` models of all kinds, after a warm-up with each kind.

    Args:
        strategy: The strategy.
        models: The number of models.
        outer: The outer strategy.
        kinds: The kinds of modules.
        leak: Keep a model in each round: the negative control.
        **axes: Of the mesh.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    # Shared groups and caches of torch and TE are created once and stay.
    for kind in (*kinds, *kinds):
        _train_and_drop(meshes, kind, strategy, outer)
    kept: list[Any] = []
    grown: dict[str, int] = {}
    # CUDA and NCCL start a thread at a later time than the first use: a leak grows in both rounds.
    for _ in range(2):
        before = _counts()
        for number in range(models):
            kind = kinds[number % len(kinds)]
            model = _train_and_drop(meshes, kind, strategy, outer)
            if leak:
                kept.append(model())
            assert leak or _released_within(model, WAIT), kind
        after = _counts_within(before, 0.0 if leak else WAIT)
        # `before` may include such a tensor.
        grown = {
            name: min(grown.get(name, count), max(0, count - before[name])) for name, count in after.items()
        }
        if not any(grown.values()):
            break
    return grown
