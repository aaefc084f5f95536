"""Bodies: averages that start during the last backward, compared bit for bit with averages in the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

from hfsdp.models import Case, Run
from hfsdp.overlap import Pair, inputs, record_reduce_scatters
from hfsdp.quantized_transfers import large_from

STEPS = 4


@contextlib.contextmanager
def without_overlap() -> Iterator[None]:
    """Compute all averages in the step, and none during backward."""
    from te_fsdp.features.hfsdp.overlap import EarlyAverages

    stock, EarlyAverages.reduced = EarlyAverages.reduced, lambda *args: None
    try:
        yield
    finally:
        EarlyAverages.reduced = stock


class Trainer:
    """A model, its optimizer, and its backwards."""

    def __init__(self, model: nn.Module, optimizer: Any, backward: Callable[[int], None]) -> None:
        self.model, self.optimizer, self.backward = model, optimizer, backward

    def step(self, clip: bool) -> None:
        """Run the step after a backward."""
        import te_fsdp

        if clip:
            te_fsdp.clip_grad_norm_(self.model, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()


def bitwise_equal(kind: str, clip: bool = False, large: int | None = None, **options: Any) -> dict[str, Any]:
    """Compare steps of two equal models bit for bit; the second averages at the step.

    Args:
        kind: A key of :data:`KINDS`.
        clip: Whether gradients are clipped.
        large: From how many elements on tensors travel by themselves.
        options: Of the kind.

    Returns:
        ``early``: reduce-scatters of each backward of the first model; ``late``: of the second one.
    """
    first, second = (KINDS[kind](**options) for _ in range(2))
    counts: dict[str, list[int]] = {"early": [], "late": []}
    checks = harness.Comparisons()
    with large_from(large):
        for step in range(STEPS):
            with record_reduce_scatters() as calls:
                first.backward(step)
                counts["early"].append(len(calls))
                with without_overlap():
                    second.backward(step)
                counts["late"].append(len(calls) - counts["early"][-1])
            for trainer in (first, second):
                trainer.step(clip)
            for (name, actual), expected in zip(
                first.model.named_parameters(), second.model.parameters(), strict=True
            ):
                checks.bitwise_equal(f"step {step} {name}", actual, expected)
                main = [
                    t.optimizer.state[p].get("master_param") for t, p in ((first, actual), (second, expected))
                ]
                if main[0] is not None:
                    checks.bitwise_equal(f"step {step} {name}: main weight", *main)
    return counts | {"compared": checks.require(STEPS)}


def _run(axes: dict[str, int], marked: bool = True, **case: Any) -> Trainer:
    run = Run(Case(**case, contexts=marked), axes)
    return Trainer(run.model, run.optimizer, lambda step: run.backward())


def _chain(axes: dict[str, int], policy: dict[str, Any] | None = None, **options: Any) -> Trainer:
    import te_fsdp

    dtypes = {k: getattr(torch, v) if isinstance(v, str) else v for k, v in (policy or {}).items()}
    precision = te_fsdp.MixedPrecisionPolicy(**dtypes) if policy else None
    pair = Pair(axes, precision=precision, **options)

    def backward(step: int) -> None:
        with te_fsdp.microbatch(pair.model, is_last=True):
            pair.model(inputs(step)[dist.get_rank()]).square().mean().backward()

    return Trainer(pair.model, pair.optimizer, backward)


def _experts(axes: dict[str, int], experts: int) -> Trainer:
    from experts.bodies import _part, _pass, batch

    import te_fsdp
    from hfsdp.experts import sharded

    meshes, model, optimizer = sharded(axes, experts, "optim", False)

    def backward(step: int) -> None:
        with te_fsdp.microbatch(model, is_last=True):
            _pass(model, *(_part(t, meshes) for t in batch("none", "fp32", experts, "uneven", step)))

    return Trainer(model, optimizer, backward)


def _quantized(axes: dict[str, int], recipe: str, hidden: int = 256) -> Trainer:
    import transformer_engine.pytorch as te
    from quantization.bodies import SEED, batch_of
    from quantization.weight_bytes import recipe_of

    import te_fsdp
    from hfsdp.quantized_transfers import mlp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    model = mlp(recipe, hidden, "meta", **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, outer_strategy="optim")
    te_fsdp.materialize(model, seed=SEED)
    optimizer = te_fsdp.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    x, target = (
        t.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous().to(harness.device())
        for t in batch_of(hidden)
    )

    def backward(step: int) -> None:
        with te_fsdp.microbatch(model, is_last=True):
            with te.autocast(enabled=True, recipe=recipe_of(recipe)):
                output = model(x)
            (output.float() - target.float()).square().mean().backward()

    return Trainer(model, optimizer, backward)


KINDS: dict[str, Callable[..., Trainer]] = {
    "run": _run,
    "chain": _chain,
    "experts": _experts,
    "quantized": _quantized,
}
