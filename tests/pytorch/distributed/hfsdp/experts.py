"""Body: a mixture of experts under HFSDP, against one process with all experts."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from experts.bodies import CLIP, ExpertCheck, _part, _pass, _reference, batch
from experts.model import build
from matrix.bodies import SEED, STEPS, _dense, _optimizer
from parity.runs import check_full_precision, shards


def training(axes: dict[str, int], experts: int, route: str) -> dict[str, Any]:
    """Norms of the gradients in each of three clipped steps, and the parameters' change after them, in fp32.

    Returns:
        Per kind of value the largest error as a share of its bound; the number of ranks.
    """
    import te_fsdp

    check_full_precision()
    expected, originals = _reference("none", "fp32", experts, True, route, False)
    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build("none", "fp32", experts, meshes, "meta", bias=True)
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=SEED)
    check = ExpertCheck("none", "fp32", "grouped", expected, originals)
    check.initial(model)
    before = {name: _dense(parameter).clone() for name, parameter, _ in shards(model)}
    optimizer = te_fsdp.shard_optimizer(_optimizer(model))
    for step in range(STEPS):
        x, target, chosen = (_part(t, meshes) for t in batch("none", "fp32", experts, route, step))
        _pass(model, x, target, chosen)
        check.norm(step, te_fsdp.clip_grad_norm_(model, CLIP), expected.tensors[f"norm {step}"])
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter, info in shards(model):
        check.shard("update", name, _dense(parameter) - before[name], info)
    return check.settle(dist.get_world_size())


def rows_of_states(axes: dict[str, int], experts: int) -> dict[str, tuple[int, int]]:
    """Rows of each expert weight's shard here, and of its moments."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build("none", "fp32", experts, meshes, "meta", bias=False)
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=SEED)
    optimizer = te_fsdp.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    _pass(model, *(_part(t, meshes) for t in batch("none", "fp32", experts, "every", 0)))
    optimizer.step()
    return {
        name: (len(p.to_local()), len(optimizer.state[p]["exp_avg"].to_local()))
        for name, p in model.named_parameters()
        if "mixture" in name
    }
