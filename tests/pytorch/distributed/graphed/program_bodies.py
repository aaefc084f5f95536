"""Bodies: loops in which units with graphs share memory in an order other than forward, backward, step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import harness
import torch
from torch import nn

from graphed import state_bodies

HIDDEN, ROWS, STEPS = 32, 16, 6


def _recording() -> contextlib.AbstractContextManager[None]:
    """Let steps and units record captured operations on the CPU; on GPUs they record CUDA graphs."""
    return state_bodies.recording() if harness.device_type() == "cpu" else contextlib.nullcontext()


class _Unit(nn.Module):
    def __init__(self, **options: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options)

    def forward(self, x: torch.Tensor, is_first: bool | None = None) -> torch.Tensor:
        return x + self.mlp(x, is_first_microbatch=is_first)


class _Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Unit(device="meta", params_dtype=dtype, **options) for _ in range(3))

    def forward(self, x: torch.Tensor, is_first: bool | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, is_first)
        return x


class _ParallelUnits(_Model):
    """A model whose units all get the inputs of the model, which need no gradient."""

    def forward(self, x: torch.Tensor, is_first: bool | None = None) -> torch.Tensor:
        return torch.stack([block(x, is_first) for block in self.blocks]).prod(0)


def _batch(number: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, HIDDEN, generator=generator).to(harness.device())


def _two_forwards(model: nn.Module, number: int) -> torch.Tensor:
    """Run one backward through two forwards, as for preference pairs."""
    chosen, rejected = model(_batch(number)), model(_batch(100 + number))
    return (chosen - rejected).square().mean()


def _after_a_backward(model: nn.Module, number: int) -> torch.Tensor:
    """Run two forwards in one backward, after another backward: ``a + (b + c)``, not ``(a + b) + c``."""
    model(_batch(200 + number)).square().mean().backward()
    return _two_forwards(model, number)


def _eager_first_forward(model: nn.Module, number: int) -> torch.Tensor:
    """Run two forwards, the first of them once with inputs of a new kind, which runs eagerly."""
    first = model(_batch(number, 2 * ROWS if number >= 3 else ROWS)).square().mean()
    return first + model(_batch(100 + number)).square().mean()


def _parallel_units(model: nn.Module, number: int) -> torch.Tensor:
    return model(_batch(number)).square().mean()


def _casts(model: nn.Module, number: int) -> torch.Tensor:
    return model(_batch(number).bfloat16()).float().square().mean()


def _casts_of_two_forwards(model: nn.Module, number: int) -> torch.Tensor:
    """Run two forwards, of which the second one runs eagerly. Autograd adds their gradients in BF16."""
    chosen, rejected = (model(_batch(n + number).bfloat16()).float() for n in (0, 100))
    return (chosen - rejected).square().mean()


def _unit_alone(model: nn.Module, number: int) -> torch.Tensor:
    """Evaluate a unit in the middle before the model is."""
    with torch.no_grad():
        model.blocks[1](_batch(number))
    return model(_batch(number)).square().mean()


LOOPS: dict[str, Callable[[nn.Module, int], torch.Tensor]] = {
    "two forwards": _two_forwards,
    "tp, two forwards": _after_a_backward,
    "first is eager": _eager_first_forward,
    "towers": _parallel_units,
    "a unit alone": _unit_alone,
    "casts": _casts,
    "tp, casts": _casts_of_two_forwards,
}


def _outcome(
    model: nn.Module, values: dict[str, torch.Tensor], graphed: Any
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Return the values with those of the weights, and the numbers of recordings and of replays."""
    values = values | {name: harness.full(p.detach()) for name, p in model.named_parameters()}
    if graphed is None:
        return values, []
    assert not graphed.why_eager, graphed.why_eager
    return values, [graphed.recordings, graphed.replays]


def _compared(train: Callable[[bool], tuple[dict[str, torch.Tensor], list[int]]]) -> list[int]:
    if harness.device_type() == "cuda":
        train(False)  # cuBLAS may choose a different algorithm in its first calls
    expected, _ = train(False)
    values, facts = train(True)
    checks = harness.Comparisons()
    for name, value in expected.items():
        checks.bitwise_equal(name, values[name], value)
    checks.require(STEPS + 12)
    return facts


def _train(
    model: nn.Module,
    forward_backward: Callable[[torch.Tensor], torch.Tensor],
    graphs: bool,
    dtype: torch.dtype,
    before: Callable[[int], None] = lambda number: None,
) -> tuple[dict[str, torch.Tensor], Any]:
    """Train with AdamW, with main weights of BF16 parameters: eagerly, or by ``graphed_step``, which is returned.

    ``before`` is called with the number of each step before it.
    """
    import te_fsdp

    rate, step, values = torch.tensor(0.01, device=harness.device()), None, {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    te_fsdp.main_weights(model, optimizer)
    if graphs:
        with _recording():
            step = te_fsdp.graphed_step(model, optimizer, forward_backward, warmup=1)
    for number in range(STEPS):
        before(number)
        x = _batch(number).to(dtype)
        if step is None:
            loss = forward_backward(x)
            optimizer.step()
            optimizer.zero_grad()
        else:
            loss, _ = step(x)
        values[f"loss {number}"] = loss.detach()
    values |= {name: harness.full(p.detach()) for name, p in model.named_parameters()}
    return values, step


def capture_fails_in_backward() -> str:
    """Record steps of which a hook reads a gradient on the host, after reductions have started: the same bits.

    Only CUDA refuses to wait for work of a capture, so that the fault that this guards shows on GPUs alone.

    Returns:
        Why steps run eagerly.
    """
    import te_fsdp

    meshes, why = te_fsdp.Meshes.build(device_type=harness.device_type()), [""]

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        model = _Model()
        te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy="no_shard")
        te_fsdp.materialize(model, seed=0)
        # In the backward this parameter comes last.
        next(model.parameters()).register_hook(
            lambda gradient: gradient * (gradient.sum().item() < torch.inf)
        )

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        values, step = _train(model, forward_backward, graphs, torch.float32)
        why[0] = "" if step is None else step.why_eager
        return values, []

    _compared(train)
    return why[0]


