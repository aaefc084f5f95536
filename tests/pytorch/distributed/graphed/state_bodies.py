"""Bodies: state that a recording does not see. Buffers, objects among the arguments, learning rates as tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import harness
import torch
from strategies.models import HIDDEN
from torch import nn

from graphed.bodies import MAX_NORM, inputs_of, optimizer_of, plain_step, values_of
from graphed.tapes import TapeRecorder
from graphed.unit_bodies import model_of

STEPS = 6


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let steps and units that are created in the context record captured operations."""
    from te_fsdp.features import graphed_step, graphed_units

    with (
        mock.patch.object(graphed_step, "recorder_for", lambda *_: TapeRecorder()),
        mock.patch.object(graphed_units, "recorder_for", lambda *_: TapeRecorder()),
    ):
        yield


def keep_mean(block: nn.Module, kind: str) -> None:
    """Add the moving average of a block's inputs to its output."""
    block.register_buffer("mean", torch.zeros(HIDDEN, device=harness.device()))
    stock = block.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        new = 0.5 * block.mean + 0.5 * x.detach().mean(0)
        if kind == "copied":
            block.mean.copy_(new)  # type: ignore[operator]
        elif kind == "assigned":
            block.mean = new
        else:
            block.mean.data = new
        return stock(x) + block.mean

    block.forward = forward


def _loop(model: nn.Module, scale: Any, reads: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward_backward(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs[0]).square().mean() * scale()
        if reads:
            loss.item()
        loss.backward()
        return loss

    return forward_backward


def _compared(train: Callable[[bool], tuple[dict[str, torch.Tensor], Any]]) -> Any:
    expected, _ = train(False)
    result, facts = train(True)
    checks = harness.Comparisons()
    for key, value in expected.items():
        checks.bitwise_equal(key, result[key], value)
    checks.require(10)
    return facts


def buffers(kind: str, units: bool, reads: bool = False) -> Any:
    """Train with a buffer that forward updates, with and without graphs: the same bits.

    Returns:
        Why steps or units ran eagerly, and the number of recordings.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], Any]:
        model, results, graphed, step = model_of(meshes, {}), {}, None, None
        for block in model.blocks:
            keep_mean(block, kind if kind != "moved" else "copied")
        optimizer, loop = optimizer_of(model, {}), _loop(model, lambda: 1.0, reads)
        with recording():
            if graphs and units:
                graphed = te_fsdp.graphed_units(model)
            elif graphs:
                step = te_fsdp.graphed_step(model, optimizer, loop, max_norm=MAX_NORM, warmup=2)
        for number in range(STEPS):
            if kind == "moved" and number == 4:
                for block in model.blocks:
                    block.mean.data = block.mean.data * 0.5
            inputs = inputs_of(meshes, number, {})
            loss, norm = plain_step(model, optimizer, loop, inputs) if step is None else step(inputs)
            results |= {f"loss {number}": loss, f"norm {number}": norm}
        results |= values_of(model, optimizer) | {n: b.clone() for n, b in model.named_buffers()}
        if graphed is not None:
            return results, [graphed.why_eager.get("blocks.1", ""), graphed.recordings]
        return results, step and [step.why_eager, step.recordings]

    return _compared(train)


def objects_as_arguments(units: bool) -> list[int]:
    """Train with an object among the arguments whose tensors and numbers change in place: the same bits."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], Any]:
        model, results, graphed, step = model_of(meshes, {}), {}, None, None
        batch = SimpleNamespace(inputs=None, options={"scale": 1.0}, inner=SimpleNamespace(shift=0.0))
        first, stock = model.blocks[0], model.blocks[0].forward
        first.forward = lambda x, item: stock(x) * item.options["scale"] + item.inner.shift

        def forward_backward(item: Any) -> torch.Tensor:
            x = item.inputs + first(item.inputs, item)
            loss = model.head(x + model.blocks[1](x)).square().mean()
            loss.backward()
            return loss

        model.forward = forward_backward  # so that FSDP2's root gathers
        optimizer = optimizer_of(model, {})
        with recording():
            if graphs and units:
                graphed = te_fsdp.graphed_units(model)
            elif graphs:
                step = te_fsdp.graphed_step(model, optimizer, model, warmup=2)
        for number in range(10):
            batch.inputs = inputs_of(meshes, number, {})[0] if number not in (2, 3) else batch.inputs
            batch.options["scale"] = 1.0 + (number == 4)
            batch.inner.shift = float(number == 5)
            if step is None:
                loss = model(batch).detach()
                optimizer.step()
                optimizer.zero_grad()
            else:
                loss, _ = step(batch)
            results[f"loss {number}"] = loss
        return results | values_of(model, optimizer), [each.recordings for each in (graphed, step) if each]

    return _compared(train)


def learning_rates() -> list[int]:
    """Train with a learning rate that is a number, a tensor, and the same number again: the same bits."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], Any]:
        model, results, step = model_of(meshes, {}), {}, None
        optimizer, loop = optimizer_of(model, {}), _loop(model, lambda: 1.0)
        if graphs:
            with recording():
                step = te_fsdp.graphed_step(model, optimizer, loop, max_norm=MAX_NORM, warmup=2)
        for number, rate in enumerate((0.25, 0.25, 0.25, 0.25, torch.tensor(0.125), 0.25, 0.25)):
            # The plain loop reads it as a tensor, too, because a number has a different precision.
            value = rate if graphs else torch.as_tensor(rate)
            optimizer.param_groups[0]["lr"] = value
            inputs = inputs_of(meshes, number, {})
            loss, _ = plain_step(model, optimizer, loop, inputs) if step is None else step(inputs)
            results[f"loss {number}"] = loss
        return results | values_of(model, optimizer), step and [step.recordings, step.replays]

    return _compared(train)
