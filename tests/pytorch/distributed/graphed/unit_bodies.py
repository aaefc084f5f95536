"""Bodies: units with graphs against the plain loop, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import harness
import torch
from strategies.models import sharded
from torch import nn

from graphed.bodies import STEPS, LogCapture, inputs_of, loop_of, optimizer_of, plain_step, values_of


class ReplayedCall:
    """A recording on the CPU. The function already ran, so the first replay has no effect."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._first, self.result = call, True, call()

    def replay(self) -> None:
        """Run the function again, with results at the same addresses."""
        if self._first:
            self._first = False
            return
        from te_fsdp.upstream.torch_dtensor import local_of

        with torch.enable_grad():
            result = self._call()
        for held, new in zip(self.result, result, strict=True):
            if isinstance(held, torch.Tensor):
                local_of(held).copy_(local_of(new))


class CallRecorder:
    """Records on the CPU; the ``failing``-th recording fails."""

    def __init__(self, failing: int = -1) -> None:
        self.left = failing

    def record(self, call: Callable[[], Any]) -> tuple[ReplayedCall, Any]:
        """Run the function, to be run again by replays."""
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("operation not permitted when stream is capturing")
        again = ReplayedCall(call)
        return again, again.result


@contextlib.contextmanager
def recording(failing: int = -1) -> Iterator[None]:
    """Let units record: on the CPU by :class:`CallRecorder`, on GPUs by CUDA graphs."""
    from te_fsdp.features import graphed_units

    if harness.device_type() != "cpu":
        yield
        return
    with mock.patch.object(graphed_units, "recorder_for", lambda *_: CallRecorder(failing)):
        yield


def model_of(meshes: Any, case: dict[str, Any]) -> nn.Module:
    """Return a sharded model of two blocks and a head, gathered by copies."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp

    policy = te_fsdp.MixedPrecisionPolicy() if case.get("bf16") else None
    dtype = torch.bfloat16 if case.get("bf16") else torch.float32
    with te.quantized_model_init(enabled=bool(case.get("quantized")), recipe=Float8CurrentScaling()):
        strategy, transport = case.get("strategy", "optim_grads_params"), case.get("transport", "copy_engine")
        outer, activation = case.get("outer", "no_shard"), case.get("activation", "gelu")
        return sharded(meshes, strategy, outer, dtype, policy, transport, False, activation)


def _train(meshes: Any, case: dict[str, Any], graphs: bool) -> tuple[dict[str, torch.Tensor], Any]:
    import te_fsdp

    model, results, graphed = model_of(meshes, case), {}, None
    if graphs:
        with recording():
            graphed = te_fsdp.graphed_units(model)
    optimizer, loop = optimizer_of(model, case), loop_of(model, case)
    for number in range(STEPS):
        inputs = inputs_of(meshes, number, case)
        losses, norm = plain_step(model, optimizer, loop, inputs)
        results |= {f"losses {number}": losses, f"norm {number}": norm}
        if number == 3:
            with torch.no_grad():
                results["evaluation"] = model(inputs[0])
    return results | values_of(model, optimizer), graphed


def bitwise_equal(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, list[Any]]:
    """Train with and without graphs of units: losses, norms, weights and optimizer state are the same.

    Returns:
        Of each case: why units run eagerly, recordings, replays.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks, facts = harness.Comparisons(), {}
    for name, case in cases.items():
        expected, _ = _train(meshes, case, False)
        result, graphed = _train(meshes, case, True)
        assert expected.keys() == result.keys()
        for key, value in expected.items():
            checks.bitwise_equal(f"{name}: {key}", result[key], value)
        facts[name] = [graphed.why_eager, graphed.recordings, graphed.replays]
        graphed.remove()
    checks.require(len(cases) * 20)
    return facts


