"""Bodies: steps of several microbatches, of which graphs contain one each, against the plain loop, bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import torch
import torch.distributed as dist
from strategies.models import batch
from torch import nn

from graphed.bodies import MAX_NORM, model_of, optimizer_of, plain_step, values_of
from graphed.tapes import recording

STEPS = 5


def function_of(model: nn.Module, case: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Return the forward and backward of one microbatch."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    from te_fsdp.gradient_sync import wait_for_reductions
    from te_fsdp.sharded_model import require_sharded_model

    recipe = DelayedScaling() if case.get("delayed") else Float8CurrentScaling()

    def forward_backward(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if case.get("moves"):
            # Reductions of the previous microbatch may still run on another stream.
            wait_for_reductions(require_sharded_model(model, "test"))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        with te.autocast(enabled=bool(case.get("quantized") or case.get("delayed")), recipe=recipe):
            output = model(x)
        loss = output.float().square().mean() * scale
        loss.backward()
        return loss

    def with_cached_weights(x: torch.Tensor, scale: torch.Tensor, is_first_microbatch: bool) -> torch.Tensor:
        for block in model.blocks:
            block.forward = functools.partial(
                type(block).forward, block, is_first_microbatch=is_first_microbatch
            )
        return forward_backward(x, scale)

    return with_cached_weights if case.get("first") else forward_backward


def inputs_of(meshes: Any, step: int, count: int, case: dict[str, Any]) -> torch.Tensor:
    """Return microbatches of this rank."""
    copies = dist.get_world_size() // meshes.size("tp")
    x = batch(step, copies, count)[:, dist.get_rank() // meshes.size("tp")].repeat(1, 4, 1)
    return x.to(torch.bfloat16 if case.get("bf16") else torch.float32)


def _train(
    meshes: Any, case: dict[str, Any], count: int, recorded: bool
) -> tuple[dict[str, torch.Tensor], Any]:
    import te_fsdp

    model = model_of(meshes, case)
    optimizer, function = optimizer_of(model, case), function_of(model, case)

    def loop(inputs: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        losses = []
        for number, x in enumerate(inputs):
            first = {"is_first_microbatch": number == 0} if case.get("first") else {}
            with te_fsdp.microbatch(model, is_last=number == count - 1):
                losses.append(function(x, scale, **first))
        return torch.stack(losses)

    with recording():
        step = te_fsdp.graphed_step(
            model, optimizer, function, max_norm=MAX_NORM, warmup=2, microbatches=count
        )
    results, scale = {}, torch.tensor(1 / count, device=harness.device())
    for number in range(STEPS):
        inputs = inputs_of(meshes, number, count, case)
        if recorded:
            losses, norm = step(inputs, scale)
            losses = torch.stack(losses)
        else:
            losses, norm = plain_step(model, optimizer, lambda x: loop(x, scale), inputs)
        results |= {f"losses {number}": losses, f"norm {number}": norm}
    return results | values_of(model, optimizer), step


def bitwise_equal(cases: dict[str, dict[str, Any]], axes: dict[str, int], count: int) -> dict[str, list[Any]]:
    """Train with the plain loop and with graphs of microbatches: losses, norms, weights and state are the same.

    Returns:
        Of each case why steps, or the optimizer's, ran eagerly, recordings, replays, and graphs of microbatches.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks, facts = harness.Comparisons(), {}
    for name, case in cases.items():
        expected, _ = _train(meshes, case, count, False)
        result, step = _train(meshes, case, count, True)
        assert expected.keys() == result.keys()
        for key, value in expected.items():
            checks.bitwise_equal(f"{name}: {key}", result[key], value)
        graphs = [len(item.gradients) for item in step._recorded]
        facts[name] = [step.why_eager, step.why_step_eager, step.replays, graphs]
    checks.require(len(cases) * 10)
    return facts


def moved_gradients() -> list[Any]:
    """Move gradients between microbatches. The error names the function, because a replay would be wrong.

    Returns:
        Why steps ran eagerly; whether they equal those of the loop, then without the comparison of addresses.
    """
    import te_fsdp
    from te_fsdp.features import graphed_step

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    expected, _ = _train(meshes, {}, 4, False)
    results, why = [], ""
    for compared in (True, False):
        unseen = mock.patch.object(graphed_step, "addresses_between_microbatches", lambda *_: {})
        with contextlib.nullcontext() if compared else unseen:
            values, step = _train(meshes, {"moves": True}, 4, True)
        why = why or step.why_eager
        results.append(all(torch.equal(values[key], value) for key, value in expected.items()))
    return [why, *results]


def report_nan_of_microbatch() -> list[str]:
    """Check that ``report_nan`` names the microbatch, also if its graph has run for several."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    texts = []
    for poisoned in (0, 2, 3):
        _, step = _train(meshes, {"nan": True}, 4, True)
        inputs = inputs_of(meshes, 0, 4, {})
        if dist.get_rank() == 1:
            inputs[poisoned, 0, 0] = float("nan")
        try:
            step(inputs, torch.ones((), device=harness.device()))
        except te_fsdp.GradientError as error:
            texts.append(str(error).partition(": expected")[0])
    return texts


def mistakes() -> list[str]:
    """Return the errors of invalid numbers of microbatches and of tensors that are not stacked microbatches."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    model = model_of(meshes, {})
    optimizer, texts = optimizer_of(model, {}), []
    inputs, scale = inputs_of(meshes, 0, 3, {}), torch.ones((), device=harness.device())
    for count in (0, True, 2.0, 4):
        try:
            step = te_fsdp.graphed_step(model, optimizer, function_of(model, {}), microbatches=count)
            step(inputs, scale)
        except (te_fsdp.InputError, ValueError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts
