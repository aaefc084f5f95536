"""Body: closures, which raise exactly where their gradients would be available too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import nn

from strategies.accumulation import refused
from strategies.edge_cases import Net, inputs, same, shard, shards


def _over_tp(options: dict[str, Any]) -> nn.Module:
    """Return a model over tp: a norm, whose weight every tp rank has, and a linear module, which tp shards."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    kwargs = {"params_dtype": torch.float32, "device": "meta"}
    model = nn.Sequential(
        te.LayerNorm(8, dtype=torch.float32, device="meta"),
        te.Linear(8, 8, parallel_mode="column", **meshes.te_kwargs(), **kwargs),
    )
    te_fsdp.fully_shard(model, meshes, **options)
    te_fsdp.materialize(model)
    return model


def _closure(model: nn.Module, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        model.zero_grad()
        loss = model(inputs(dtype=dtype)).float().square().mean()
        loss.backward()
        return loss

    return closure


def closure_errors(optimizer: str) -> dict[str, bool]:
    """Return, for each kind of model, whether a step with a closure is refused; weights must stay as they are then.

    Args:
        optimizer: Name of one of torch's.
    """
    import te_fsdp

    fp32, bf16 = torch.float32, torch.bfloat16
    mixed = Net()
    te_fsdp.fsdp_no_shard(mixed.side)
    policy = te_fsdp.MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=fp32)
    models = {
        "plain": (shard(Net()), fp32),
        "over tp": (_over_tp({}), fp32),
        "over tp, no_shard": (_over_tp({"strategy": "no_shard"}), fp32),
        "some replicated": (shard(mixed), fp32),
        "main_grads_dtype": (shard(Net(0, bf16), precision=policy), bf16),
    }
    results = {}
    for name, (model, dtype) in models.items():
        stepping = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
        before = shards(model)
        if name == "plain":
            stepping.step(_closure(model, dtype))
        else:
            with refused(f"{optimizer}.step(closure)"):
                stepping.step(_closure(model, dtype))
        results[name] = same(before, shards(model))
    return results
