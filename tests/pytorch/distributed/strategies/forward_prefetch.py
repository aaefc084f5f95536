"""Trainings with all-gathers one unit ahead in forward, compared with trainings without."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch import nn

import te_fsdp

#: Two ranks have full blocks of 128 rows, and tokens fill MXFP8 blocks.
HIDDEN, TOKENS, STEPS = 256, 32, 5


class Layers(nn.Module):
    """Four units. ``skipped`` is the number of one that forward leaves out."""

    def __init__(self) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        options = {"bias": False, "device": "meta", "params_dtype": torch.bfloat16}
        self.layers = nn.ModuleList(te.Linear(HIDDEN, HIDDEN, **options) for _ in range(4))
        self.skipped: int | None = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.skipped:
                continue
            x = layer(x) + x
            if self.fails and number == 1:
                raise ValueError("a batch that cannot be used")
        return x


def _write_next(layer: Any, is_late: bool, module: nn.Module, args: Any, output: Any) -> None:
    """Double a later unit's weights while a forward runs, optionally after all started gathers."""
    from te_fsdp.sharded_model import shard_of

    if is_late and harness.device_type() == "cuda":
        torch.cuda.synchronize()
        dist.barrier()
    with torch.no_grad():
        shard_of(layer.weight).mul_(2.0)


def _event(model: Any, kind: str, step: int, run: Callable[[], torch.Tensor]) -> None:
    """Do before a step what ``kind`` names."""
    model.skipped = 2 if kind == "skip" and step == 3 else None
    if kind == "raise" and step == 3:
        model.fails = True
        try:
            run()
        except ValueError:
            model.fails = False
    if kind == "inner" and step == 3:
        model.layers[1](torch.ones(4, HIDDEN, dtype=torch.bfloat16, device=harness.device()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    if kind == "unfinished" and step == 3:  # a forward without its backward, then other weights
        model.skipped = 2
        run()
        model.skipped = None
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)


def _built(recipe: str, transport: str) -> tuple[Any, Any, Any]:
    """Return the sharded model, its optimizer and its recipe."""
    import transformer_engine.pytorch as te
    from quantization.models import recipe_of

    made = None if recipe == "none" else recipe_of(recipe)
    meshes = te_fsdp.Meshes.build(dp_shard=2)
    with te.quantized_model_init(enabled=made is not None, recipe=made):
        model = Layers()
    te_fsdp.fully_shard(model, meshes, units=[te.Linear], transport=transport)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    te_fsdp.main_weights(model, optimizer)
    return model, optimizer, made


def _trained(recipe: str, transport: str, kind: str, is_ahead: bool) -> dict[str, Any]:
    """Return losses, weights, and the units whose all-gathers started one unit ahead in each step."""
    import transformer_engine.pytorch as te

    from te_fsdp.features import forward_prefetch
    from te_fsdp.sharded_model import require_sharded_model

    model, optimizer, made = _built(recipe, transport)
    state = require_sharded_model(model, "")
    if kind == "user":
        model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    if kind == "stale":  # control
        prefetch: Any = state.components.get(forward_prefetch.ForwardPrefetch)
        prefetch.before_unit = lambda name: None
        state.components._bind()
    started, names = list[str](), {id(unit): name for name, unit in state.modules.items()}
    results: dict[str, Any] = {"losses": [], "started": []}
    stock = forward_prefetch._fsdp2.start_gather

    def start(unit: nn.Module) -> bool:
        begun = is_ahead and stock(unit)
        started.extend([names[id(unit)]] if begun else [])
        return begun

    def run() -> torch.Tensor:
        x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=harness.device())
        with te.autocast(enabled=made is not None, recipe=made):
            return model(x).float().square().mean()

    forward_prefetch._fsdp2.start_gather = start
    try:
        for step in range(STEPS):
            started.clear()
            _event(model, kind, step, run)
            with contextlib.ExitStack() as stack:
                if kind in ("write", "stale") and step == 3:
                    write = functools.partial(_write_next, model.layers[2], kind == "stale")
                    stack.callback(model.layers[1].register_forward_hook(write).remove)
                loss = run()
            assert not any(map(_is_pending, state.modules.values()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                results["losses"] += [loss.detach().cpu(), run().cpu()]
            results["started"].append(list(started))
    finally:
        forward_prefetch._fsdp2.start_gather = stock
    results["weights"] = [harness.full(p.detach()).float().cpu() for p in model.parameters()]
    return results


def _is_pending(unit: Any) -> bool:
    from te_fsdp.upstream.fsdp2_units import fsdp_parameter_groups

    return any(group._all_gather_result is not None for group in fsdp_parameter_groups(unit))


def train_both(recipe: str, transport: str, kind: str) -> dict[str, Any]:
    """Train with and without all-gathers one unit ahead; return both."""
    torch.manual_seed(0)
    without = _trained(recipe, transport, kind, is_ahead=False)
    torch.manual_seed(0)
    return {"with": _trained(recipe, transport, kind, is_ahead=True), "without": without}
