"""Bodies: state dicts from before the first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import nn

import te_fsdp

#: How a script holds a parameter.
HELD: dict[str, Callable[[nn.Module, str], Any]] = {
    "state_dict": lambda model, name: model.state_dict()[name],
    "detach": lambda model, name: dict(model.named_parameters())[name].detach(),
}


def _model(sharder: str, rows: int) -> nn.Module:
    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    options = {"bias": False, "params_dtype": torch.float32, "device": "meta"}
    model = nn.Sequential(te.Linear(16, rows, **options), nn.Linear(rows, 5, device="meta"))
    if sharder == "te_fsdp":
        te_fsdp.fully_shard(model, meshes, units=["0"])
    else:
        te_fsdp.set_device_mesh(model, None, meshes.device_mesh["dp_shard"])
        for layer in (model[0], model):
            torch.distributed.fsdp.fully_shard(layer, mesh=meshes.device_mesh["dp_shard"])
    return te_fsdp.materialize(model, seed=0)


def untracked_parameters(sharder: str, rows: int) -> list[str]:
    """Train for a step. Return the parameters that earlier state dicts do not show."""
    found = []
    for how, hold in HELD.items():
        model = _model(sharder, rows)
        names = [name for name, _ in model.named_parameters()]
        entries = {name: hold(model, name) for name in names}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(4, 16, device=harness.device())).square().mean().backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            if not torch.equal(entries[name].to_local(), parameter.to_local()):
                found.append(f"{how}: {name}")
    return found
