"""Bodies: parts of a stacked weight, such as ``gate, up = weight.chunk(2)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plain.round_trip import Job, whole

#: Parts of rows of a tensor, all of whose rows differ.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda p: p.chunk(2)[1],
    "torch.chunk": lambda p: torch.chunk(p, 2, dim=0)[0],
    "split": lambda p: p.split(p.shape[0] // 4)[1],
    "split sizes": lambda p: torch.split(p, [p.shape[0] // 4, p.shape[0] - p.shape[0] // 4], 0)[0],
    "tensor_split": lambda p: p.tensor_split(3)[1],
    "narrow": lambda p: p.narrow(0, p.shape[0] // 4, 8),
    "select": lambda p: p.select(0, p.shape[0] // 3),
    "unbind": lambda p: p.unbind()[p.shape[0] // 3],
    "iterate": lambda p: list(p)[p.shape[0] // 3],
    "row": lambda p: p[p.shape[0] // 3],
    "rows": lambda p: p[p.shape[0] // 2 :],
    "rows and columns": lambda p: p[p.shape[0] // 3 :, 2:4],
    "column of rows": lambda p: p[p.shape[0] // 3 :, 1],
    "ellipsis": lambda p: p[p.shape[0] // 3 :, ...],
    "new dim": lambda p: p[None, p.shape[0] // 3 :],
}


def differing_parts(kind: str, axes: dict[str, int], sharder: str, recipe: str) -> dict[str, Any]:
    """Return the parts that are not those of the unsharded tensor, of a weight and of its optimizer's state."""
    from te_fsdp.upstream import torch_dtensor as _torch

    job = Job(kind, recipe, axes, sharder, False, seed=3)
    (weight,) = [p for p in job.model.parameters() if type(p).__name__ == "BoxedDTensor" and p.ndim == 2]
    job.step(0)
    found: dict[str, Any] = {"wrong": [], "joined": []}
    for label, tensor in {"weight": weight.detach(), "state": job.optimizer.state[weight]["exp_avg"]}.items():
        original = whole(tensor)
        # The negative control: the rows of all ranks, as torch joins them, have a different order.
        stock = DTensor.full_tensor(_torch.dtensor(tensor.to_local(), tensor._spec)).cpu()
        found["joined"].append(torch.equal(stock, original))
        for name, function in FUNCTIONS.items():
            try:
                part = whole(function(tensor))
            except RuntimeError:  # torch refuses some parts of a sharded dim
                part = torch.empty(0)
            if not torch.equal(part, function(original)):
                found["wrong"].append(f"{name}: {label}")
        # Columns stay a view, through which a write changes the weight.
        assert tensor[:, 2:4].to_local().data_ptr() == tensor.to_local()[:, 2:4].data_ptr()
    return found
