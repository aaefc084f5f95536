"""Bodies: who reads `.grad` between a backward and the step, where each copy of the model has an average of its own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded

from hfsdp.early import CLOSE, Pair, inputs

MAX_NORM = 0.01


def _save(p: torch.Tensor) -> None:
    torch.save(p.grad, io.BytesIO())


#: What raises, given a parameter with a gradient.
READERS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "clip_grad_norm_, foreach": lambda p: torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=True),
    "get_total_norm": lambda p: torch.nn.utils.get_total_norm([p.grad]),
    "clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0, foreach=False),
    "clip_grad_value_, foreach": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0, foreach=True),
    "a loss scaler": lambda p: _unscale([p]),
    "norm": lambda p: p.grad.norm(),
    "isfinite": lambda p: torch.isfinite(p.grad).all(),
    "to_local": lambda p: p.grad.to_local(),
    "full_tensor": lambda p: p.grad.full_tensor(),
    "redistribute": lambda p: p.grad.redistribute(placements=p.grad.placements),
    "clone": lambda p: p.grad.clone(),
    "detach and clone": lambda p: p.grad.detach().clone(),
    "data": lambda p: p.grad.data.sum(),
    "item": lambda p: p.grad[0, 0].item(),
    "index": lambda p: p.grad[0],
    "sum of two": lambda p: p.grad + p.grad,
    "sum in place": lambda p: p.grad.add_(1.0),
    "factors by element": lambda p: p.grad.mul_(torch.ones_like(p)),
    "cast": lambda p: p.grad.to(torch.float64),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "torch.save": _save,
}
#: What gives the same before and after an average.
HARMLESS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: (p.grad.shape, p.grad.dtype, p.grad.device, p.grad.numel(), repr(p.grad)),
    "half": lambda p: p.grad.mul_(0.5),
    "a tensor of one element": lambda p: p.grad.mul_(torch.tensor(2.0, device=harness.device())),
    "over": lambda p: p.grad.div_(2),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 2.0),
    "zeros": lambda p: torch.optim.SGD([p], lr=0.1).zero_grad(set_to_none=False),
}


def _unscale(parameters: list[torch.Tensor]) -> None:
    scaler = torch.amp.GradScaler(harness.device_type())
    scaler.scale(torch.ones((), device=harness.device()))
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))


def refused(told: bool) -> dict[str, list[str]]:
    """After a backward each reader raises on each rank, before and after a step; gradients stay as they are.

    Returns:
        ``read``: who has read something; ``harmful``: what raised though it is harmless; ``texts``: of the errors.
    """
    import te_fsdp
    from te_fsdp._torch import local_of

    pair = Pair()
    found: dict[str, list[str]] = {"read": [], "harmful": [], "texts": []}
    for seed in (1, 2):
        pair.backward(seed, told=told)
        pair.expect(seed)
        for when in ("before", "after"):
            for name, parameter in pair.model.named_parameters():
                if parameter.ndim > 1:
                    kept = local_of(parameter.grad).clone()
                    for reader, read in READERS.items():
                        try:
                            read(parameter)
                            found["read"].append(f"{reader} {when} step {seed}")
                        except te_fsdp.OrderError as error:
                            found["texts"].append(str(error))
                    harness.assert_same_bits(name, local_of(parameter.grad), kept)
            if when == "before":
                _step_and_keep(pair)
        for parameter in pair.model.parameters():
            for reader, read in HARMLESS.items():
                try:
                    read(parameter)
                except te_fsdp.OrderError as error:
                    found["harmful"].append(f"{reader}: {error}")
            assert not local_of(parameter.grad).any()
        pair.optimizer.zero_grad()
    pair.checks.require(12)
    return found


def _step_and_keep(pair: Pair) -> None:
    """A step that leaves gradients where they are."""
    pair.optimizer.step()
    pair.other.step()
    pair.other.zero_grad()
    for name, parameter in pair.reference.named_parameters():
        pair.checks.close(name, harness.full(pair.model.get_parameter(name)), parameter, **CLOSE)


def opened(how: str, *, told: bool = False, sums: bool = False, **options: Any) -> dict[str, Any]:
    """torch's own clipping works on gradients that were averaged for everybody, and training is that of one process.

    Args:
        how: "once"; "twice": after each of two backwards, which add up; "alone": a rank alone has a further backward
            (``dp_shard`` = 1); "ours": after te_fsdp's own clipping; "scaler": a loss scaler in between.
        told: Whether the loop tells its last backward.
        sums: Gradients are sums over the ranks.
        options: Of fully_shard.

    Returns:
        ``own``: by how much the norm of one copy's gradients is off, relatively, in the first step; ``sent``: kinds of
        collectives in the last finish_grad_reduce, and in the step after it.
    """
    import te_fsdp
    from te_fsdp._torch import local_of

    pair = Pair(average_gradients=not sums, **options)
    rank, size, off, sent = dist.get_rank(), dist.get_world_size(), 0.0, []
    for seed in (1, 2, 3):
        pair.backward(seed, told=told)
        pair.expect(seed)
        own = [local_of(p.grad).clone() for p in pair.model.parameters()]
        if how == "ours":
            te_fsdp.clip_grad_norm_(pair.model, MAX_NORM)
        if how in ("twice", "alone"):
            te_fsdp.finish_grad_reduce(pair.model, outer=True)
            if how == "twice" or rank == 0:
                pair.backward(seed + 10, told=told)
        if how == "twice":
            pair.expect(seed + 10)
        elif how == "alone":
            (pair.reference(inputs(seed + 10)[0].detach()).square().mean() / size).backward()
        for p in pair.reference.parameters() if sums else ():
            p.grad.mul_(size)
        if how != "alone" or seed == 3:  # otherwise the step itself has to find out
            with recorded() as calls:
                te_fsdp.finish_grad_reduce(pair.model, outer=True)
            sent = [[call.kind for call in calls]]
            wanted = [p.grad for p in pair.reference.parameters()]
            if how == "ours":
                torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), MAX_NORM)
            elif how == "scaler":
                _unscale(list(pair.model.parameters()))
                torch._foreach_div_(wanted, 65536.0)
            else:
                expected = torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), MAX_NORM)
                norm = torch.nn.utils.clip_grad_norm_(pair.model.parameters(), MAX_NORM)
                pair.checks.close("norm", harness.full(norm), expected, **CLOSE)
                if seed == 1 and how == "once":
                    alone = torch.stack([g.norm() for g in own]).norm()
                    off = abs(float(alone / expected) - 1)
            for (name, p), other in zip(pair.model.named_parameters(), wanted, strict=True):
                pair.checks.close(f"gradient {name}", harness.full(p.grad), other, **CLOSE)
        with recorded() as calls:
            pair.step()
        sent += [[call.kind for call in calls]]
    return {"own": off, "sent": sent, "compared": pair.checks.require(24)}


def too_early() -> None:
    """Nobody averages before there is an optimizer that does."""
    import te_fsdp

    pair = Pair()
    model = te_fsdp.fully_shard(
        torch.nn.Sequential(torch.nn.Linear(8, 8, device=harness.device())),
        te_fsdp.Meshes.build(dp_replicate=2, device_type=harness.device_type()),
        outer_strategy="optim",
    )
    pair.backward(1)
    model(torch.ones(2, 8, device=harness.device())).sum().backward()
    te_fsdp.finish_grad_reduce(model, outer=True)