def stale_results_differ() -> list[bool]:
    """Negative control: a replay that keeps the values of the recording is not the eager loop."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    expected, _ = _train(meshes, {}, False)
    with mock.patch.object(ReplayedCall, "replay", lambda self: None):
        result, _ = _train(meshes, {}, True)
    return [torch.equal(result[key], expected[key]) for key in ("losses 0", "losses 1", "losses 2")]


def _recorded(meshes: Any, failing: int = -1, case: dict[str, Any] | None = None) -> Any:
    import te_fsdp

    model = model_of(meshes, case or {})
    with recording(failing):
        graphed = te_fsdp.graphed_units(model, warmup=1)
    return model, graphed, inputs_of(meshes, 0, {})[0]


def reasons() -> dict[str, Any]:
    """Return why units run eagerly, with the number of lines in the log."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    import te_fsdp

    meshes, results = te_fsdp.Meshes.build(device_type=harness.device_type()), {}

    def run(name: str, around: Callable[[], Any] = contextlib.nullcontext, failing: int = -1) -> None:
        with LogCapture() as heard:
            model, graphed, x = _recorded(meshes, failing)
            for _ in range(3):
                with around():
                    output = model(x.repeat(4, 1))
                output.sum().backward()
        lines = [line for line in heard.lines if "runs eagerly" in line]
        why = list(dict.fromkeys(graphed.why_eager.values()))
        results[name] = [*why, graphed.recordings, graphed.replays, len(lines)]

    run("recorded")
    run("fails", failing=0)
    run("saved", torch.autograd.graph.save_on_cpu)
    run("delayed", lambda: te.autocast(enabled=True, recipe=DelayedScaling()))
    model, graphed, x = _recorded(meshes)
    for rows in (1, 2, 3, 4, 5):
        model(x[:1].repeat(rows, 1)).sum().backward()
    results["kinds"] = sorted(set(graphed.why_eager.values()))
    return results


def out_of_order_replays() -> dict[str, Any]:
    """Run two forwards before their backwards, a dropped forward, a frozen weight.

    Returns:
        Whether gradients equal those of the plain model; recordings and replays after each.
    """
    import te_fsdp

    meshes, results = te_fsdp.Meshes.build(device_type=harness.device_type()), {}
    model, graphed, x = _recorded(meshes)
    plain = model_of(meshes, {})
    y, checks = x.flip(0) * 2, harness.Comparisons()

    def both(name: str, call: Callable[[nn.Module], Any]) -> None:
        for each in (model, plain):
            each.zero_grad()
            call(each)
        for (key, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            if other.grad is not None:
                checks.bitwise_equal(f"{name}: {key}", harness.full(mine.grad), harness.full(other.grad))
        results[name] = [graphed.recordings, graphed.replays]

    def dropped(each: nn.Module) -> None:
        each(y)
        each(x).sum().backward()

    for name in ("eager", "recorded", "replayed"):
        both(name, lambda m: m(x).sum().backward())
    both("two forwards", lambda m: (m(x).sum() + m(y).square().sum()).backward())
    both("dropped", dropped)
    for each in (model, plain):
        each.blocks[0].fc1_weight.requires_grad_(False)
    both("frozen", lambda m: m(x).sum().backward())
    both("frozen, replayed", lambda m: m(x).sum().backward())
    checks.require(30)
    results["why"] = graphed.why_eager
    return results


def mistakes() -> list[str]:
    """Return the errors of wrong calls."""
    import te_fsdp

    meshes, results = te_fsdp.Meshes.build(device_type=harness.device_type()), []

    def error(call: Callable[[], Any]) -> None:
        try:
            with recording():
                call()
        except Exception as raised:
            results.append(f"{type(raised).__name__}: {raised}")

    model = model_of(meshes, {})
    error(lambda: te_fsdp.graphed_units(nn.Linear(2, 2)))
    error(lambda: te_fsdp.graphed_units(model, warmup=0))
    error(lambda: te_fsdp.graphed_units(model, units=["blocks.7"]))
    error(lambda: te_fsdp.graphed_units(model, units=[""]))
    error(lambda: te_fsdp.graphed_units(model_of(meshes, {"transport": "nccl"})))
    model(inputs_of(meshes, 0, {})[0]).sum().backward()
    error(lambda: te_fsdp.graphed_units(model))
    return results
