"""Bodies: parameters that no rank uses. Their `.grad` stays None, so that AdamW does not decay them."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from no_sharding.bodies import meshes_of

STEPS, WIDTH = 3, 8
#: In each step and microbatch: the branch of even ranks, and that of odd ones.
USES = ((("a", "b"), ("a", "b")), (("a", "a"), ("c", "a")), (("b", "a"), ("c", "c")))


class Branches(nn.Module):
    """A common layer, three branches of which a rank takes one, and a fourth that no rank ever takes."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("common", "a", "b", "c", "never"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, device=harness.device()))

    def forward(self, x: torch.Tensor | tuple[torch.Tensor], branch: str) -> torch.Tensor:
        return getattr(self, branch)(self.common(x[0] if isinstance(x, tuple) else x))


def train_with_weight_decay(
    axes: dict[str, int], schedule: str, *, outer: str = "no_shard", zeros: bool = False, **options: Any
) -> dict[str, Any]:
    """Train with weight decay, and compare gradients and parameters of each step with one process.

    Args:
        axes: Mesh sizes.
        schedule: "plain", "no_sync", "microbatch" or "by hand"; two microbatches a step.
        outer: Outer strategy.
        zeros: Negative control: gradients of zeros stay.
        options: Of `te_fsdp.fully_shard`.
    """
    import te_fsdp
    from te_fsdp.upstream import fsdp2_units

    torch.manual_seed(1)
    reference = Branches()
    torch.manual_seed(1)
    model = Branches()
    te_fsdp.fully_shard(model, meshes_of(axes), outer_strategy=outer, **options)
    for group in fsdp2_units.fsdp_parameter_groups(model) if zeros else ():
        fsdp2_units.record_of_group(group).flags = None
    # eps: AdamW divides gradients by their size; near eps, rounding is not amplified.
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1) for m in (reference, model)
    ]
    if outer == "optim":
        optimizers[1] = te_fsdp.shard_optimizer(optimizers[1])
    rank, world, checks = dist.get_rank(), dist.get_world_size(), harness.Comparisons()
    why = "fp32: sums of a few products in a different order"
    for step, uses in enumerate(USES):
        for micro, names in enumerate(uses):
            x = torch.randn(world, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + micro))
            x = x.to(harness.device())
            losses = [reference(part, names[at % 2]).square().mean() for at, part in enumerate(x)]
            (sum(losses) / world).backward()
            with context_of(model, schedule, is_last=micro == 1):
                model(x[rank], names[rank % 2]).square().mean().backward()
        if schedule == "by hand":
            te_fsdp.finish_grad_reduce(model)
            te_fsdp.set_auto_sync(model, True)
            te_fsdp.release_params(model)
        pairs = list(zip(model.named_parameters(), reference.parameters(), strict=True))
        for (name, parameter), expected in pairs if outer == "no_shard" else ():
            assert (parameter.grad is None) == (expected.grad is None), (
                f"step {step}: {name}: {parameter.grad}"
            )
            if expected.grad is not None:
                checks.close(f"{step} {name}", parameter.grad, expected.grad, 1e-5, why)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, parameter), expected in pairs:
            checks.close(f"{step} {name} after", parameter, expected, 1e-5, why)
    return checks.require(STEPS * 8)


def two_forwards(axes: dict[str, int]) -> dict[str, Any]:
    """Run one backward through two forwards, which reduces gradients twice; each rank has its own branch in the second.

    The first reduction is that of the second forward: even ranks use branch "b" there, odd ones "a", and no rank uses
    them in the second reduction.
    """
    import te_fsdp

    torch.manual_seed(1)
    reference = Branches()
    torch.manual_seed(1)
    model = Branches()
    te_fsdp.fully_shard(model, meshes_of(axes))
    rank, world, checks = dist.get_rank(), dist.get_world_size(), harness.Comparisons()
    why = "fp32: sums of a few products in a different order"
    x = torch.randn(2, world, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(harness.device())
    # Nested inputs that require gradients make FSDP2 reduce after each forward's part of the backward.
    x.requires_grad_()
    losses = [
        (reference(first, "c") + reference(second, "ba"[at % 2])).square().mean()
        for at, (first, second) in enumerate(zip(*x, strict=True))
    ]
    (sum(losses) / world).backward()
    (model((x[0, rank],), "c") + model((x[1, rank],), "ba"[rank % 2])).square().mean().backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), f"{name}: {parameter.grad}"
        if expected.grad is not None:
            checks.close(name, parameter.grad, expected.grad, 1e-5, why)
    return checks.require(8)


def context_of(model: nn.Module, schedule: str, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of one microbatch."""
    import te_fsdp

    if schedule == "microbatch":
        return te_fsdp.microbatch(model, is_last=is_last)
    if schedule == "by hand":
        te_fsdp.set_auto_sync(model, False)
    return te_fsdp.no_sync(model) if schedule == "no_sync" and not is_last else contextlib.nullcontext()
