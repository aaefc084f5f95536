"""Forwards that read parameters of other modules: weight tying by hand, parameter lists, fused losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from strategies.models import (
    CLASSES,
    HIDDEN,
    SEED,
    Model as Blocks,
    batch,
    error_of_training,
    gradients_and_weights,
)
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Product(torch.autograd.Function):
    """A custom function, to which autograd passes the tensors themselves."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


def _checkpointed(x: torch.Tensor, model: Net) -> torch.Tensor:
    return checkpoint(
        lambda y: functional.linear(y, model.head.weight, model.head.bias), x, use_reentrant=False
    )


def _without_gradients(x: torch.Tensor, model: Net) -> torch.Tensor:
    with torch.no_grad():
        target = functional.linear(x, model.head.weight)
    return model.head(x) + target


#: Computation of the root that reads parameters -> the same by calls of modules
READS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (lambda x, m: functional.linear(x, m.head.weight, m.head.bias), lambda x, m: m.head(x)),
    "transposed": (lambda x, m: x @ m.head.weight.t() + m.head.bias, lambda x, m: m.head(x)),
    "twice": (
        lambda x, m: m.head(x) * (x @ m.head.weight.T),
        lambda x, m: m.head(x) * (m.head(x) - m.head.bias),
    ),
    "function": (lambda x, m: Product.apply(x, m.head.weight) + m.head.bias, lambda x, m: m.head(x)),
    "checkpoint": (_checkpointed, lambda x, m: m.head(x)),
    "list": (lambda x, m: m.head(x @ m.extra[0]), lambda x, m: m.head(x @ m.extra[0])),
    "no_grad": (_without_gradients, _without_gradients),
    "penalty": (
        lambda x, m: m.head(x) + m.head.weight.square().sum(),
        lambda x, m: m.head(x) + m.head.weight.square().sum(),
    ),
}


class Extra(nn.ParameterList):
    def reset_parameters(self) -> None:
        for parameter in self:
            nn.init.normal_(parameter)


class Net(Blocks):
    def __init__(self, device: Any, read: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.extra, self.read = Extra([nn.Parameter(torch.empty(HIDDEN, HIDDEN, device=device))]), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.read(x, self).square().mean()

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.head.weight.T


def built(name: str, engine: str, calls: bool = False) -> tuple[nn.Module, Any]:
    """Return a model of READS on (dp_shard, tp), or (tp) if it is bound only, and the meshes."""
    import te_fsdp

    dp = 1 if engine == "bound" else 2
    meshes = te_fsdp.Meshes.build(dp_shard=dp, tp=2, device_type=harness.device_type())
    model = Net("meta", READS[name][calls], set_parallel_mode=True, **meshes.te_kwargs())
    if engine in ("bound", "torch"):
        te_fsdp.set_device_mesh(model, meshes.tp, meshes.weight)
        if engine == "torch":
            torch.distributed.fsdp.fully_shard(model, mesh=meshes.fsdp)
    else:
        te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy=engine)
    return te_fsdp.materialize(model, seed=SEED), meshes


def compare_with_one_process(name: str, engine: str) -> tuple[float, int]:
    model, meshes = built(name, engine)
    return error_of_training(model, Net(harness.device(), READS[name][True]), meshes)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("engine", ["optim_grads_params", "no_shard", "torch"])
@pytest.mark.parametrize("name", READS)
def test_reads_equal_one_process(pool, name, engine):
    for error, compared in pool.run(compare_with_one_process, 4, name=name, engine=engine):
        assert error < 1e-5 and compared > 40  # fp32: sums in another order


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["linear", "checkpoint"])
def test_reads_of_a_bound_model_equal_one_process(pool, name):
    for error, compared in pool.run(compare_with_one_process, 2, name=name, engine="bound"):
        assert error < 1e-5 and compared > 40  # fp32: sums in another order


def reads_equal_calls(name: str) -> list[bool]:
    """Train under a recipe with reads and with calls. Return whether each tensor has the same bits."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    runs = []
    for calls in (False, True):
        model, meshes = built(name, "optim_grads_params", calls)
        data = [torch.cat([batch(step, meshes.data_size, 1)[0][meshes.data_rank]] * 8) for step in range(3)]
        runs.append(gradients_and_weights(model, data, Float8CurrentScaling()))
    return [torch.equal(a, b) and bool(a.any()) for a, b in zip(*runs, strict=True)]


@pytest.mark.ranks(4)
@pytest.mark.recipe("current")
def test_reads_equal_calls_bit_for_bit(pool):
    for equal in pool.run(reads_equal_calls, 4, name="linear"):
        assert all(equal) and len(equal) > 40


def kinds_outside_of_forward(engine: str) -> dict[str, bool]:
    """Return whether reads outside of forward, in a registered method and of a parameter that tp shards are right."""
    import te_fsdp

    model, meshes = built("linear", engine)
    seen: list[bool] = []
    model.blocks[0].register_forward_hook(lambda m, *_: seen.append(isinstance(m.fc1_weight, DTensor)))
    te_fsdp.register_forward_method(model, "score")
    x = batch(0, meshes.data_size, 1)[0][meshes.data_rank]
    model(x).backward()
    return {
        "outside": all(
            model.head._parameters[name] is getattr(model.head, name) for name in ("weight", "bias")
        ),
        "method": type(model.score(x)) is torch.Tensor and model.score(x).shape == (len(x), CLASSES),
        "sharded over tp": seen == [True],
    }


@pytest.mark.ranks(4)
@pytest.mark.parametrize("engine", ["optim_grads_params", "no_shard"])
def test_parameters_outside_of_forward_are_dtensors(pool, engine):
    for found in pool.run(kinds_outside_of_forward, 4, engine=engine):
        assert all(found.values()), found
