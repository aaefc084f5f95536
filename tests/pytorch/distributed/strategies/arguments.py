"""Bodies: arguments of fully_shard, also for quantized weights."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from torch import nn

from strategies.bodies import loss_of
from strategies.models import SEED, Model, sharded

#: Options -> class and words of the error.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"strategy": "zero3"}, "PlacementError", "strategy: expected one of"),
    "unknown_outer": ({"outer_strategy": "optim_grads"}, "PlacementError", "outer_strategy"),
    "two_words": ({"strategy": "optim", "reshard_after_forward": True}, "PlacementError", "omit reshard"),
    "number": ({"reshard_after_forward": 2}, "PlacementError", "reshard_after_forward=2"),
    "no_module": ({"strategy": {"blocks.9": "optim"}}, "PlacementError", "matches no module"),
    "two_classes": (
        {"strategy": {nn.Linear: "optim", nn.Module: "no_shard"}},
        "PlacementError",
        "two strategies",
    ),
    "nothing_to_cut": (
        {"strategy": "no_shard", "outer_strategy": "optim"},
        "PlacementError",
        "outer_strategy",
    ),
}


def refused(dp_replicate: int = 1) -> int:
    """Try each entry of :data:`REFUSED` on one model, which stays usable."""
    import te_fsdp
    from te_fsdp import errors

    meshes = te_fsdp.Meshes.build(dp_replicate=dp_replicate, device_type=harness.device_type())
    model = Model("meta")
    for options, kind, words in REFUSED.values():
        with pytest.raises(getattr(errors, kind), match=words):
            te_fsdp.fully_shard(model, meshes, units="blocks.*", **options)
    te_fsdp.materialize(te_fsdp.fully_shard(model, meshes, units="blocks.*"), seed=SEED)
    for call in (te_fsdp.no_sync, te_fsdp.sync, te_fsdp.zero_grad, te_fsdp.release_params):
        with pytest.raises(errors.OrderError, match=r"te_fsdp.fully_shard was called on"):
            for _ in [call(model.head)]:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(call(model.head))
    return len(REFUSED)


def rows(strategy: Any, units: Any = "blocks.*") -> dict[str, str]:
    """Name -> strategy of each unit that FSDP2 has."""
    import transformer_engine.pytorch as te

    import te_fsdp
    from te_fsdp.sharded_model import get_sharded_model

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    named = {"LayerNormMLP": te.LayerNormMLP}
    if isinstance(strategy, dict):
        strategy = {named.get(key, key): row for key, row in strategy.items()}
    model = te_fsdp.fully_shard(Model("meta"), meshes, units=units, strategy=strategy)
    state: Any = get_sharded_model(model)
    return {name: str(state.units[name]) for name in state.modules}


def quantized(recipe: str) -> dict[str, list[float]]:
    """Train quantized weights by each strategy; those that add up in the same order must agree to the bit.

    `optim_grads_params` is compared with one process elsewhere.
    """
    results = {}
    with _small_blocks():
        for strategy, loop in (
            ("optim_grads_params", "plain"),
            ("optim_grads", "plain"),
            ("optim_grads", "microbatch"),
            ("optim_grads_params", "no_sync"),
            ("optim", "microbatch"),
            ("optim", "no_sync"),
            ("optim", "interleaved"),
        ):
            results[f"{strategy} {loop}"] = _train_quantized(recipe, strategy, loop)
    each, once = results["optim_grads_params plain"], results["optim_grads_params no_sync"]
    for name, losses in results.items():
        same = once if name.startswith("optim ") or name.endswith("no_sync") else each
        assert losses == same, (name, losses, same)
    assert each[0] > each[-1]
    return results


def _small_blocks() -> Any:
    """Return sizes that are full blocks of every format for two ranks."""
    from strategies import models
    from strategies.bodies import patch_attributes

    return patch_attributes(models, HIDDEN=64, FFN=128)  # type: ignore[arg-type]


def _train_quantized(recipe: str, strategy: str, loop: str) -> list[float]:
    from quantization.models import recipe_of
    from transformer_engine.pytorch import autocast, quantized_model_init
    from transformer_engine.pytorch.optimizers import FusedAdam

    import te_fsdp

    meshes = te_fsdp.Meshes.build(device_type=harness.device_type())
    fp8 = recipe_of(recipe)
    with quantized_model_init(enabled=True, recipe=fp8):
        model = sharded(meshes, strategy, dtype=torch.bfloat16)
    optimizer = FusedAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2, master_weights=True)
    te_fsdp.main_weights(model, optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    inputs = torch.randn(3, 32, 64, generator=generator).to(harness.device(), torch.bfloat16)
    losses = []
    for _ in range(4):
        if loop == "interleaved":  # two forwards before their backwards, as pipelines do
            with te_fsdp.microbatch(model, is_last=False):
                with autocast(enabled=True, recipe=fp8):
                    first, second = (loss_of(model, x) for x in inputs[:2])
                first.backward()
                second.backward()
        for index, x in enumerate(inputs):
            last = index == len(inputs) - 1
            if loop == "interleaved" and not last:
                continue
            context: Any = contextlib.nullcontext()
            if loop == "microbatch":
                context = te_fsdp.microbatch(model, is_last=last)
            elif loop == "no_sync" and not last:
                context = te_fsdp.no_sync(model)
            with context:
                with autocast(enabled=True, recipe=fp8):
                    loss = loss_of(model, x)
                loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return losses
