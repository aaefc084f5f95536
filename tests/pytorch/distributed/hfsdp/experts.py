"""Bodies: a mixture of experts under HFSDP, compared with HSDP, which other tests compare with one process."""

from __future__ import annotations

from typing import Any

import harness
import torch
from experts.bodies import _part, _pass, batch
from experts.model import build
from parity.runs import check_full_precision
from torch import nn

from hfsdp.bodies import CLOSE, STEPS


def sharded(axes: dict[str, int], experts: int, outer: str, single: bool) -> tuple[Any, nn.Module, Any]:
    """Return meshes, model and AdamW, whose eps keeps the rounding of small gradients small."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = build("none", "fp32", experts, meshes, "meta", bias=True, single=single)
    te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.materialize(model, seed=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    return meshes, model, te_fsdp.shard_optimizer(optimizer)


def training(axes: dict[str, int], experts: int, route: str, single: bool) -> int:
    """Compare norms and parameters in each of three clipped steps, in fp32; return the number of comparisons."""
    import te_fsdp

    check_full_precision()
    runs = [sharded(axes, experts, outer, single) for outer in ("optim", "no_shard")]
    checks = harness.Comparisons()
    for step in range(STEPS):
        norms = []
        for meshes, model, optimizer in runs:
            _pass(model, *(_part(t, meshes) for t in batch("none", "fp32", experts, route, step)))
            norms.append(te_fsdp.clip_grad_norm_(model, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        checks.close(f"norm {step}", norms[0], norms[1], **CLOSE)
        (_, ours, _), (_, theirs, _) = runs
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            checks.close(f"step {step} {name}", one.to_local(), other.to_local(), **CLOSE)
    return checks.require(STEPS * 4)


def rows_of_states(axes: dict[str, int], experts: int) -> dict[str, tuple[int, int]]:
    """Return elements of each expert parameter's shard here, and of its moments."""
    meshes, model, optimizer = sharded(axes, experts, "optim", False)
    _pass(model, *(_part(t, meshes) for t in batch("none", "fp32", experts, "every", 0)))
    optimizer.step()
    return {
        name: (p.to_local().numel(), optimizer.state[p]["exp_avg"].to_local().numel())
        for name, p in model.named_parameters()
        if "mixture" in name
    }
