"""Bodies: an update under ``torch.compile``, compared bit for bit with the eager update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import torch

from strategies.models import batch, optimizer_of, sharded


def updated(axes: dict[str, int], way: str, optimizer: str = "SGD", dtype: str = "float32") -> int:
    """Train three steps with a compiled update, or not; return the number of compared values."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks = harness.Comparisons()
    plain, compiled = (
        _train(meshes, optimizer, getattr(torch, dtype), how) for how in (WAYS[way][0], WAYS[way][1])
    )
    torch._dynamo.reset()
    for name, value in plain.items():
        checks.bitwise_equal(name, compiled[name], value)
    checks.require(len(plain))
    return len(plain)


def _step(model: Any, optimizer: Any) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return update


def _compiled_step(model: Any, optimizer: Any) -> Callable[[], None]:
    step = torch.compile(optimizer.step, backend="eager")

    def update() -> None:
        step()
        optimizer.zero_grad()

    return update


def _clipped(model: Any, optimizer: Any) -> Callable[[], None]:
    """Run everything between two backwards, in one function."""
    import te_fsdp

    def update() -> None:
        te_fsdp.finish_grad_reduce(model)
        te_fsdp.scale_gradients(model, 0.5)
        te_fsdp.clip_grad_norm_(model, 0.01)
        optimizer.step()
        te_fsdp.zero_grad(model)
        model.zero_grad()
        te_fsdp.release_params(model)

    return update


WAYS = {
    "step": (_step, _compiled_step),
    "update": (_clipped, lambda *given: torch.compile(_clipped(*given), backend="eager")),
}


def _train(meshes: Any, name: str, dtype: torch.dtype, make: Any) -> dict[str, torch.Tensor]:
    import te_fsdp

    torch._dynamo.reset()
    model = sharded(meshes, "optim_grads_params", dtype=dtype)
    optimizer = optimizer_of(name, model)
    if dtype != torch.float32:
        te_fsdp.main_weights(model, optimizer)
    update = make(model, optimizer)
    for step in range(3):
        x = batch(step, meshes.data_size, 1)[0, meshes.data_rank]
        model(x.to(dtype)).float().square().mean().backward()
        update()
    return {name: harness.full(p.detach()) for name, p in model.named_parameters()}
