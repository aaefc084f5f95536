"""Bodies: row slices of a stacked weight, such as ``gate, up = weight.chunk(2)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from plain_dcp.round_trip import Job, to_full

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
#: Functions whose results have the rows of the tensor in a different shape.
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "largest of each row": lambda p: p.amax(1),
    "with its place": lambda p: p.max(1).values,
    "place": lambda p: p.max(1).indices,
    "kept dim": lambda p: p.amax(1, keepdim=True),
    "norms": lambda p: p.norm(dim=1),
    "scaled": lambda p: p.amax(1)[:, None] * p,
    "scaled back": lambda p: p / p.amax(1, keepdim=True),
    "column": lambda p: p[:, 1],
    "columns": lambda p: p[:, 2:4],
    "chunk of columns": lambda p: p.chunk(2, 1)[1],
    "unbind columns": lambda p: p.unbind(1)[2],
    "stack": lambda p: torch.stack([p, 2 * p], -1),
    "stack of matrices": lambda p: torch.stack([p, 2 * p]),
    "mean of a stack": lambda p: torch.stack([p, 3 * p]).mean(0),
    "hstack": lambda p: torch.hstack([p[:, :2], p[:, 3:5]]),
    "vstack": lambda p: torch.vstack((p, p[:, :1] * p)),
    "concat": lambda p: torch.concat([p, p]),
    "transposed": lambda p: p.T,
    "t": lambda p: p.t(),
    "sum of t": lambda p: p.t().amax(0),
    "transposed twice": lambda p: (p.t() * 2).t(),
    "row of a transposed one": lambda p: p.T[:, p.shape[0] // 3],
    "columns of a transposed one": lambda p: p.T.amax(0),
    "first dim": lambda p: p.unsqueeze(0)[..., 2:4],
    "permuted": lambda p: torch.stack([p, p], -1).permute(2, 1, 0),
    "swapped": lambda p: p.swapaxes(0, 1).contiguous(),
    "sum with a mean of a stack": lambda p: p + torch.stack([p, 3 * p]).mean(0),
    "sum of a stack": lambda p: torch.stack([p.T, 3 * p.T], 1).sum(1),
    "stack of norms": lambda p: torch.stack((p.amax(1), p.amin(1))),
    "copy": lambda p: torch.empty_like(p).copy_(p.amax(1, keepdim=True).expand_as(p)),
    "unsqueeze": lambda p: p.unsqueeze(-1),
    "outer product": lambda p: torch.outer(p[:, 0], p.amax(1)[:4]),
    "rows of the column": lambda p: p[:, 1][p.shape[0] // 3 :],
}
#: Functions that depend on the order of rows.
ORDERED: dict[str, Callable[[Any], Any]] = {
    "argmax": lambda p: p.argmax(0),
    "argmin of all": lambda p: p.argmin(),
    "max": lambda p: p.max(0).indices,
    "topk": lambda p: p.topk(3, dim=0).indices,
    "topk of norms": lambda p: p.norm(dim=1).topk(3).indices,
    "topk of norms, by torch": lambda p: torch.topk(p.norm(dim=1), 3, dim=-1).values,
    "argsort": lambda p: torch.argsort(p[:, 1]),
    "sort": lambda p: p.sort(0)[1],
    "cumsum": lambda p: p.cumsum(0),
    "flip": lambda p: p.flip(0),
    "flips": lambda p: torch.flip(p, (0, 1)),
    "roll": lambda p: p.roll(1, 0),
    "roll of all": lambda p: p.roll(1),
    "triu": lambda p: p.triu(),
    "diff": lambda p: p.diff(dim=0),
    "median": lambda p: p[:, 1].median(0).indices,
    "repeated": lambda p: p.repeat_interleave(2, 0),
    "view": lambda p: p.view(2, -1, p.shape[1])[1],
    "unflatten": lambda p: torch.unflatten(p, 0, (4, -1)).sum(0),
}
#: Functions that torch 2.11 has for no DTensor.
IS_OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)
NEWER = ("flip", "flips", "roll", "roll of all", "median") if IS_OLD else ()

#: Functions that move the sharded dim of an ordinary DTensor.
MOVING: dict[str, Callable[[Any], Any]] = {
    "t": lambda p: p.t(),
    "largest of t": lambda p: p.t().amax(0),
    "t twice": lambda p: p.t().t(),
    "t of a column": lambda p: p[:, 1].t(),
    "stack": lambda p: torch.stack([p, 2 * p]),
    "sum of a stack": lambda p: torch.stack([p, 2 * p]).sum(0),
    "stack of columns": lambda p: torch.stack([p[:, 1], p[:, 2]]),
    "stack behind": lambda p: torch.stack([p, p], -1),
    "select": lambda p: p[None].select(0, 0),
    "select column": lambda p: p.select(1, 2),
    "unbind": lambda p: p[None].unbind()[0] * 2,
}


def compare_moved_dims(axes: dict[str, int], sharder: str) -> list[str]:
    """Return the functions of :data:`MOVING` that differ for a weight that FSDP2 and tp shard along one dim."""
    job = Job("Linear", "none", axes, sharder, False, seed=3)
    (weight,) = [p for name, p in job.model.named_parameters() if name.endswith("weight")]
    assert type(weight.data) is DTensor and weight.placements[-1].dim == 0
    original, found = to_full(weight), []
    for name, function in MOVING.items():
        for tensor in (weight.detach(), weight.detach().requires_grad_()):
            result = function(tensor)
            if not torch.equal(to_full(result), function(original)):
                found.append(name)
            if tensor.requires_grad:
                result.sum().backward()
                expected = original.clone().requires_grad_()
                function(expected).sum().backward()
                if not torch.equal(to_full(tensor.grad), expected.grad):
                    found.append(f"gradient of {name}")
    return found


def compare_slices(kind: str, axes: dict[str, int], sharder: str, recipe: str) -> dict[str, Any]:
    """Return the parts that are not those of the unsharded tensor, of a weight and of its optimizer's state."""
    from te_fsdp.upstream import torch_dtensor as _torch

    job = Job(kind, recipe, axes, sharder, False, seed=3)
    (weight,) = [p for p in job.model.parameters() if type(p).__name__ == "BoxedDTensor" and p.ndim == 2]
    job.step(0)
    found: dict[str, Any] = {"wrong": [], "joined": []}
    for label, tensor in {"weight": weight.detach(), "state": job.optimizer.state[weight]["exp_avg"]}.items():
        # On the device of the tensor: sums of CPUs and GPUs differ in the last bits.
        original = to_full(tensor).to(tensor.device)
        # The negative control: the rows of all ranks, as torch joins them, have a different order.
        stock = DTensor.full_tensor(_torch.dtensor(tensor.to_local(), tensor._spec))
        found["joined"].append(torch.equal(stock, original))
        for name, function in (FUNCTIONS | OF_ROWS | ORDERED).items():
            try:
                part = to_full(function(tensor))
            except RuntimeError as error:
                if name in NEWER and "does not have a sharding strategy registered" in str(error):
                    continue
                part = torch.empty(0)
            if not torch.equal(part, to_full(function(original))):
                found["wrong"].append(f"{name}: {label}")
        # Columns stay a view, through which a write changes the weight.
        assert tensor[:, 2:4].to_local().data_ptr() == tensor.to_local()[:, 2:4].data_ptr()
    return found
