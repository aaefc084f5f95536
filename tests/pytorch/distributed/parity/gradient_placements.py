"""Bodies: gradients that a script assigns, with the placements that DTensor chooses."""

from __future__ import annotations

import harness
import torch
from strategies.models import SEED, Model, batch, one_process
from torch.distributed.tensor import Shard


def train_with_projected_gradient(checks: str, main: bool) -> dict[str, float]:
    """Train a step with a gradient whose columns are sharded over tp; compare with one process."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, tp=2, device_type=harness.device_type())
    model = Model("meta", set_parallel_mode=True, **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, checks=checks)
    te_fsdp.materialize(model, seed=SEED)
    reference = one_process()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    if main:
        te_fsdp.main_weights(model, ours)
    x = batch(0, meshes.data_size, 1)[0]
    model(x[meshes.data_rank]).square().mean().backward()
    reference(x.flatten(0, 1)).square().mean().backward()
    weight = model.head.weight
    weight.grad = weight.grad.redistribute(placements=[weight.placements[0], Shard(1)])
    ours.step()
    theirs.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return {
        "worst": max(float((harness.full(p.detach()) - r.detach()).abs().max()) for p, r in pairs),
        "sharded": float(weight.grad.placements[1].is_shard()),
    }
