"""Units that add auxiliary losses to a list argument, or fill a cache in a dict."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import devices
from strategies.models import FFN, HIDDEN, SEED, batch, error_of_training, gradients_and_weights
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A TE module and a plain one, which only computes a loss that is added to the caller's list."""

    def __init__(self, device: Any, **kwargs: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.mlp = te.LayerNormMLP(HIDDEN, FFN, device=device, params_dtype=torch.float32, **kwargs)
        self.aux = nn.Linear(HIDDEN, 1, device=device)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor], *, cache: dict[str, Any]) -> torch.Tensor:
        y = x + self.mlp(x) + sum(losses) + cache["states"][0][-1] + 0 * cache["last"]
        losses.append(self.aux(x))
        cache["states"][0].append(y)
        cache["last"] = y.square().mean()
        return y

    fill = forward


class Filled(Block):
    """A unit that returns nothing."""

    def forward(self, box: list[torch.Tensor]) -> None:  # type: ignore[override]
        box[0] = box[0] + self.mlp(box[0]) * self.aux(box[0])


class Model(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self, device: Any, **kwargs: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(device, **kwargs) for _ in range(2))

    def forward(self, x: torch.Tensor, cache: dict[str, Any] | None = None) -> torch.Tensor:
        cache = {"states": ([x],), "last": 0} if cache is None else cache
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, losses, cache=cache)
        assert len(losses) == 2 and len(cache["states"][0]) == 3
        return x.mean() + sum(losses).mean() + cache["last"]


class FilledModel(Model):
    block = Filled

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        box = [x]
        for block in self.blocks:
            block(box)
        return box[0].square().mean()


class Losses(list[torch.Tensor]):
    pass


@dataclass
class Holder:
    losses: list[torch.Tensor]
    last: torch.Tensor | None = None


class Adding(Block):
    def forward(self, x: torch.Tensor, box: Any) -> torch.Tensor:  # type: ignore[override]
        y = x + self.mlp(x)
        if isinstance(box, Holder):
            box.last, box = y.mean(), box.losses
        if isinstance(box, Mapping):  # which FSDP2 does not copy
            box["losses"].append(self.aux(x).mean())
        else:
            box.append(self.aux(x).mean())
        return y


class Recursive(Block):
    """A unit that calls itself."""

    def forward(self, x: torch.Tensor, box: list[torch.Tensor], depth: int = 2) -> torch.Tensor:  # type: ignore[override]
        assert box[0].dtype is x.dtype
        y = x + self.mlp(x)
        box.append(self.aux(y).mean())
        for _ in range(2 if depth else 0):
            y = y + self(y, box, depth - 1)
        return y + 0 * box[0]


