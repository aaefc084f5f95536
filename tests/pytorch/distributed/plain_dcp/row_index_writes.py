"""Bodies: indexed rows of sharded tensors, which torch gathers."""

from __future__ import annotations

import copy
import gc
import operator
from collections.abc import Callable
from typing import Any

import harness
import torch
from parity.writes_after_evaluation import make_model
from strategies.models import batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

#: Writes to rows of a tensor of 2 dims, of which torch dropped all without an error, or had an error of its own.
WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda t: t[3].zero_(),
    "rows": lambda t: t[2:5].mul_(2),
    "+=": lambda t: operator.iadd(t[2:5], 1),
    "element": lambda t: t[3, 1].fill_(1.0),
    "narrow": lambda t: t.narrow(0, 2, 2).zero_(),
    "chunk": lambda t: t.chunk(2)[1].zero_(),
    "transposed": lambda t: t.T[:, 1].zero_(),
    "diagonal": lambda t: t.diagonal().zero_(),
    "set": lambda t: operator.setitem(t, 3, 0.5),
    "set rows": lambda t: operator.setitem(t, slice(2, 5), t[2:5] * 2),
    "set an element": lambda t: operator.setitem(t, (3, 1), t[3, 2] * 1),
    "local": lambda t: t[3].to_local().zero_(),
    "foreach": lambda t: torch._foreach_zero_([t[3], t[4]]),
    "init": lambda t: nn.init.zeros_(t[3:5]),
    "out": lambda t: torch.mul(t[3].clone(), 2, out=t[3]),
}
#: Functions that write nothing to rows.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "read": lambda t: t[3] * 2 + t[2:5].sum(0),
    "clone": lambda t: t[3].clone().zero_(),
    "column": lambda t: t[:, 1].zero_(),
    "set a column": lambda t: operator.setitem(t, (slice(None), 1), t[:, 2] * 2),
    "set masked elements": lambda t: operator.setitem(t, t.abs() < 0.1, 0.5),
    "columns": lambda t: t.split(3, dim=1)[1].mul_(2),
    "repeated": lambda t: t.copy_(t[:1].expand(t.shape)).mul_(2),
    "turned": lambda t: t.copy_(torch.cat([t[1:], t[:1]])).mul_(2),
    "deepcopy": lambda t: copy.deepcopy(t[3]).zero_(),
}


def outcomes(by: str) -> dict[str, list[str]]:
    """Return the writes that do not raise, and the other functions whose values are wrong."""
    import te_fsdp

    meshes, model = make_model(by)
    optimizer, weight = torch.optim.Adam(model.parameters()), model.blocks[1].fc2_weight
    found: dict[str, list[str]] = {"accepted": [], "wrong": []}

    def attempt(tensors: dict[str, Any]) -> None:
        for label, tensor in tensors.items():
            for name, write in WRITES.items():
                try:
                    write(tensor)
                    found["accepted"].append(f"{label}: {name}")
                except te_fsdp.PlacementError as error:
                    assert "a write to some rows of a sharded tensor" in str(error)
            for name, function in OTHERS.items():
                one = harness.full(tensor.detach()).clone()
                pairs = [(function(tensor), function(one)), (tensor, one)]
                is_right = all(torch.allclose(harness.full(a), b) for a, b in pairs if a is not None)
                if not is_right or type(tensor) not in (DTensor, type(weight)):
                    found["wrong"].append(f"{label}: {name}")

    with torch.no_grad():
        values = weight.clone()
        attempt({"before a forward": weight, "data": weight.data, "detached": weight.detach()})
        weight.copy_(values)  # a check refuses equal shards
    model(batch(0, meshes.data_size, 1)[0][meshes.data_rank]).square().mean().backward()
    optimizer.step()
    weight = model.blocks[1].fc2_weight
    with torch.no_grad():
        attempt({"gradient": weight.grad, "state": optimizer.state[weight]["exp_avg"], "view": weight.T.T})
    return found


def write_after_an_earlier_model() -> str:
    """Write to a row of a gradient when a model with an equal mesh has ended. Return the error."""
    import te_fsdp
    from te_fsdp.modules.torch_units import reshard_after_evaluations

    def shard(mesh: Any) -> DTensor:
        return DTensor.from_local(
            torch.ones(2, 4, device=harness.device()), mesh, [Shard(0)], run_check=False
        )

    earlier, mesh = (init_device_mesh(harness.device_type(), (2,)) for _ in range(2))
    assert earlier == mesh and earlier is not mesh
    for each in (earlier, mesh):
        reshard_after_evaluations(nn.Linear(2, 2), shard(each))
    del earlier, each
    gc.collect()
    # An optimizer state or a gradient has no record: its mesh alone shows that FSDP2 shards it.
    try:
        shard(mesh)[3].zero_()
    except te_fsdp.PlacementError as error:
        return str(error)
    return ""
