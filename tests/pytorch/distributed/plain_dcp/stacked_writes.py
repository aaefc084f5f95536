"""Bodies: writes to a stacked weight or to its parts."""

from __future__ import annotations

import contextlib
import copy
import io
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from plain_dcp.round_trip import Job, to_full

#: In-place functions of a stacked tensor and a tensor of its shape.
ELEMENTWISE: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda p, x: p.add_(x, alpha=-2),
    "+=": operator.iadd,
    "/=": lambda p, x: operator.itruediv(p, x.abs() + 1),
    "sub_": lambda p, x: p.sub_(other=x),
    "lerp_": lambda p, x: p.lerp_(x, 0.5),
    "addcmul_": lambda p, x: p.addcmul_(x, x, value=0.5),
    "masked_fill_": lambda p, x: p.masked_fill_(x > 0, 0.0),
    "mask": lambda p, x: p.mul_(x > 0),
    "clamp_": lambda p, x: p.clamp_(min=x),
    "rows": lambda p, x: p.mul_(_replicated(x[:, :1])),
    "columns": lambda p, x: p.mul_(x[:1]),
    "foreach": lambda p, x: torch._foreach_addcmul_([p], [p.clone()], [x], 0.5),
    "foreach, new": lambda p, x: p.copy_(torch._foreach_mul([p], [x])[0]),
    "copy_": lambda p, x: p.copy_(x),
}
PARTS: dict[str, Callable[[Any], Any]] = {
    "chunk": lambda p: p.chunk(2)[0],
    "row": lambda p: p[3],
    "rows": lambda p: p[4:9],
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "zero_": lambda t: t.zero_(),
    "view": lambda t: t.view(-1)[:2].zero_(),
    "item": lambda t: operator.setitem(t, 0, 1.0),
    "+=": lambda t: operator.iadd(t, 1),
    "data": lambda t: t.data.zero_(),
    "detach": lambda t: t.detach().zero_(),
    "init": lambda t: torch.nn.init.zeros_(t),
    "out": lambda t: torch.mul(t, 2, out=t),
    "numpy": lambda t: t.cpu().numpy().fill(0),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
}


def _weight(kind: str, axes: dict[str, int], sharder: str) -> Any:
    job = Job(kind, "none", axes, sharder, False, seed=3)
    (weight,) = [p for p in job.model.parameters() if type(p).__name__ == "BoxedDTensor" and p.ndim == 2]
    return weight.detach()


def _replicated(value: Any) -> Any:
    """Return the DTensor unsharded. torch 2.14 shards rows of a slice of columns over tp: an undetected mistake."""
    return (
        value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
        if isinstance(value, DTensor)
        else value
    )


def compare_writes(kind: str, axes: dict[str, int], sharder: str) -> list[str]:
    """Return the functions that do not write what they write to the unsharded tensor."""
    weight, wrong = _weight(kind, axes, sharder), []
    values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.device)
    mesh, original = weight.device_mesh, to_full(weight).to(weight.device)
    everywhere = [Replicate()] * mesh.ndim
    for placements in (everywhere, [*everywhere[1:], Shard(1)], [Shard(0), *everywhere[1:]], None):
        value = values if placements is None else distribute_tensor(values, mesh, placements)
        for name, function in ELEMENTWISE.items():
            written, expected = weight.clone(), original.clone()
            with implicit_replication() if placements is None else contextlib.nullcontext():
                function(written, value)
            function(expected, values)
            if not torch.equal(to_full(written), expected.cpu()):
                wrong.append(f"{name}: {placements}")
    return wrong


def compare_steps_with_assigned_gradients(kind: str, axes: dict[str, int], sharder: str) -> list[str]:
    """Return the optimizers that add other rows of a replicated gradient, which a script has assigned."""
    wrong = []
    for name in ("foreach", "fused", "neither"):
        weight = _weight(kind, axes, sharder).requires_grad_()
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(weight.device)
        one = to_full(weight).to(weight.device).requires_grad_()
        weight.grad = distribute_tensor(values, weight.device_mesh, [Replicate()] * weight.device_mesh.ndim)
        one.grad = values
        for parameter in (weight, one):
            torch.optim.AdamW(
                [parameter], lr=0.1, eps=1e-3, foreach=name == "foreach", fused=name == "fused"
            ).step()
        if not torch.allclose(
            to_full(weight), to_full(one), atol=1e-6
        ):  # the order of a fused kernel's operations
            wrong.append(name)
    return wrong


def writes_without_error(kind: str, axes: dict[str, int], sharder: str) -> list[str]:
    """Return the writes to local tensors of parts that do not raise."""
    import te_fsdp

    weight, found = _weight(kind, axes, sharder), []
    for name, part in PARTS.items():
        for way, write in WRITES.items():
            if way == "numpy" and weight.device.type != "cpu":
                continue
            try:
                write(part(weight).to_local())
            except (te_fsdp.PlacementError, ValueError) as error:
                assert "a write to some rows" in str(error) or way == "numpy", error
            else:
                found.append(f"{name}: {way}")
        local = part(weight).to_local()
        # Results, copies and pickles are ordinary tensors.
        for copied in (
            local * 2,
            local.clone().zero_(),
            copy.deepcopy(local),
            local[0] + 1,
            torch.cat([local]),
        ):
            assert type(copied) is torch.Tensor
        file = io.BytesIO()
        torch.save(local, file)
        file.seek(0)
        assert torch.equal(torch.load(file), local)
        assert torch.equal(local.cpu(), part(to_full(weight)))
    return found
