"""Bodies of the tests of megatron-fsdp's second interface."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist

from bridge.bodies import batch
from bridge.constructors import largest_relative_difference


def make_nested() -> torch.nn.Module:
    """Return units within a unit within the model."""
    torch.manual_seed(1)
    linear, tanh = torch.nn.Linear, torch.nn.Tanh
    block = torch.nn.Sequential(linear(6, 8), tanh(), linear(8, 8))
    return torch.nn.Sequential(block, tanh(), linear(8, 3)).to(harness.device())


def make_placements(rows: list[str], named: bool = True, numbers: bool = False) -> tuple[Any, Any]:
    """Return a mesh, named or not, and placements in short form ("RPF" of each axis) by axis names or numbers."""
    from te_fsdp.compat.megatron_fsdp import experimental as v2

    kinds = {"R": v2.Replicate, "P": v2.Partial, "F": v2.Flat}
    world = dist.get_world_size()
    shape, names = ((world,), ("near",)) if len(rows) == 1 else ((2, world // 2), ("far", "near"))
    mesh = dist.init_device_mesh(harness.device_type(), shape, mesh_dim_names=names if named else None)
    columns = [[kinds[row[at]]() for row in rows] for at in range(3)]
    return mesh, v2.Placements(list(range(len(rows)) if numbers else names), *columns)


def trained(rows: list[str], nested: bool = True) -> dict[str, Any]:
    """Train two SGD steps by placements in short form ("RPF" of each axis), compared with one process."""
    from te_fsdp.compat.megatron_fsdp import experimental as v2

    mesh, placements = make_placements(rows)
    world = dist.get_world_size()
    net, reference = make_nested(), make_nested()
    for module in (net[0][0], net[0], net) if nested else (net,):
        v2.fully_shard(module, mesh, placements)
    groups = [{"params": [net[0][0].weight], "lr": 0.2}, {"params": [*net[0].parameters()][1:]}]
    optimizer, second = torch.optim.SGD(groups, lr=0.1), torch.optim.SGD(net[2].parameters(), lr=0.1)
    for each in (optimizer, second):  # both were built before the model is sharded
        assert v2.fully_shard_optimizer(each) is None
    v2.fully_shard_optimizer(torch.optim.SGD(net.parameters()))  # another one over the same model
    slower = [p for p in reference.parameters() if p is not reference[0][0].weight]
    expected = torch.optim.SGD([{"params": [reference[0][0].weight], "lr": 0.2}, {"params": slower}], lr=0.1)
    for step in range(2):
        for number in range(2):
            with v2.microbatch(net, is_last=number == 1):
                net(batch(step, number, dist.get_rank())).square().mean().backward()
            for rank in range(world):
                (reference(batch(step, number, rank)).square().mean() / world).backward()
        for each in (optimizer, second, expected):
            each.step()
            each.zero_grad()
    units = sum(hasattr(module, "reshard") for module in net.modules())
    return {
        "worst": largest_relative_difference(net, reference),
        "units": units,
        "lr": [g["lr"] for g in optimizer.param_groups],
    }


def refusals() -> dict[str, str]:
    """Return the error texts of unsupported arguments, and of calls in a wrong order."""
    from te_fsdp.compat.megatron_fsdp import experimental as v2
    from te_fsdp.errors import TeFsdpError

    mesh = dist.init_device_mesh(harness.device_type(), (2,), mesh_dim_names=("near",))
    flat, copies, part = v2.Flat(), v2.Replicate(), v2.Partial()
    good = v2.Placements(["near"], [flat], [flat], [flat])
    net, other = make_nested(), make_nested()
    v2.fully_shard(net[0], mesh, good)
    v2.fully_shard(other[0], mesh, v2.Placements([0], [flat], [flat], [flat]))
    policy = __import__("te_fsdp.compat.megatron_fsdp", fromlist=["x"]).MixedPrecisionPolicy(None)
    v2.fully_shard(other, mesh, good, policy)
    calls = {
        "length": lambda: v2.Placements(["near"], [flat, flat], [flat], [flat]),
        "row": lambda: v2.fully_shard(net, mesh, v2.Placements(["near"], [flat], [part], [copies])),
        "axes": lambda: v2.fully_shard(net, mesh, v2.Placements(["far"], [flat], [flat], [flat])),
        "twice": lambda: v2.fully_shard(net[0], mesh, good),
        "forward": lambda: net(batch(0, 0, 0)),
        "policy": lambda: v2.fully_shard_optimizer(torch.optim.SGD(other.parameters())),
        "foreign": lambda: v2.fully_shard_optimizer(torch.optim.SGD(make_nested().parameters())),
        "unsharded": lambda: v2.microbatch(net, True).__enter__(),
    }
    results = {}
    for name, call in calls.items():
        try:
            call()
        except TeFsdpError as error:
            results[name] = f"{type(error).__name__} {error}"
    return results
