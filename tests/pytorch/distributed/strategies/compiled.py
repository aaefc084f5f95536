"""Bodies: ``torch.compile(model)`` trains as the model itself does."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import harness
import torch
import torch.distributed as dist

from strategies.models import batch, optimizer_of, sharded


def trained(strategies: list[Any], axes: dict[str, int], backend: str, outer: str = "no_shard") -> list[int]:
    """Train two steps of two microbatches, compiled or not: the same losses and weights, bit for bit.

    Both run the same kernels: ``backend`` compiles nothing, and TE's modules are not traced.

    Returns:
        For each strategy, how many graphs were captured.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    checks, graphs = harness.Comparisons(), []
    for strategy in strategies:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with warnings.catch_warnings():
            # Dynamo traces what a cache of functools wraps, and warns that this may be wrong.
            warnings.filterwarnings("error", message="Dynamo detected a call to a `functools.lru_cache`")
            plain, compiled = (_train(meshes, strategy, outer, how) for how in ("", backend))
        graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
        for name, value in plain.items():
            checks.bitwise_equal(f"{strategy}: {name}", compiled[name], value)
    torch._dynamo.reset()
    checks.require(len(strategies) * 8)
    return graphs


def _forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Run forward without a loop, whose graph breaks would leave all of it uncompiled."""
    x = x + model.blocks[0](x)
    x = torch.nn.functional.gelu(x + model.blocks[1](x))
    return model.head(x)


def _train(meshes: Any, strategy: Any, outer: str, backend: str) -> dict[str, torch.Tensor]:
    import te_fsdp

    model = sharded(meshes, strategy, outer)
    model.forward = functools.partial(_forward, model)  # type: ignore[method-assign]
    te_fsdp.report_nan(model)
    optimizer = optimizer_of("SGD", model)
    te_fsdp.shard_optimizer(optimizer)
    forward = torch.compile(model, backend=backend) if backend else model
    results, copies = {}, dist.get_world_size() // meshes.size("tp")
    place = dist.get_rank() // meshes.size("tp")
    for step in range(2):
        inputs = batch(step, copies, 2)[:, place]
        for number in range(2):
            with te_fsdp.microbatch(model, is_last=number == 1):
                loss = forward(inputs[number]).square().mean()
                loss.backward()
            results[f"loss {step}.{number}"] = loss.detach()
        te_fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return results | {name: harness.full(p.detach()) for name, p in model.named_parameters()}
