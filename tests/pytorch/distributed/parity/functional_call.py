"""Bodies: ``torch.func.functional_call`` with different values before the first forward."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn


def error_of_functional_call(values: str, by: str) -> dict[str, Any]:
    """Return the error of the call, and whether the model computes with its own parameters afterwards."""
    import transformer_engine.pytorch as te
    from torch.distributed.fsdp import fully_shard

    import te_fsdp

    options = {"device": harness.device(), "params_dtype": torch.float32}
    torch.manual_seed(0)
    model, alone = (nn.Sequential(te.Linear(16, 16, **options), nn.Linear(16, 4)) for _ in range(2))
    model.to(harness.device())
    alone.to(harness.device()).load_state_dict(model.state_dict())
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    if by == "te_fsdp":
        te_fsdp.fully_shard(model, meshes, units=[te.Linear])
    else:
        te_fsdp.set_device_mesh(model, weight_mesh=meshes.weight)
        fully_shard(model, mesh=meshes.fsdp)
    x = torch.ones(32, 16, device=harness.device())
    given = {name: p.detach() * 2 for name, p in model.named_parameters()}
    if values == "parameters":
        given = {name: nn.Parameter(value) for name, value in given.items()}
    text, own = "", True
    try:
        torch.func.functional_call(model, given, (x,))
    except te_fsdp.TeFsdpError as error:
        text = f"{type(error).__name__}: {error}"
    if by == "te_fsdp":
        own = bool(torch.allclose(model(x), alone(x)))
    return {"text": text, "own": own}


def assign_parameters() -> bool:
    """Control: assign new parameters before the first forward."""
    import transformer_engine.pytorch as te

    import te_fsdp

    options = {"device": harness.device(), "params_dtype": torch.float32}
    torch.manual_seed(0)
    model = nn.Sequential(te.Linear(16, 16, **options), nn.Linear(16, 4, device=harness.device()))
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(device_type=harness.device_type()), units=[te.Linear])
    before = [harness.full(p) for p in model.parameters()]
    for module in model:
        for name, parameter in list(module.named_parameters()):
            setattr(module, name, nn.Parameter(parameter.detach() * 2))
    model(torch.ones(32, 16, device=harness.device())).sum().backward()
    return all(torch.equal(harness.full(p), 2 * b) for p, b in zip(model.parameters(), before, strict=True))