class KeptModel(Model):
    """Units that add losses to a list. The user's hooks replace their arguments."""

    kinds: tuple[Any, ...] = (list, Losses, Holder)

    block = Adding

    def __init__(self, device: Any, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args: (args[0] * 1.0, *args[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = x.new_zeros(())
        for kind in self.kinds:
            box, y = kind([x.mean()]), x
            for block in self.blocks:
                y = block(y, box)
            if isinstance(box, Holder):
                assert box.last is not None
                total, box = total + box.last, box.losses
            assert len(box) == 3
            total = total + y.square().mean() + sum(box)
        return total


class MappedModel(KeptModel):
    """Units that add losses to a mapping that is not a dict."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = x.new_zeros(())
        for kind in (UserDict, MappingProxyType, lambda items: SimpleNamespace(box=UserDict(items)).box):
            box, y = kind({"losses": [x.mean()]}), x
            for block in self.blocks:
                y = block(y, box)
            assert len(box["losses"]) == 3
            total = total + y.square().mean() + sum(box["losses"])
        return total


class RecursiveModel(Model):
    block = Recursive

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        box = [x.float().clone()]
        first = box[0]
        for block in self.blocks:
            x = block(x, box)
        assert box[0] is first and len(box) == 15
        return x.square().mean().float() + sum(item.float() for item in box[1:])


class RecomputedModel(KeptModel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, losses = x.clone().requires_grad_(), []
        for block in self.blocks:
            x = checkpoint(block, x, losses, use_reentrant=True)
        return x.square().mean()


MODELS = {"losses": Model, "nothing": FilledModel, "kinds": KeptModel, "recomputed": RecomputedModel}
MODELS |= {"mapped": MappedModel, "recursive": RecursiveModel}


def sharded(name: str, dp: int, tp: int, strategy: str, **options: Any) -> tuple[nn.Module, Any]:
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=dp, tp=tp, device_type=harness.device_type())
    model = MODELS[name]("meta", set_parallel_mode=tp > 1, **meshes.te_kwargs())
    te_fsdp.fully_shard(model, meshes, units="blocks.*", strategy=strategy, **options)
    return te_fsdp.materialize(model, seed=SEED), meshes


def compare_with_one_process(name: str, dp: int, tp: int, strategy: str) -> tuple[float, int]:
    model, meshes = sharded(name, dp, tp, strategy)
    return error_of_training(model, MODELS[name](harness.device()), meshes)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (2, 2)], ids=["dp", "tp"])
def test_training_equals_one_process(pool, name, dp, tp, strategy):
    for error, compared in pool.run(compare_with_one_process, 4, name=name, dp=dp, tp=tp, strategy=strategy):
        assert error < 1e-5 and compared > 50  # fp32: sums in another order


def strategies_under_a_recipe() -> list[bool]:
    """Train with two strategies under a recipe. Return whether each tensor has the same bits."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    runs = []
    for strategy in ("optim_grads_params", "optim"):
        model, meshes = sharded("losses", 2, 1, strategy)
        data = [torch.cat([batch(step, 2, 1)[0][meshes.data_rank]] * 8) for step in range(2)]
        runs.append(gradients_and_weights(model, data, Float8CurrentScaling()))
    return [torch.equal(a, b) for a, b in zip(*runs, strict=True)]


@pytest.mark.ranks(2)
@pytest.mark.recipe("current")
def test_strategies_have_equal_bits_under_a_recipe(pool):
    for equal in pool.run(strategies_under_a_recipe, 2):
        assert all(equal) and len(equal) > 40


def containers_after_a_forward(grad: bool) -> dict[str, bool]:
    """Run the root with a caller's cache, cast to BF16. Return which of its properties hold afterwards."""
    import te_fsdp

    precision = te_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, meshes = sharded("losses", 2, 1, "optim_grads_params", precision=precision)
    x = batch(0, 2, 1)[0][meshes.data_rank]
    mine = x.clone().requires_grad_()
    states = [mine]
    cache: dict[str, Any] = {"states": (states,), "last": 0}
    with torch.set_grad_enabled(grad):
        loss = model(x, cache)
        if grad:
            loss.backward()
    return {
        "same list": cache["states"][0] is states,
        "same tensor": states[0] is mine,
        "its gradient": not grad or bool(mine.grad is not None and mine.grad.any()),
        "new items": len(states) == 3 and isinstance(cache["last"], torch.Tensor),
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
def test_callers_keep_their_tensors(pool, grad):
    for found in pool.run(containers_after_a_forward, 2, grad=grad):
        assert all(found.values()), found


def references_after_failed_forwards() -> list[bool]:
    """Let forwards of the model, and a forward and a method of a unit alone, raise.

    Return whether the tensors in their arguments still exist after the next forward.
    """
    import te_fsdp

    model, meshes = sharded("losses", 2, 1, "optim_grads_params")
    te_fsdp.register_forward_method(model.blocks[0], "fill")
    x = batch(0, 2, 1)[0][meshes.data_rank]
    references = []
    alone = {"forward": model.blocks[0], "fill": model.blocks[0].fill}
    for failing, is_alone in ((True, ""), (True, ""), (True, "forward"), (True, "fill"), (False, "")):
        item = x.clone().requires_grad_()
        references.append(weakref.ref(item))
        cache: dict[str, Any] = {"states": ([item],), "last": 0 if not failing else torch.ones(3, 3)}
        with pytest.raises(RuntimeError) if failing else contextlib.nullcontext():
            alone[is_alone](x, [], cache=cache) if is_alone else model(x, cache).sum().backward()
        assert cache["states"][0][0] is item  # not FSDP2's tensor
        del item, cache
        gc.collect()
    return [reference() is not None for reference in references]


@pytest.mark.ranks(2)
def test_containers_of_a_failed_forward_are_freed(pool):
    assert pool.run(references_after_failed_forwards, 2) == [[False] * 5] * 2


def graphed_units() -> tuple[list[bool], set[str]]:
    """Train with and without graphs of units. Return whether each tensor has the same bits, and why units are eager."""
    from graphed.unit_bodies import recording

    import te_fsdp

    runs = []
    for graphs in (False, True):
        model, meshes = sharded("losses", 2, 1, "optim_grads_params", transport="copy_engine")
        if graphs:
            with recording():
                graphed = te_fsdp.graphed_units(model)
        runs.append(
            gradients_and_weights(model, [batch(step, 2, 1)[0][meshes.data_rank] for step in range(5)])
        )
    return [torch.equal(a, b) for a, b in zip(*runs, strict=True)], set(graphed.why_eager.values())


@pytest.mark.ranks(2)
def test_units_that_change_their_arguments_are_not_recorded(pool):
    if devices.device_type() == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("all-gathers between ranks that share a GPU have no fixed addresses")
    for equal, why in pool.run(graphed_units, 2):
        assert all(equal) and why == {
            "it changes a list or dict among its arguments, which a replay would not"
        }


class Number(Block):
    def forward(self, x: torch.Tensor) -> float:  # type: ignore[override]
        return float(self.aux(x).square().mean())


class Measuring(Model):
    """Units that return numbers, of which nothing has a backward."""

    block = Number

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * sum(block(x) for block in self.blocks)


def measured_under_autocast() -> bool:
    MODELS["numbers"] = Measuring
    model, meshes = sharded("numbers", 2, 1, "optim_grads_params")
    x = batch(0, 2, 1)[0][meshes.data_rank]
    with torch.autocast(harness.device_type(), torch.bfloat16):
        return bool(model(x).any())


@pytest.mark.ranks(2)
def test_units_may_return_numbers_under_autocast(pool):
    assert pool.run(measured_under_autocast, 2) == [True, True]
