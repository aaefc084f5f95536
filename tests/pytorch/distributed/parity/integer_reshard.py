"""Bodies: torch's ``fully_shard`` with an integer ``reshard_after_forward``."""

from __future__ import annotations

import harness
import torch
from checkpointing import models
from torch.distributed.fsdp import fully_shard


def forward(recipe: str, fewer: bool) -> bool:
    """Run a forward of a bound, quantized Linear on 4 ranks, resharded to 2 or to all."""
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=4, device_type=harness.device_type())
    chosen = models.recipe_of(recipe)
    with te.quantized_model_init(recipe=chosen):
        model = torch.nn.Sequential(te.Linear(128, 512, device="meta", params_dtype=torch.bfloat16))
    te_fsdp.set_device_mesh(model, None, meshes.weight)
    for unit in (model[0], model):
        fully_shard(unit, mesh=meshes.fsdp, reshard_after_forward=2 if fewer else True)
    te_fsdp.materialize(model, seed=0)
    with te.autocast(enabled=True, recipe=chosen):
        out = model(torch.ones(32, 128, dtype=torch.bfloat16, device=harness.device()))
    return bool(out.isfinite().all())
