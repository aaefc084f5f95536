"""Counts of te_fsdp's own function calls in a steady-state step."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import harness
import torch
import torch.distributed as dist

import te_fsdp

OPTIONS = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "fuse_qkv_params": True,
    "set_parallel_mode": True,
}


def _model(meshes: te_fsdp.Meshes, recipe: Any) -> torch.nn.Module:
    """Return two TransformerLayers with quantized weights, fully sharded."""
    import transformer_engine.pytorch as te

    options = {**OPTIONS, "device": "meta", "params_dtype": torch.bfloat16, **meshes.te_kwargs()}
    with te.quantized_model_init(recipe=recipe):
        model = torch.nn.Sequential(*[te.TransformerLayer(64, 128, 4, **options) for _ in range(2)])
    outer = "optim" if meshes.size("dp_replicate") > 1 else "no_shard"
    te_fsdp.fully_shard(model, meshes, outer_strategy=outer)
    te_fsdp.materialize(model, seed=0)
    return model


def calls_per_step(axes: dict[str, int]) -> list[tuple[str, int]]:
    """Return functions of te_fsdp that the third step of a training calls, and how often, most calls first.

    Two TransformerLayers with FP8 weights (current scaling, 24 parameters), fully sharded, AdamW with main weights;
    with ``dp_replicate`` its state is sharded over the replicas too.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    recipe = Float8CurrentScaling()
    model = _model(te_fsdp.Meshes.build(**axes), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "dp_replicate" in axes:
        te_fsdp.shard_optimizer(optimizer)
    else:
        te_fsdp.main_weights(model, optimizer)
    for _ in range(3):
        torch.manual_seed(0)
        with _calls() as calls:
            with te.autocast(enabled=True, recipe=recipe):
                output = model(torch.randn(16, 2, 64, dtype=torch.bfloat16, device=harness.device()))
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Counter(f"{file}:{function}" for file, function in calls).most_common()


@contextlib.contextmanager
def _calls() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets file and name of each function of te_fsdp that the context calls, in their order."""
    root = os.path.dirname(te_fsdp.__file__) + os.sep
    calls: list[tuple[str, str]] = []

    def record(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(root) and not name.startswith(f"{root}emulation"):
            calls.append((name[len(root) :], frame.f_code.co_name))

    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def walk_of_one_linear() -> dict[str, tuple[int, int]]:
    """Return how many files a reader passes, and how often the file changes, by name of the call.

    A bias-free Linear in BF16 goes through ``fully_shard``, ten steps and one more ``AdamW.step``.
    """
    import transformer_engine.pytorch as te

    meshes = te_fsdp.Meshes.build(dp_shard=2)
    model = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, device="meta", **meshes.te_kwargs())
    with _calls() as setup:
        te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(11):
        model(torch.ones(16, 64, dtype=torch.bfloat16, device=harness.device())).float().sum().backward()
        with _calls() as step:
            optimizer.step()
        optimizer.zero_grad()
    files = {"fully_shard": [file for file, _ in setup], "step": [file for file, _ in step]}
    return {
        name: (len({*names}), sum(before != after for before, after in itertools.pairwise(names)))
        for name, names in files.items()
    }


def user_hooks(fused: bool) -> dict[str, Any]:
    """Return the number of te_fsdp's optimizer hooks, and whether the user's hooks see parameters around a step.

    Args:
        fused: Whether main weights are those of TE's FusedAdam, which replace the parameters from its first step on.
    """
    from torch.optim import optimizer as module
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.optimizers import FusedAdam

    model = _model(te_fsdp.Meshes.build(dp_shard=2), Float8CurrentScaling())
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer
    optimizer = (
        FusedAdam(parameters, lr=1.0, master_weights=True) if fused else torch.optim.SGD(parameters, lr=1.0)
    )
    before = [parameter.to_local().float() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    seen: list[bool] = []

    def look(stepped: torch.optim.Optimizer, *_: Any) -> None:
        params = stepped.param_groups[0]["params"]
        new = [parameter.to_local().float() for parameter in params]
        seen.append(all(map(lambda one, other: one is other, params, parameters)))
        seen.append(not any(map(torch.equal, new, before)))

    optimizer.register_step_post_hook(look)
    te_fsdp.main_weights(model, optimizer)
    optimizer.step()
    if fused:
        optimizer.register_step_pre_hook(look)
        optimizer.step()
    hooks = {"before": module._global_optimizer_pre_hooks, "after": module._global_optimizer_post_hooks}
    ours = {
        when: [h for h in held.values() if h.__module__.startswith("te_fsdp")] for when, held in hooks.items()
    }
    return {"seen": seen, **{when: len(held) for when, held in ours.items()}}


def replicas_after_a_failed_step() -> bool:
    """Return whether tp ranks of a bound model have equal norms after a step that follows a failed one."""
    import transformer_engine.pytorch as te

    mesh = te_fsdp.Meshes.build(dp_shard=1, tp=2).tp
    model = te.LayerNormLinear(32, 64, params_dtype=torch.bfloat16, device=harness.device())
    te_fsdp.set_device_mesh(model, tp_mesh=mesh, check_inputs=False)  # gradients that no model computes
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    te_fsdp.main_weights(model, optimizer)

    def fail(*_: Any) -> None:
        raise RuntimeError

    handle = optimizer.register_step_pre_hook(fail)
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    handle.remove()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(mesh.get_local_rank()))
    optimizer.step()
    mine = model.layer_norm_weight.to_local().detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(first, mine)


def step_with_replaced_main_weight() -> tuple[bool, bool]:
    """Return whether a step updates and quantizes a replaced main weight, for both kinds."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    model = _model(te_fsdp.Meshes.build(dp_shard=2), Float8CurrentScaling())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    te_fsdp.main_weights(model, optimizer)
    for new in (False, True):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            state = optimizer.state[parameter]
            if new:
                state["master_param"] = torch.full_like(state["master_param"], 0.5)
        optimizer.step()
    kept = [optimizer.state[parameter]["master_param"].to_local() for parameter in parameters]
    return (
        all(main.eq(0.5).all() for main in kept),
        all(parameter.to_local().float().eq(0.5).all() for parameter in parameters),
    )
