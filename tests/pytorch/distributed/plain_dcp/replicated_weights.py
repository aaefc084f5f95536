"""Bodies: quantized weights that data parallelism shards or replicates, loaded into each other by plain DCP."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed.checkpoint as dcp
from quantization.models import recipe_of
from quantization.two_dim import wide_range
from torch import nn

HIDDEN = 256


def loads(recipe: str, source: str, target: str, directory: str) -> dict[str, bool]:
    """Save a model by DCP and load it into a model with a different strategy.

    Returns:
        Whether the outputs of both models are equal ("same"), and whether they differed before the load ("control").
    """
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())

    def sharded(strategy: str, seed: int) -> nn.Module:
        with te.quantized_model_init(recipe=recipe_of(recipe)):
            options = {"params_dtype": torch.bfloat16, "init_method": wide_range, "device": "meta"}
            model = nn.Sequential(te.Linear(HIDDEN, HIDDEN, bias=False, **options))
        te_fsdp.fully_shard(model, meshes, units=[], strategy=strategy)
        return te_fsdp.materialize(model, seed=seed)

    def weights(model: nn.Module) -> dict[str, Any]:
        return {name: tensor for name, tensor in model.state_dict().items() if "extra" not in name}

    def output(model: nn.Module) -> torch.Tensor:
        x = torch.linspace(-1, 1, 32 * HIDDEN, device=harness.device()).view(32, HIDDEN).bfloat16()
        with te.autocast(enabled=True, recipe=recipe_of(recipe)):
            return model(x).detach()

    one, other = sharded(source, 1), sharded(target, 2)
    before = output(other)
    dcp.save(weights(one), checkpoint_id=directory)
    state = weights(other)
    dcp.load(state, checkpoint_id=directory)
    other.load_state_dict(state, strict=False)
    expected = output(one)
    return {"control": not torch.equal(before, expected), "same": torch.equal(output(other), expected)}
