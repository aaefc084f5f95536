"""Bodies: NaN in one parameter's gradient, on one rank, in one microbatch."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
import torch.distributed as dist

from precision.bodies import BF16, HIDDEN, MICROBATCHES, TOKENS, Pair, dtypes

RANK, MICROBATCH = 1, 2


def poisoned(cases: dict[str, dict[str, Any]], axes: dict[str, int]) -> dict[str, list[str]]:
    """Train two steps of three microbatches, with NaN in the input of the second linear on one rank, once.

    Args:
        cases: Name -> ``policy`` (``None``: no policy), ``context`` of all microbatches but the last one (a name in
            te_fsdp), ``value`` of the poison, ``clip`` (ask for the norm before), ``watch``.
        axes: Mesh sizes.

    Returns:
        What each of two steps raised; empty for none. In between gradients are cleared.
    """
    import te_fsdp

    meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
    return {name: _poisoned(meshes, **case) for name, case in cases.items()}


def _poisoned(
    meshes: Any,
    policy: dict[str, Any] | None = None,
    context: str = "",
    value: float = float("nan"),
    clip: bool = False,
    watch: bool = True,
) -> list[str]:
    import te_fsdp

    torch.manual_seed(3)
    model = Pair(**meshes.te_kwargs())
    precision = None if policy is None else te_fsdp.MixedPrecisionPolicy(**dtypes(policy))
    te_fsdp.fully_shard(model, meshes, units=["first", "second"], precision=precision)
    if watch:
        te_fsdp.report_nan(model)
    optimizer = torch.optim.AdamW(model.parameters())
    poison = torch.zeros((), dtype=BF16, device=harness.device())
    model.second.register_forward_pre_hook(lambda module, args: (args[0] + poison,))
    raised = []
    for step in range(2):
        for number in range(1, MICROBATCHES + 1):
            bad = step == 0 and number == MICROBATCH and dist.get_rank() == RANK
            poison.fill_(value if bad else 0)
            local = bool(context) and number < MICROBATCHES
            with getattr(te_fsdp, context)(model) if local else contextlib.nullcontext():
                x = torch.randn((TOKENS, HIDDEN), device=harness.device()).to(BF16)
                y = model(x)
                y.backward(torch.ones_like(y))
        raised.append("")
        try:
            if clip:
                te_fsdp.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        except te_fsdp.GradientError as error:
            raised[-1] = str(error)
        optimizer.zero_grad()
    finite = torch.stack([torch.isfinite(p.to_local()).all() for p in model.parameters()]).all().int()
    dist.all_reduce(finite, op=dist.ReduceOp.MIN)  # over tp not every rank has what is poisoned
    return [*raised, "" if int(finite) else "the weights hold NaN"]


def seconds(hidden: int, tokens: int, count: int = 30) -> dict[str, float]:
    """Seconds of a forward and backward with and without the watch, the shortest of many, in turns."""
    import time

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    shortest: dict[str, float] = {}
    models = {}
    for name in ("without", "with"):
        models[name] = te_fsdp.fully_shard(Pair(hidden, 4 * hidden), meshes, units=["first", "second"])
    te_fsdp.report_nan(models["with"])
    x = torch.ones((tokens, hidden), dtype=BF16, device=harness.device())
    for _ in range(count):
        for name, model in models.items():
            if harness.device_type() == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            y = model(x)
            y.backward(x)
            if harness.device_type() == "cuda":
                torch.cuda.synchronize()
            shortest[name] = min(shortest.get(name, 1e9), time.perf_counter() - begin)
    return shortest
