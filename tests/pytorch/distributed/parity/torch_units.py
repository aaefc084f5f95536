"""Bodies: units of torch's own ``fully_shard`` that are unsharded in a step, compared with one process."""

from __future__ import annotations

import harness
import torch
from strategies.models import SEED, Model, batch, whole
from torch.distributed.fsdp import fully_shard

LEARNING_RATE = 0.5


def stepped(how: str) -> dict[str, float]:
    """Three steps of a bound model. ``how``: "evaluated" between backward and step, or "kept" after backward."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, device_type=harness.device_type())
    model, reference = Model("meta"), whole()
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=meshes.fsdp)
    te_fsdp.materialize(model, seed=SEED)
    if how == "kept":
        model.set_reshard_after_backward(False)
    ours, theirs = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LEARNING_RATE)
        for m in (model, reference)
    )
    worst = 0.0
    for step in range(3):
        x = batch(step, meshes.data_size, 1)[0]
        loss = model(x[meshes.data_rank]).square().mean()
        loss.backward()
        reference(x.flatten(0, 1)).square().mean().backward()
        if how == "evaluated":
            with torch.no_grad():
                model(x[0])
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            mine, wanted = model(x[0]), reference(x[0])
        worst = max(worst, float((mine - wanted).norm() / wanted.norm()))
    return {"worst": worst}
