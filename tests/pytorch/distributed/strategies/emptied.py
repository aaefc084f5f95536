"""A bound model under torch's fully_shard, after `to_empty`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
from torch.distributed.fsdp import fully_shard

import te_fsdp
from te_fsdp.upstream.torch_dtensor import local_of

WIDTH = 32


def forward(recipe: str, initialize: str) -> str:
    """Return the error of the first forward after ``to_empty``; empty if there is none.

    ``initialize``: "reset" by ``reset_parameters``, "written", "data" for writes to the last module alone, or "no".
    """
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    meshes = te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type())
    made = None if recipe == "none" else recipe_of(recipe)
    with te.quantized_model_init(enabled=made is not None, recipe=made):
        model = torch.nn.Sequential(*[te.LayerNormLinear(WIDTH, WIDTH, device="meta") for _ in range(2)])
    te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight)
    for unit in (*model, model):
        fully_shard(unit, mesh=meshes.fsdp_with_size_one)
    model.to_empty(device=harness.device())
    writes: dict[str, Callable[[Any], Any]] = {
        "written": lambda p: torch.nn.init.ones_(p),
        "data": lambda p: local_of(p.data).fill_(1),
    }
    for module in model[1:] if initialize == "data" else model:
        if initialize == "reset":
            torch.manual_seed(0)
            module.reset_parameters()
        elif initialize in writes:
            for parameter in module.parameters():
                writes[initialize](parameter)
    try:
        model(torch.ones(WIDTH, WIDTH, device=harness.device()))
    except te_fsdp.InitError as error:
        return str(error)
    return ""