def bitwise_equal(loop: str) -> list[int]:
    """Train with and without graphs of units: losses and weights have the same bits.

    Returns:
        The numbers of recordings and of replays.
    """
    import te_fsdp

    tp = 2 if loop.startswith("tp") else 1
    meshes = te_fsdp.Meshes.build(tp=tp, device_type=harness.device_type())
    loss_of, options = LOOPS[loop], meshes.te_kwargs() | {"set_parallel_mode": tp > 1}

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        kind = _ParallelUnits if loop == "towers" else _Model
        model = kind(torch.bfloat16 if "casts" in loop else torch.float32, **options)
        policy = te_fsdp.MixedPrecisionPolicy() if "casts" in loop else None
        te_fsdp.fully_shard(model, meshes, units="blocks.*", transport="copy_engine", precision=policy)
        te_fsdp.materialize(model, seed=0)
        graphed = None
        if graphs:
            with _recording():
                graphed = te_fsdp.graphed_units(model, warmup=1)
        optimizer, values = torch.optim.SGD(model.parameters(), lr=0.1), {}
        for number in range(STEPS):
            loss = loss_of(model, number)
            loss.backward()
            values[f"loss {number}"] = loss.detach()
            optimizer.step()
            optimizer.zero_grad()
        return _outcome(model, values, graphed)

    return _compared(train)


def cached_weights() -> list[int]:
    """Evaluate with a recipe of a different type between steps, which drops TE's cached weights: the same bits.

    Returns:
        The numbers of recordings and of replays.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        model, step = _Model(), None
        te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy="no_shard")
        te_fsdp.materialize(model, seed=0)
        rate = torch.tensor(0.1, device=harness.device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)

        def forward_backward(batches: torch.Tensor) -> torch.Tensor:
            losses = []
            for number, x in enumerate(batches):
                with te_fsdp.microbatch(model, is_last=number == len(batches) - 1):
                    with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                        loss = model(x, number == 0).square().mean()
                    loss.backward()
                losses.append(loss.detach())
            return torch.stack(losses)

        if graphs:
            with _recording():
                step = te_fsdp.graphed_step(model, optimizer, forward_backward, max_norm=1.0, warmup=1)
        values = {}
        for number in range(STEPS):
            batches = torch.stack([_batch(10 * number), _batch(10 * number + 1)])
            if step is None:
                losses = forward_backward(batches)
                te_fsdp.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            else:
                losses, _ = step(batches)
            values[f"losses {number}"] = losses
            if number == 3:
                with torch.no_grad(), te.autocast(enabled=True, recipe=DelayedScaling()):
                    model(batches[0])
        return _outcome(model, values, step)

    return _compared(train)


def reasons_of_no_shard_units(strategy: str | dict[str, str]) -> dict[str, str]:
    """Return why units run eagerly if the strategy of some is ``no_shard``."""
    import te_fsdp

    model = _Model()
    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy=strategy, transport="copy_engine")
    te_fsdp.materialize(model, seed=0)
    with _recording():
        return te_fsdp.graphed_units(model).why_eager


def write_between_steps(kind: str) -> list[int]:
    """Write to weights with main weights between steps that are recorded: losses and weights have the same bits.

    Args:
        kind: "no_shard", "sharded" or "quantized" weights, the latter with FP8 current scaling.

    Returns:
        The numbers of recordings and of replays.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    strategy = "no_shard" if kind == "no_shard" else "optim_grads_params"

    def train(graphs: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
        with te.quantized_model_init(enabled=kind == "quantized", recipe=Float8CurrentScaling()):
            model = _Model(torch.bfloat16)
        te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy=strategy)
        te_fsdp.materialize(model, seed=0)

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=kind == "quantized", recipe=Float8CurrentScaling()):
                loss = model(x).float().square().mean()
            loss.backward()
            return loss

        @torch.no_grad()
        def write(number: int) -> None:
            for parameter in model.parameters() if number == 4 else ():
                parameter.copy_(parameter.to(torch.float32, copy=True) * 0.5)

        values, step = _train(model, forward_backward, graphs, torch.bfloat16, write)
        if step is None:
            return values, []
        assert not step.why_eager and not step.why_step_eager, (step.why_eager, step.why_step_eager)
        return values, [step.recordings, step.replays]

    return _compared(train)
