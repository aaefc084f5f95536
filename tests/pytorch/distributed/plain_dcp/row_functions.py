"""Bodies: functions of torch on a stacked weight, compared with those of the unsharded weight."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from plain_dcp.round_trip import Job

COLUMNS = 32
#: Functions of a matrix whose rows, dim 0, are stacked.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    # Views that keep each row in one piece.
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "mT": lambda p: p.mT,
    "transpose": lambda p: p.transpose(0, 1),
    "transpose twice": lambda p: p.T.T,
    "permute": lambda p: p.permute(1, 0),
    "movedim": lambda p: p.movedim(0, 1),
    "swapaxes": lambda p: torch.swapaxes(p, 0, 1),
    "unsqueeze": lambda p: p.unsqueeze(0),
    "unsqueeze last": lambda p: p.unsqueeze(-1),
    "new dim": lambda p: p[None],
    "columns": lambda p: p[:, 2:4],
    "column": lambda p: p[:, 3],
    "narrow columns": lambda p: p.narrow(1, 2, 3),
    "torch.narrow columns": lambda p: torch.narrow(p, 1, 2, 3),
    "select column": lambda p: p.select(1, 3),
    "split columns": lambda p: p.split(p.shape[1] // 2, 1)[1],
    "chunk columns": lambda p: p.chunk(2, dim=1)[1],
    "unbind columns": lambda p: p.unbind(1)[3],
    "columns with steps": lambda p: p[:, ::2],
    "index of columns": lambda p: p[:, torch.tensor([3, 1], device=p.device)],
    "index_select columns": lambda p: p.index_select(1, torch.tensor([3, 1], device=p.device)),
    "columns, transposed": lambda p: p[:, 2:4].T,
    "unflatten columns": lambda p: p.unflatten(1, (2, -1)),
    "view columns": lambda p: p.view(p.shape[0], 2, -1),
    "reshape columns": lambda p: p.reshape(p.shape[0], -1, 2),
    "flat": lambda p: p.view(-1),
    "reshape flat": lambda p: p.reshape(-1),
    "flatten": lambda p: p.flatten(),
    "ravel": lambda p: p.ravel(),
    "contiguous": lambda p: p.contiguous(),
    "expand": lambda p: p.expand(2, *p.shape),
    # Views and copies that split or combine rows.
    "view rows": lambda p: p.view(2, -1, p.shape[1]),
    "view rows of four": lambda p: p.view(-1, 4, p.shape[1]),
    "reshape rows": lambda p: p.reshape(4, -1),
    "reshape narrower": lambda p: p.reshape(-1, p.shape[1] // 2),
    "reshape wider": lambda p: p.reshape(-1, p.shape[1] * 2),
    "unflatten rows": lambda p: p.unflatten(0, (2, -1)),
    "rows of a view": lambda p: p.view(2, -1, p.shape[1])[1],
    "flat part": lambda p: p.view(-1)[5:300],
    "diagonal": lambda p: p.diagonal(),
    "unfold": lambda p: p.unfold(0, 4, 4),
    "as_strided": lambda p: p.as_strided((4, 4), (p.shape[1], 1)),
    # Parts of rows.
    "chunk": lambda p: p.chunk(2)[1],
    "chunk by keyword": lambda p: torch.chunk(input=p, chunks=2)[1],
    "split by keyword": lambda p: torch.split(tensor=p, split_size_or_sections=p.shape[0] // 4)[1],
    "narrow by keyword": lambda p: torch.narrow(input=p, dim=0, start=4, length=8),
    "select by keyword": lambda p: torch.select(input=p, dim=0, index=9),
    "unbind by keyword": lambda p: torch.unbind(input=p)[9],
    "split": lambda p: p.split(p.shape[0] // 4)[1],
    "rows": lambda p: p[p.shape[0] // 3 :],
    "take": lambda p: p.take(torch.tensor([0, 700, 30000], device=p.device)),
    "gather": lambda p: p.gather(0, torch.arange(8, device=p.device).view(2, 4) * 40),
    "vsplit": lambda p: torch.vsplit(p, 2)[1],
    "hsplit": lambda p: torch.hsplit(p, 2)[1],
    "dsplit": lambda p: p.unsqueeze(-1).expand(*p.shape, 2).dsplit(2)[1],
    "take_along_dim": lambda p: torch.take_along_dim(p, p.argsort(0), 0),
    "masked_select": lambda p: p.masked_select(p > 0),
    "mask": lambda p: p[p > 0],
    "mask of rows": lambda p: p[p.sum(1) > 0],
    "nonzero": lambda p: (p > 0).nonzero(),
    "argwhere": lambda p: torch.argwhere(p > 0),
    "where": lambda p: torch.where(p > 0)[0],
    "embedding": lambda p: F.embedding(torch.tensor([1, 300, 40], device=p.device), p),
    # Functions of the order of rows.
    "cumsum": lambda p: p.cumsum(0),
    "cumprod": lambda p: p.cumprod(0),
    "cummax": lambda p: p.cummax(0).values,
    "logcumsumexp": lambda p: p.logcumsumexp(0),
    "cumsum columns": lambda p: p.cumsum(1),
    "flip": lambda p: p.flip(0),
    "flip columns": lambda p: p.flip(1),
    "flipud": lambda p: p.flipud(),
    "roll": lambda p: p.roll(3, 0),
    "roll columns": lambda p: p.roll(3, 1),
    "rot90": lambda p: p.rot90(),
    "sort": lambda p: p.sort(0).values,
    "sort indices": lambda p: p.sort(0).indices,
    "sort columns": lambda p: p.sort(1).values,
    "argsort": lambda p: p.argsort(0),
    "topk": lambda p: p.topk(4, 0).indices,
    "topk columns": lambda p: p.topk(4, 1).values,
    "argmax": lambda p: p.argmax(0),
    "argmax of all": lambda p: p.argmax(),
    "argmin": lambda p: p.argmin(0),
    "max indices": lambda p: p.max(0).indices,
    "argmax columns": lambda p: p.argmax(1),
    "median indices": lambda p: p.median(0).indices,
    "kthvalue": lambda p: p.kthvalue(3, 0).indices,
    "diff": lambda p: p.diff(dim=0),
    "diff columns": lambda p: p.diff(dim=1),
    "tril": lambda p: p.tril(),
    "triu": lambda p: p.triu(3),
    "diag": lambda p: p.diag(),
    "trace": lambda p: p.trace(),
    "pad": lambda p: F.pad(p, (0, 0, 1, 2)),
    "repeat": lambda p: p.repeat(2, 1),
    "tile": lambda p: p.tile(2, 1),
    "repeat_interleave": lambda p: p.repeat_interleave(2, 0),
    "repeat columns": lambda p: p.repeat(1, 2),
    "cat": lambda p: torch.cat([p, p]),
    "cat columns": lambda p: torch.cat([p, p], 1),
    "vstack": lambda p: torch.vstack([p, p]),
    "concat": lambda p: torch.concat([p, p]),
    "hstack": lambda p: torch.hstack([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "stack behind": lambda p: torch.stack([p, p], 2),
    "index_add": lambda p: p.index_add(0, torch.tensor([1], device=p.device), p.new_ones(1, p.shape[1])),
    "index_fill": lambda p: p.index_fill(0, torch.tensor([9, 40], device=p.device), 7.0),
    "index_copy": lambda p: p.index_copy(0, torch.tensor([9], device=p.device), p.new_ones(1, p.shape[1])),
    "slice_scatter": lambda p: p.slice_scatter(torch.ones(2, p.shape[1], device=p.device), 0, 9, 11),
    "select_scatter": lambda p: p.select_scatter(torch.ones(p.shape[1], device=p.device), 0, 9),
    # Functions of each element, row or column, in any order of rows.
    "mul": lambda p: p * 2,
    "neg": lambda p: -p,
    "abs": lambda p: p.abs(),
    "bfloat16": lambda p: p.bfloat16().float(),
    "clone": lambda p: p.clone(),
    "where zero": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "clamp": lambda p: p.clamp(min=0),
    "sum": lambda p: p.sum(0),
    "sum columns": lambda p: p.sum(1),
    "sum columns, dim kept": lambda p: p.sum(1, keepdim=True),
    "mean columns": lambda p: p.mean(1),
    "amax columns": lambda p: p.amax(1),
    "max columns": lambda p: p.max(1).values,
    "norm columns": lambda p: p.norm(dim=1),
    "linalg norm columns": lambda p: torch.linalg.vector_norm(p, dim=1),
    "var columns": lambda p: p.var(1),
    "std columns": lambda p: p.std(1),
    "amax": lambda p: p.amax(0),
    "softmax": lambda p: p.softmax(0),
    "softmax columns": lambda p: p.softmax(1),
    "log_softmax": lambda p: p.log_softmax(0),
    "logsumexp columns": lambda p: p.logsumexp(1),
    "normalize": lambda p: F.normalize(p, dim=1),
    "normalize rows": lambda p: F.normalize(p, dim=0),
    "times norms of rows": lambda p: p / p.norm(dim=1, keepdim=True),
    "layer_norm": lambda p: F.layer_norm(p, (p.shape[1],)),
    "cosine": lambda p: F.cosine_similarity(p, p * 2, dim=1),
    # Products.
    "matmul": lambda p: p @ p.T,
    "gram": lambda p: p.T @ p,
    "mm": lambda p: p.mm(p.T),
    "newton schulz": lambda p: (p @ p.T) @ p,
    "product with columns": lambda p: p[:, :4] @ p[:, :4].T,
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "outer": lambda p: torch.outer(p[:, 0], p[:, 1]),
    "transposed product": lambda p: (p.T * 2).T,
    "linear": lambda p: F.linear(p, p),
    "kron": lambda p: torch.kron(p[:, :1], p[:1, :1]),
    "cdist": lambda p: torch.cdist(p, p),
    "cov": lambda p: p.cov(),
    # Other meanings.
    "numpy": lambda p: torch.from_numpy(p.detach().cpu().numpy()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "iterate": lambda p: list(p)[9],
    "isclose": lambda p: p.isclose(p),
    "bucketize": lambda p: torch.bucketize(p, torch.linspace(-1, 1, 5, device=p.device)),
    "histc": lambda p: p.histc(4),
    "count columns": lambda p: p.count_nonzero(1),
    "any columns": lambda p: (p > 0).any(1),
    "all columns": lambda p: (p > -9).all(1),
    "deepcopy of rows": lambda p: copy.deepcopy(p.chunk(2)[1]),
    "new_zeros": lambda p: p.new_zeros(p.shape),
    "full_like": lambda p: torch.full_like(p, 2),
    "lerp": lambda p: p.lerp(p * 2, 0.5),
    "addcmul": lambda p: p.addcmul(p, p),
    "addmm": lambda p: torch.addmm(p[:, :4], p, p[:COLUMNS, :4]),
    "dot": lambda p: p[:, 0].dot(p[:, 1]),
    "mv": lambda p: p.mv(p[0]),
    "minus softmax": lambda p: p - p.softmax(0),
    "minus cumsum": lambda p: p - p.cumsum(0),
    "minus mean": lambda p: p - p.mean(0),
    "product of parts": lambda p: p.chunk(2)[0] * p.chunk(2)[1],
    "times parts": lambda p: p * torch.cat(p.chunk(2)),
    "times columns": lambda p: p[:, 2:4] * p[:, 4:5],
    "bmm": lambda p: p[None].bmm(p.T[None]),
}  # fmt: skip
#: Writes through a view of the columns, after which the weight is compared.
WRITES: dict[str, Callable[[Any], Any]] = {
    "columns": lambda p: p[:, 2:4].mul_(2),
    "narrow": lambda p: p.narrow(1, 2, 3).zero_(),
    "select": lambda p: p.select(1, 3).fill_(7),
    "chunk": lambda p: p.chunk(2, dim=1)[1].add_(1),
    "transposed": lambda p: p.T.mul_(3),
    "columns, transposed": lambda p: p[:, 2:4].T.mul_(2),
    "copy of columns": lambda p: p[:, 2:4].copy_(p[:, 4:6] * 2),
    "new dim": lambda p: p[None].mul_(2),
    "flat": lambda p: p.view(-1).mul_(2),
    "set columns": lambda p: p.__setitem__((slice(None), slice(2, 4)), 5.0),
    "view columns": lambda p: p.view(p.shape[0], 2, -1).mul_(2),
    "rows": lambda p: p[4:9].mul_(2),
    "chunk of rows": lambda p: p.chunk(2)[0].mul_(2),
    "view of rows": lambda p: p.view(2, -1, p.shape[1]).select(0, 1).mul_(2),
    "set rows": lambda p: p.__setitem__(slice(4, 9), 5.0),
    "set a row": lambda p: p.__setitem__(9, 5.0),
    "foreach of rows": lambda p: torch._foreach_mul_(list(p.chunk(2)), 2.0),
    "foreach of all and of rows": lambda p: torch._foreach_mul_([p, p.chunk(2)[0]], 2.0),
    "out is rows": lambda p: torch.mul(p[:4].clone(), 2.0, out=p[:4]),
    "init of rows": lambda p: torch.nn.init.constant_(p.chunk(2)[0], 7.0),
    "set by a mask": lambda p: p.__setitem__(p > 0, 5.0),
    "index_fill_": lambda p: p.index_fill_(0, torch.tensor([9, 40], device=p.device), 7.0),
    "masked_fill_": lambda p: p.masked_fill_(p > 0, 7.0),
    "cumsum_": lambda p: p.cumsum_(0),
    "tril_": lambda p: p.tril_(),
    "clamp_": lambda p: p.clamp_(min=0),
    "diagonal": lambda p: p.diagonal().fill_(3),
    "fill_diagonal_": lambda p: p.fill_diagonal_(3),
    "sort out": lambda p: p.copy_(p.sort(0).values),
    "add of rows": lambda p: p.add_(p.sum(1, keepdim=True)),
    "copy of cumsum": lambda p: p.copy_(p.cumsum(0)),
    "minus cumsum": lambda p: p.sub_(p.cumsum(0)),
    "minus softmax": lambda p: p.sub_(p.softmax(0)),
    "copy of T.T": lambda p: p.copy_((p.T * 2).T),
}
#: Writes that depend on the order of rows.
REFUSED = (
    "rows",
    "chunk of rows",
    "view of rows",
    "set rows",
    "set a row",
    "foreach of rows",
    "foreach of all and of rows",
    "out is rows",
    "init of rows",
    "diagonal",
)


def to_full(value: Any) -> Any:
    """Return the unsharded result on the CPU, also of several tensors."""
    if isinstance(value, (list, tuple)):
        return [to_full(item) for item in value]
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _has_right_boxes(result: Any, full: Any) -> bool:
    """Return whether DCP would write the rectangles of the full tensor."""
    from te_fsdp.boxed_dtensor import BoxedDTensor

    if (
        not isinstance(result, BoxedDTensor)
        or result._map is None
        or result.shape != getattr(full, "shape", None)
    ):
        return True
    local = result.to_local().cpu()
    boxes = result.local_boxes() if result.ndim > 1 else []  # those of a flat view are not contiguous
    return all(torch.equal(local[b.local_slices()], full[b.original_slices()]) for b in boxes)


def outcomes(kind: str, axes: dict[str, int], sharder: str) -> dict[str, dict[str, str]]:
    """Return the outcome of each function of the weight and of its optimizer's state: equal, an error, or wrong."""
    from te_fsdp.errors import TeFsdpError

    job = Job(kind, "none", axes, sharder, False, seed=3)
    (weight,) = [p for p in job.model.parameters() if type(p).__name__ == "BoxedDTensor" and p.ndim == 2]
    job.step(0)
    found: dict[str, dict[str, str]] = {}

    def outcome(tensor: Any, function: Callable[[Any], Any], original: Any, *, writes: bool) -> str:
        expected = original.clone()
        try:
            result = function(expected)
        except (RuntimeError, ValueError) as error:
            return f"invalid: {error}"
        expected = to_full(expected if writes else result)
        tensor = tensor.clone()
        try:
            result = function(tensor)
            got = to_full(tensor if writes else result)
            if not _has_right_boxes(result, got):
                return "WRONG boxes"
        except TeFsdpError as error:
            return f"ours: {error}"
        except Exception as error:
            return f"torch: {type(error).__name__}: {error}"
        is_equal = got.shape == expected.shape and torch.allclose(
            got.double(), expected.double(), rtol=1e-9, atol=1e-9, equal_nan=True
        )
        return "equal" if is_equal else "WRONG"

    for label, tensor in {"weight": weight.detach(), "state": job.optimizer.state[weight]["exp_avg"]}.items():
        with torch.no_grad():
            generator = torch.Generator().manual_seed(5)
            # Columns of a weight are stacked, too. In FP64 sums are exact enough in any order.
            tensor = tensor[:, :COLUMNS].double()
            original = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
            tensor = tensor.fill(original)
            assert torch.equal(tensor.full_tensor(), original)
            for functions, writes in ((FUNCTIONS, False), (WRITES, True)):
                for name, function in functions.items():
                    key = f"write: {name}" if writes else name
                    found.setdefault(key, {})[label] = outcome(tensor, function, original, writes=writes)
    return found


def gradients_of_autograd() -> list[str]:
    """Return the weights for which ``torch.autograd.grad`` differs from ``backward``, without FSDP2."""
    import harness
    import transformer_engine.pytorch as te

    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=1, tp=2, device_type=harness.device_type())
    options = {**meshes.te_kwargs(), "set_parallel_mode": True, "activation": "swiglu"}
    mlp = te.LayerNormMLP(COLUMNS, 2 * COLUMNS, params_dtype=torch.float32, device="meta", **options)
    te_fsdp.set_device_mesh(mlp, meshes.tp, meshes.weight)
    torch.manual_seed(0)
    mlp.reset_parameters()
    names, weights = zip(*mlp.named_parameters(), strict=True)
    x = torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(1)).to(harness.device())
    found = torch.autograd.grad(mlp(x).square().sum(), weights)
    mlp(x).square().sum().backward()
    wrong = []
    for name, weight, gradient in zip(names, weights, found, strict=True):
        assert gradient.full_tensor().any(), name
        same = torch.equal(gradient.full_tensor(), weight.grad.full_tensor())
        if type(gradient) is not type(weight.grad) or not same:
            wrong.append(name)
    assert any(type(gradient) is not DTensor for gradient in found)
    return wrong
