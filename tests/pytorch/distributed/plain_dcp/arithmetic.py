"""Bodies: functions of a stacked weight with a DTensor from ``distribute_tensor``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

from plain_dcp.round_trip import Job, to_full

#: Functions of a tensor of a stacked parameter and a different tensor of its shape.
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "p * x": lambda p, x: p * x,
    "x - p": lambda p, x: x - p,
    "p += x": lambda p, x: operator.iadd(p.clone(), x),
    "multiply_": lambda p, x: p.clone().multiply_(x),
    "lerp_": lambda p, x: p.clone().lerp_(end=x, weight=0.5),
    "x.lerp_": lambda p, x: x.clone().lerp_(p, 0.5),
    "where": lambda p, x: torch.where(x > 0, x, p),
    "addcmul": lambda p, x: torch.addcmul(p, x, x, value=0.5),
    "foreach": lambda p, x: torch._foreach_mul([p, x], [x, p])[0],
}


def differing_functions(kind: str, axes: dict[str, int], sharder: str) -> dict[str, Any]:
    """Return the functions whose result is not that of unsharded tensors, with the other tensor copied and as it is."""
    from te_fsdp.upstream import torch_dtensor as _torch

    job = Job(kind, "none", axes, sharder, False, seed=3)
    weights = [p for p in job.model.parameters() if type(p).__name__ == "BoxedDTensor" and p.ndim == 2]
    (weight,) = weights
    job.step(0)
    tensors = {"weight": weight.detach(), "state": job.optimizer.state[weight]["exp_avg"]}
    mesh, generator = weight.device_mesh, torch.Generator().manual_seed(1)
    values = torch.randn(weight.shape, generator=generator).to(harness.device())
    results: dict[str, Any] = {"copied": [], "as it is": []}
    for placements in (tuple(weight.placements), (Replicate(),) * mesh.ndim):
        for label, tensor in tensors.items():
            original, other = (
                to_full(tensor).to(values.device),
                distribute_tensor(values, mesh, placements),
            )
            copied = torch.empty_like(tensor).copy_(other)
            for name, function in FUNCTIONS.items():
                expected = function(original, values).cpu()
                # The control: a DTensor of torch has its rows in the order of the ranks.
                stock = _torch.dtensor(tensor.to_local(), tensor._spec)
                for way, one, with_ in (("copied", tensor, copied), ("as it is", stock, other)):
                    if not torch.equal(to_full(function(one, with_)), expected):
                        results[way].append(f"{name}: {label}, {placements}")
    return results
