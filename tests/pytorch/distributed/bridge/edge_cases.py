"""Bodies: Megatron-FSDP script variants that the bridge rejected or failed on."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist

from bridge.bodies import batch
from bridge.constructors import largest_relative_difference
from bridge.placements import make_nested, make_placements


def several_models(rows: list[str], named: bool) -> dict[str, Any]:
    """Train two models by one optimizer, on a mesh with or without names, compared with one process."""
    from te_fsdp.compat.megatron_fsdp import experimental as v2

    mesh, placements = make_placements(rows, named, numbers=True)
    world = dist.get_world_size()
    nets, references = [make_nested(), make_nested()], [make_nested(), make_nested()]
    for net in nets:
        v2.fully_shard(net[0], mesh, placements)
        v2.fully_shard(net, mesh, placements)
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1)
    v2.fully_shard_optimizer(optimizer)
    expected = torch.optim.SGD([p for net in references for p in net.parameters()], lr=0.1)

    def loss(models: list[torch.nn.Module], *which: int) -> torch.Tensor:
        return models[0](batch(*which)).square().mean() + models[1](2 * batch(*which)).square().mean()

    for step in range(2):
        loss(nets, step, 0, dist.get_rank()).backward()
        for rank in range(world):
            (loss(references, step, 0, rank) / world).backward()
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    pairs = zip(nets, references, strict=True)
    apart = largest_relative_difference(
        nets[0], references[1]
    )  # the negative control: the two were trained differently
    return {"worst": max(largest_relative_difference(*pair) for pair in pairs), "apart": apart}


def mixed_precision_policy_none() -> float:
    """Compare a step of ``mixed_precision_policy=None`` with one of the default policy."""
    from te_fsdp.compat import megatron_fsdp

    nets = []
    for options in ({"mixed_precision_policy": None}, {}):
        net = make_nested()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = megatron_fsdp.fully_shard(net, optimizer, fsdp_unit_modules=[], **options)
        model(batch(0, 0, dist.get_rank())).square().mean().backward()
        optimizer.step()
        nets.append(model)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    return max((a.full_tensor() - b.full_tensor()).abs().max().item() for a, b in pairs)


def nan_of_replicated_weights() -> str:
    """Return the error of ``report_nan_in_param_grad`` with ``no_shard``."""
    import te_fsdp
    from te_fsdp.compat import megatron_fsdp

    net = make_nested()
    model, optimizer = megatron_fsdp.fully_shard(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        zero_dp_strategy="no_shard",
        fsdp_unit_modules=[],
        report_nan_in_param_grad=True,
    )
    net[0].requires_grad_(False)
    tokens = batch(0, 0, dist.get_rank())
    (model(tokens) * (float("nan") if dist.get_rank() == 1 else 1.0)).sum().backward()
    try:
        optimizer.step()
    except te_fsdp.GradientError as error:
        return str(error)
    return ""


def missing_axis_name() -> str:
    from te_fsdp.compat import megatron_fsdp
    from te_fsdp.errors import MeshError

    mesh = dist.init_device_mesh(harness.device_type(), (2,), mesh_dim_names=("near",))
    try:
        megatron_fsdp.fully_shard_model(make_nested(), mesh)
    except MeshError as error:
        return str(error)
    return ""


def torch_placements() -> list[str]:
    """Return the error for torch's placements, in a list as ``distribute_tensor`` takes them, and in ``Placements``."""
    from torch.distributed.tensor import Shard

    from te_fsdp.compat.megatron_fsdp import experimental as v2
    from te_fsdp.errors import PlacementError

    mesh = dist.init_device_mesh(harness.device_type(), (2,))
    texts = []
    for placements in ([Shard(0)], v2.Placements([0], [Shard(0)], [Shard(0)], [Shard(0)])):  # type: ignore[list-item]
        try:
            v2.fully_shard(make_nested(), mesh, placements)  # type: ignore[arg-type]
        except PlacementError as error:
            texts.append(str(error))
    return texts
