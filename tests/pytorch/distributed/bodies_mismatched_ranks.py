"""Ranks that run different trainings. All ranks raise an error."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import harness
import torch
import torch.distributed as dist
from bodies_mistakes import Model, all_mistakes, draw_batch, make_meshes, make_sgd, make_sharded
from torch import nn


def _with_tp(strategy: str = "optim_grads_params") -> nn.Module:
    return make_sharded(strategy, model=Model(make_meshes(tp=2)), tp=2)


def _delayed_recipe(enabled: bool = True, **options: Any) -> AbstractContextManager[Any]:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    return te.autocast(enabled=enabled, recipe=DelayedScaling(**options))


def _train(
    model: nn.Module, context: AbstractContextManager[Any] | None = None, seed: int | None = 0
) -> None:
    with context or contextlib.nullcontext():
        loss = (
            model(draw_batch(seed, rows=16)).square().mean()
        )  # Hopper's float8 products take multiples of 16
    loss.backward()


def recipe_on_some_tp_ranks() -> None:
    _train(_with_tp(), _delayed_recipe(dist.get_rank() == 0))


def different_recipe_options() -> None:
    _train(make_sharded(), _delayed_recipe(margin=dist.get_rank()))


class Inner(Model):
    """Enters the recipe in its own forward."""

    enabled = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        with _delayed_recipe(self.enabled):
            x = self.layer(x)
        return self.head(x)


def recipe_within_forward_on_some_ranks() -> None:
    model = make_sharded(model=Inner(make_meshes()))
    model.enabled = dist.get_rank() == 0
    _train(model)


def different_recipe_later() -> None:
    """Change recipes on both ranks. Objects are new ones in each step."""
    model = make_sharded()
    for _ in range(2):
        _train(model, _delayed_recipe(margin=1))
    _train(model, _delayed_recipe(dist.get_rank() == 1))


def torch_autocast_on_some_ranks() -> None:
    _train(
        make_sharded(), torch.autocast(harness.device_type(), torch.bfloat16, enabled=dist.get_rank() == 0)
    )


def recipe_on_some_ranks_of_a_bound_model() -> None:
    import te_fsdp

    meshes = make_meshes(tp=2)
    model = Model(meshes)
    te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
    _train(te_fsdp.materialize(model, seed=0), _delayed_recipe(dist.get_rank() == 0))


def frozen_on_one_rank() -> None:
    model = make_sharded("no_shard")
    model.head.weight.requires_grad_(dist.get_rank() == 1)
    _train(model)


def different_parameters_frozen_on_each_rank() -> None:
    """Freeze equally many elements on both ranks, so that the reductions would fit."""
    model = make_sharded()
    _train(model)
    (model.head if dist.get_rank() else model.inp).weight.requires_grad_(False)
    _train(model)


def evaluation_on_some_tp_ranks() -> None:
    _train(_with_tp().train(dist.get_rank() == 0))


def a_weight_assigned_on_one_rank() -> None:
    model = make_sharded()
    if dist.get_rank() == 0:
        model.head.weight = nn.Parameter(torch.zeros(model.head.weight.shape, device=harness.device()))
    _train(model)


def a_bias_deleted_on_one_rank() -> None:
    model = make_sharded()
    if dist.get_rank() == 1:
        del model.head.bias
    _train(model)


def memory_not_initialized_on_one_rank() -> None:
    model = make_sharded(model=Model(make_meshes(tp=2)), tp=2)
    if dist.get_rank() == 0:
        model.to_empty(device=harness.device())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
    _train(model)


def conversion_on_one_rank() -> None:
    model = make_sharded()
    _train(model.half() if dist.get_rank() == 1 else model)


def clipping_on_one_rank() -> None:
    import te_fsdp

    model = make_sharded()
    optimizer = make_sgd(model)
    _train(model)
    if dist.get_rank() == 1:
        te_fsdp.clip_grad_norm_(model, 1.0)
    optimizer.step()


def report_on_one_rank() -> None:
    import te_fsdp

    model = make_sharded()
    if dist.get_rank() == 1:
        te_fsdp.report_nan(model)
    _train(model)


def quantized_weights_by_rank() -> None:
    """Build quantized weights with delayed scaling on one rank, with current scaling on the other."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    with te.quantized_model_init(recipe=Float8CurrentScaling() if dist.get_rank() else DelayedScaling()):
        model = Model(make_meshes())
    make_sharded(model=model)


MISTAKES: list[Callable[..., None]] = [
    recipe_on_some_tp_ranks,
    different_recipe_options,
    recipe_within_forward_on_some_ranks,
    different_recipe_later,
    torch_autocast_on_some_ranks,
    recipe_on_some_ranks_of_a_bound_model,
    frozen_on_one_rank,
    different_parameters_frozen_on_each_rank,
    evaluation_on_some_tp_ranks,
    a_weight_assigned_on_one_rank,
    a_bias_deleted_on_one_rank,
    memory_not_initialized_on_one_rank,
    conversion_on_one_rank,
    clipping_on_one_rank,
    report_on_one_rank,
    quantized_weights_by_rank,
]


def all_ranks(directory: str) -> dict[str, tuple[str, str]]:
    """Return the class and text of each error."""
    return all_mistakes(directory, MISTAKES)


def change_on_one_rank() -> dict[str, str]:
    """Return the error of rank 0, which changes while the other rank continues."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    import te_fsdp

    model, results = make_sharded(), {}
    model.eval()(draw_batch())
    model.train()
    _train(model)
    te_fsdp.set_collective_timeout(1)
    changes: dict[str, Callable[[], Any]] = {
        "recipe": lambda: _train(model, te.autocast(recipe=Float8CurrentScaling())),
        "frozen": lambda: (model.head.weight.requires_grad_(False), _train(model)),
        "evaluation": lambda: model.requires_grad_(True).eval()(draw_batch()),
    }
    for what, change in changes.items() if dist.get_rank() == 0 else ():
        try:
            change()
        except te_fsdp.CollectiveError as error:
            results[what] = str(error)
    te_fsdp.set_collective_timeout(1800)
    if dist.get_rank():
        time.sleep(4)  # the store of a terminated rank does not answer
    return results
