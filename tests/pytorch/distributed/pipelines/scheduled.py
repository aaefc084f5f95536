"""Bodies: stages under torch's pipeline schedules against one process, by value; gathers counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from harness.collectives import recorded
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from pipelines.models import (
    HIDDEN,
    ROWS,
    Model,
    batch,
    meshes_of,
    optimizer_of,
    stage_of,
)

STEPS, MICROBATCHES = 2, 4
#: Below the norms of the first steps, so that all are clipped.
MAX_NORM = 0.05
FP32 = (
    2e-5,
    "fp32 sums of at most 600 terms in a different order: 600 * 2^-24 = 3.6e-5 at most, their random walk 2e-6",
)
BF16 = (
    3e-2,
    "sums of at most eight gradients in bf16, each rounded by 2^-9, and parameters of one bf16 step",
)
FP8 = (
    0.15,
    "gradients in bf16 of small biases, through weights some of whose FP8 values are the neighbouring ones",
)
QUANTIZED = (
    2e-3,
    "main weights that differ by rounding: one in thousands of their FP8 values is the neighbouring one (6 %)",
)
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero bubble": "ScheduleInterleavedZeroBubble",
}


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return a mean over the rows of a microbatch."""
    return nn.functional.cross_entropy(logits.float(), words)


def _scheduled(
    meshes: Any, parts: list[nn.Module], kind: str, dtype: torch.dtype, known_shapes: bool, microbatches: int
) -> Callable[..., list[torch.Tensor]]:
    """Run a step of this rank's stages; return losses of the microbatches where the last stage is."""
    group, place, pp = meshes.pp.get_group(), meshes.pp.get_local_rank(), meshes.pp.size()
    numbers = [place + pp * at for at in range(len(parts))]
    count, stages = pp * len(parts), []
    # TE computes both gradients at once: nothing is left to do for a schedule that splits backward.
    options = {"dw_builder": lambda: lambda: None} if kind == "zero bubble" else {}
    for number, part in zip(numbers, parts, strict=True):
        # With given shapes torch need not run a microbatch to determine them.
        entering = (
            torch.zeros(ROWS, dtype=torch.int64) if number == 0 else torch.zeros(ROWS, HIDDEN, dtype=dtype)
        )
        leaving = torch.zeros(ROWS, 12 if number == count - 1 else HIDDEN, dtype=dtype)
        both = [t.to(harness.device()).requires_grad_(t.is_floating_point()) for t in (entering, leaving)]
        stages.append(
            PipelineStage(
                part, number, count, harness.device(), *(both if known_shapes else ()), group=group, **options
            )
        )
    made = getattr(pipelining, SCHEDULES[kind])
    schedule = made(stages if len(parts) > 1 else stages[0], microbatches, loss_fn=loss_of)

    def step(words: torch.Tensor, then: torch.Tensor) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        last = count - 1 in numbers
        schedule.step(
            *([words] if 0 in numbers else []), target=then if last else None, losses=losses if last else None
        )
        return losses

    return step


