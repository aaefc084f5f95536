"""Bodies: the dtype in the specs of gradients of parameters that only tp shards."""

from __future__ import annotations

from typing import Any

import harness
import torch


def steps() -> dict[str, Any]:
    """Train bf16 parameters with fp32 gradients and main weights by AdamW, also with many tensors at once."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    options = {"params_dtype": torch.bfloat16, "device": "meta", **meshes.te_kwargs()}
    moved = 0
    for foreach in (False, True):
        model = torch.nn.Sequential(te.Linear(32, 32, parallel_mode="column", **options))
        te_fsdp.fully_shard(model, meshes, strategy="no_shard", precision=te_fsdp.MixedPrecisionPolicy())
        te_fsdp.materialize(model, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=foreach)
        te_fsdp.main_weights(model, optimizer)
        before = [harness.full(parameter) for parameter in model.parameters()]
        for _ in range(2):
            model(
                torch.ones(4, 32, device=harness.device(), dtype=torch.bfloat16)
            ).float().square().mean().backward()
            for parameter in model.parameters():
                gradient: Any = parameter.grad
                assert gradient.dtype == gradient.to_local().dtype == torch.float32, gradient.dtype
            optimizer.step()
            optimizer.zero_grad()
        moved += sum(
            not torch.equal(b, harness.full(p)) for b, p in zip(before, model.parameters(), strict=True)
        )
    return {"moved": moved}
