"""Bodies: bytes of a rank under a policy, compared with the closed form."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.memory import allocated as bytes_allocated, size_of, storages
from quantization.alignment import pair

from precision.bodies import Pair, dtypes

HIDDEN, MIDDLE, TOKENS = 256, 512, 32
ELEMENTS = 2 * HIDDEN * MIDDLE + MIDDLE + HIDDEN


def live_bytes_by_case(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Live bytes of each case: after building, after an unreduced microbatch, after a reduced one, after a step.

    Args:
        cases: Name -> ``policy``, ``recipe`` (of quantized weights; none by default).
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    for case in cases.values():
        _held(meshes, **case)  # what TE and torch allocate once
    return {name: _held(meshes, **case) for name, case in cases.items()}


def _held(meshes: Any, policy: dict[str, Any], recipe: str = "") -> dict[str, Any]:
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    import te_fsdp
    from te_fsdp.upstream import fsdp2_units

    before, allocated = storages(), bytes_allocated()
    model = pair(recipe, HIDDEN, MIDDLE, "meta") if recipe else _plain()
    te_fsdp.fully_shard(
        model, meshes, precision=te_fsdp.MixedPrecisionPolicy(**dtypes(policy)), transport="nccl"
    )
    te_fsdp.materialize(model, seed=3)
    outcome: dict[str, Any] = {
        "elements": sum(p.numel() for p in model.parameters()) // dist.get_world_size()
    }

    def measure(when: str) -> None:
        for _ in range(4):  # gloo's threads hold the tensors of their last collective
            dist.all_reduce(torch.zeros(1, device=harness.device()))
        # Gradients that only C++ refers to show up while Python refers to them.
        waiting = [
            managed._unsharded_param.grad
            for managed in fsdp2_units.managed_fsdp_params(model)
            if when == "unreduced"
        ]
        live = {ptr: t for ptr, t in storages().items() if ptr not in before}
        size = size_of(live)
        del waiting
        outcome[when] = size if harness.device_type() == "cpu" else bytes_allocated() - allocated

    measure("weights")
    for when, sync in (("unreduced", False), ("reduced", True)):
        model.set_is_last_backward(sync)  # type: ignore[operator]
        model.set_requires_gradient_sync(sync)  # type: ignore[operator]
        x = torch.ones((TOKENS, HIDDEN), dtype=torch.bfloat16, device=harness.device())
        with te.autocast(enabled=bool(recipe), recipe=recipe_of(recipe) if recipe else None):
            y = model(x)
        y.backward(torch.ones_like(y))
        del x, y
        measure(when)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if recipe:
        te_fsdp.main_weights(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    measure("stepped")
    outcome["report"] = dict(te_fsdp.report(model).costs)
    outcome["own"] = te_fsdp.report(model).total_bytes
    return outcome


def _plain() -> Pair:
    return Pair(HIDDEN, MIDDLE, device="meta")