def training(
    directory: str,
    axes: dict[str, int],
    kind: str = "1f1b",
    recipe: str = "none",
    quantized: bool = False,
    steps: int = STEPS,
    broken: str = "",
    known_shapes: bool = True,
    microbatches: int = MICROBATCHES,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> dict[str, Any]:
    """Compare steps of a pipeline and of one process, both from one checkpoint of the unsharded model.

    Args:
        directory: With a checkpoint ``whole``.
        axes: Of ``meshes_of``.
        kind: Of :data:`SCHEDULES`.
        recipe: Of forward, and of weights that are held quantized.
        quantized: Whether they are.
        broken: A fault to bring in: ``"norm"``, ``"layer"``.
        known_shapes: Whether torch gets the shapes between stages, or runs a microbatch to determine them.
        microbatches: Of a step.
        dtype: Of parameters.
        options: Of ``fully_shard``.
    """
    import te_fsdp

    meshes = meshes_of(**axes)
    parts, reference = _built(directory, meshes, kind, recipe, quantized=quantized, dtype=dtype, **options)
    if broken == "layer" and meshes.pp.get_local_rank() == 1:
        next(parts[0].layers.parameters()).detach().mul_(1.1)
    ours, wanted = optimizer_of(parts, quantized), optimizer_of(reference, quantized)
    if hfsdp := options.get("outer_strategy") == "optim":
        te_fsdp.shard_optimizer(ours)
    step_of = _scheduled(meshes, parts, kind, dtype, known_shapes, microbatches)
    checks, sent, losses = harness.Comparisons(), [], list[float]()
    for step in range(steps):
        words, then = batch(step, meshes.data_size, microbatches)
        allowed = _allowed(dtype, quantized and step > 0)
        with recorded() as seen:
            result = step_of(words[meshes.data_rank], then[meshes.data_rank])
        expected = _whole_step(reference, words, then)
        if result:
            checks.close(f"step {step}: losses", torch.stack(result), expected[meshes.data_rank], *allowed)
            losses += [float(loss) for loss in result]
        if not hfsdp:
            _compare(checks, f"step {step}: gradient of", parts, reference, allowed, gradients=True)
        norm = te_fsdp.clip_grad_norm_(
            [p for part in parts for p in part.parameters()], MAX_NORM, pp_mesh=broken != "norm"
        )
        whole = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        checks.close(f"step {step}: norm", norm, whole, *allowed)
        _updated((ours, wanted), reference)
        _compare(checks, f"step {step}: updated", parts, reference, allowed, gradients=False)
        sent.append(seen)
    return checks.require(steps * 5) and {**_counts(sent), "losses": losses}


def _updated(optimizers: tuple[torch.optim.Optimizer, ...], reference: nn.Module) -> None:
    from te_fsdp.upstream import te as _te

    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for parameter in reference.parameters():
        _te.drop_transpose(parameter)  # FusedAdam leaves a stale one on Hopper


def _allowed(dtype: torch.dtype, quantized: bool) -> tuple[float, str]:
    """Return how far values may be from those of one process, and why."""
    if dtype == torch.bfloat16:
        return FP8 if quantized else BF16
    return QUANTIZED if quantized else FP32


def _counts(sent: list[list[Any]]) -> dict[str, list[int]]:
    """Return all-gathers of each step, and all-reduces of gradients."""
    return {
        "gathers": [sum(item.kind == "all_gather" for item in step) for step in sent],
        "reductions": [
            sum((item.kind, item.dtype) == ("all_reduce", "float32") for item in step) for step in sent
        ],
    }


def error_of_split_backward() -> tuple[str, str]:
    """Return a stage's error for a schedule that splits backward; then compute both gradients at once."""
    from torch.distributed.pipelining._backward import stage_backward_input

    meshes = meshes_of(2)
    model = stage_of(meshes, 1, 2)
    x = torch.ones(ROWS, HIDDEN, device=harness.device(), requires_grad=True)
    try:
        stage_backward_input([model(x).sum()], None, [x], model.parameters())
    except RuntimeError as error:
        raised = error.__cause__ or error  # torch wraps it from 2.13 on
    model(x).sum().backward()
    assert x.grad is not None and all(p.grad is not None for p in model.parameters())
    return type(raised).__name__, str(raised)


def _built(
    directory: str,
    meshes: Any,
    kind: str,
    recipe: str,
    *,
    quantized: bool,
    dtype: torch.dtype,
    **options: Any,
) -> tuple[list[nn.Module], Model]:
    """Return this rank's stages, and the unsharded model in one process, with the values of one checkpoint."""
    import te_fsdp

    pp, each = meshes.pp.size(), 2 if kind in ("interleaved", "zero bubble") else 1
    numbers = range(meshes.pp.get_local_rank(), pp * each, pp)
    parts = [
        stage_of(meshes, n, pp * each, recipe, quantized=quantized, dtype=dtype, **options) for n in numbers
    ]
    reference = Model(harness.device(), recipe=recipe, quantized=quantized, dtype=dtype)
    reference.group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for model in (parts, reference):
        te_fsdp.checkpoint.load(f"{directory}/whole", model)
    return parts, reference


def _whole_step(reference: nn.Module, words: torch.Tensor, then: torch.Tensor) -> list[torch.Tensor]:
    """Run the step in one process; return losses of the microbatches of each data-parallel rank."""
    losses = []
    for x, y in zip(words, then, strict=True):
        losses.append([loss_of(reference(a), b) for a, b in zip(x.split(ROWS), y.split(ROWS), strict=True)])
        for loss in losses[-1]:
            loss.backward()  # divided afterwards, as torch does: scales of FP8 follow gradients
    for parameter in reference.parameters():
        parameter.grad.div_(words.numel() // ROWS)
    return [torch.stack(own).detach() for own in losses]


def _compare(
    checks: Any,
    what: str,
    parts: list[nn.Module],
    reference: nn.Module,
    allowed: tuple[float, str],
    *,
    gradients: bool,
) -> None:
    from te_fsdp.sharded_model import get_sharded_model

    wanted = dict(reference.named_parameters())
    for part in parts:
        state = get_sharded_model(part)
        for name, parameter in (state.parameters() if state else {}).items():
            values = (parameter.grad, wanted[name].grad) if gradients else (parameter, wanted[name])
            assert None not in values, f"{what} {name}: a gradient on one side only"
            checks.close(f"{what} {name}", *values, *allowed)
