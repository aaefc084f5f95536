"""Bodies: training with exempt parameters, against one process or the sharded model.

Tolerances are those of `parity.runs`, whose sums these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from parity.runs import (
    EPSILON,
    LEARNING_RATE,
    RTOL,
    WHY,
    Cut,
    Findings,
    _gradient,
    _loss,
    _value,
    compare_shards,
    copy_shards,
    scramble,
)
from torch import nn

from no_sharding.models import BATCH, HIDDEN, PARTS, SEQUENCE, exempt, seeded

STEPS = 2


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, torch's AdamW or TE's FusedAdam."""
    options = {"lr": LEARNING_RATE, "eps": EPSILON, "weight_decay": 0.1}
    parameters = [p for p in parameters if p.requires_grad]
    if name == "SGD":
        return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
    if name == "AdamW":
        return torch.optim.AdamW(parameters, **options)
    import transformer_engine.pytorch as te

    return te.optimizers.FusedAdam(parameters, **options)


def sharded(meshes: Any, strategy: Any, parts: tuple[str, ...], origin: str, **kwargs: Any) -> nn.Module:
    """Return the model, exempt parts marked, sharded, materialised."""
    import transformer_engine.pytorch as te

    import te_fsdp

    model = seeded("meta" if origin == "meta" else None, **meshes.te_kwargs(), **kwargs)
    if parts:
        exempt(model, parts)
    te_fsdp.fully_shard(model, meshes, units=te.LayerNormMLP, strategy=strategy)
    if origin == "meta":
        te_fsdp.materialize(model, seed=11)
    return model


def numerics(
    axes: dict[str, int],
    *,
    parts: tuple[str, ...] = PARTS,
    strategy: Any = "optim_grads_params",
    optimizer: str = "AdamW",
    microbatches: int = 1,
    schedule: str = "plain",
    sequence_parallel: bool = False,
    clip: str = "",
    origin: str = "device",
    recompute: str | None = None,
    spoil: str = "",
) -> dict[str, Any]:
    """Check that gradients of every step and the final parameters equal those of one process.

    Args:
        axes: mesh sizes.
        parts: what is exempt.
        strategy: of the rest.
        optimizer: "SGD", "AdamW" or "FusedAdam".
        microbatches: backwards per step.
        schedule: "plain", "no_sync" or "microbatch".
        sequence_parallel: tp ranks hold parts of the gradients of norms and of foreign parameters.
        clip: "torch" or "te_fsdp": who clips the gradients; torch clips those of exempt parameters alone.
        origin: "device" or "meta".
        recompute: "reentrant" or "other": activations are recomputed in backward.
        spoil: negative controls, see `inject_fault`.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    reference = seeded()
    subject = sharded(meshes, strategy, parts, origin, sequence_parallel=sequence_parallel)
    subject.recompute = recompute
    scramble(reference)
    copy_shards(reference, subject)
    checks, cut = Findings(), Cut.of(meshes)
    optimizers = [optimizer_of(optimizer, model.parameters()) for model in (subject, reference)]
    generator = torch.Generator().manual_seed(3 + (dist.get_rank() if spoil == "data" else 0))
    tp_dim = 0 if sequence_parallel else None
    for step in range(STEPS):
        for number in range(microbatches):
            x, target = (
                torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(harness.device())
                for _ in range(2)
            )
            output = reference(x)
            (_loss(output, target, output) / microbatches).backward()
            mine, wanted, whole = cut.take(x, tp_dim), cut.take(target, tp_dim), cut.take(target, None)
            with inject_fault(spoil), microbatch(subject, schedule, number == microbatches - 1):
                (_loss(subject(mine), wanted, whole) / microbatches).backward()
        trained = _Trained(subject), _Trained(reference)
        compare_shards(checks, f"gradient {step}", *trained, _gradient)
        clip_both(checks, subject, reference, clip)
        for item in optimizers:
            item.step()
            item.zero_grad()
    compare_shards(checks, "parameter", subject, reference, _value)
    return checks.settle(minimum=4)


class _Trained(nn.Module):
    """A view of a model without its frozen parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["model"] = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        pairs = self.model.named_parameters(*args, **kwargs)
        return ((name, p) for name, p in pairs if p.requires_grad)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        pairs = self.model.named_modules(*args, **kwargs)
        return ((name, m) for name, m in pairs if not name.startswith("encoder"))


@contextlib.contextmanager
def microbatch(model: nn.Module, schedule: str, is_last: bool) -> Iterator[None]:
    """Enter the contexts of one microbatch as a user does."""
    import te_fsdp

    if schedule == "plain" or (schedule == "no_sync" and is_last):
        yield
    elif schedule == "no_sync":
        with te_fsdp.no_sync(model):
            yield
    else:
        with te_fsdp.microbatch(model, is_last=is_last):
            yield


@contextlib.contextmanager
def inject_fault(what: str) -> Iterator[None]:
    """Inject a fault: "reduction" leaves the reduction out, "order" packs in a different order on each rank."""
    from te_fsdp import replicated_params
    from te_fsdp.collectives.redistribute import Pending, redistribute
    from te_fsdp.features import replicated_gradients

    stock = replicated_gradients.pack
    if what == "reduction":
        replicated_params.redistribute = lambda flat, *args: Pending(lambda: flat)
    if what == "order":
        turned = -1 if dist.get_rank() else 1
        replicated_gradients.pack = lambda parts, tp: stock(parts[::turned], tp)
    try:
        yield
    finally:
        replicated_params.redistribute, replicated_gradients.pack = redistribute, stock


def clip_both(checks: Findings, subject: nn.Module, reference: nn.Module, who: str) -> None:
    """Clip both models' gradients to half of their norm; the norms are equal."""
    import te_fsdp

    if not who:
        return
    mine, theirs = subject, reference
    if who == "torch":
        mine, theirs = subject.adapter, reference.adapter
    limit = 0.5 * float(
        torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters() if p.grad is not None])
    )
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    clip = te_fsdp.clip_grad_norm_ if who == "te_fsdp" else torch.nn.utils.clip_grad_norm_
    checks.attempt(checks.close, "norm", clip(mine.parameters(), limit).detach(), expected, RTOL, WHY)
