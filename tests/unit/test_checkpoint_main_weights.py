"""Check that a load without the optimizer resets its main weights to the loaded weights.

The step after has a learning rate of 0, so that it shows the main weights and nothing else: each parameter becomes its
main weight, rounded or quantized once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import te_fsdp
from te_fsdp import checkpoint, emulation
from te_fsdp.checkpoint import loading
from te_fsdp.features.main_weights import optimizers_of

MAIN = "master_param"
SIZE = 128


@pytest.fixture
def recipe(request: pytest.FixtureRequest, te: Any) -> Iterator[Any]:
    """Yield a recipe by its name, on an architecture that has it; ``None`` for "bf16"."""
    from transformer_engine.common import recipe as recipes

    emulation.switch_arch("9.0" if request.param == "Float8BlockScaling" else "10.0")
    yield None if request.param == "bf16" else getattr(recipes, request.param)()
    emulation.switch_arch("10.0")


def build(te: Any, recipe: Any, seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(seed)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        layers = [te.Linear(SIZE, SIZE, params_dtype=dtype, device="cpu") for _ in range(2)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return model


def fused(model: nn.Module, parameters: Any = None, **options: Any) -> Any:
    from transformer_engine.pytorch.optimizers import FusedAdam

    return FusedAdam(
        parameters or model.parameters(), lr=0.05, weight_decay=0.0, master_weights=True, **options
    )


def adamw(model: nn.Module, parameters: Any = None) -> Any:
    optimizer = torch.optim.AdamW(parameters or model.parameters(), lr=0.05, weight_decay=0.0)
    te_fsdp.main_weights(model, optimizer)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "fused": lambda m: [fused(m)],
    "adamw": lambda m: [adamw(m)],
    "fp16": lambda m: [fused(m, master_weight_dtype=torch.float16)],
    "remainders": lambda m: [fused(m, store_param_remainders=True)],
    "two": lambda m: [fused(m, m[0].parameters()), adamw(m, m[1].parameters())],
}


def step(model: nn.Module, optimizers: list[Any], lr: float | None = None) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape).to(parameter.dtype)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the logical values of the parameters."""
    return {name: p.detach().float().clone() for name, p in model.named_parameters()}


def trained(te: Any, recipe: Any, kind: str) -> tuple[nn.Module, list[Any]]:
    model = build(te, recipe, seed=1)
    optimizers = OPTIMIZERS[kind](model)
    step(model, optimizers)
    return model, optimizers


def begun(
    te: Any, recipe: Any, kind: str, path: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Load into a new model with a new optimizer, and return the values before and after the first step."""
    model = build(te, recipe, seed=2)
    optimizers = OPTIMIZERS[kind](model)
    given = optimizers[0] if kind != "fp16" else None  # whose state has no place in checkpoints
    checkpoint.load(path, model, given, strict=False)
    now = values(model)
    step(model, optimizers, lr=0.0)
    return now, values(model)


CASES = [
    *[
        (name, kind)
        for name in ("bf16", "DelayedScaling", "Float8CurrentScaling")
        for kind in ("fused", "adamw", "two")
    ],
    *[(name, kind) for name in ("Float8BlockScaling", "MXFP8BlockScaling") for kind in ("fused", "adamw")],
    *[(name, "fp16") for name in ("bf16", "DelayedScaling", "MXFP8BlockScaling")],
    ("bf16", "remainders"),
]


#: The two ways that quantize share what follows, so that each has one half of the cases.
WAYS = {"the same": CASES, "fp32": CASES[1::2], "plain": CASES[::2]}


@pytest.mark.parametrize(
    ("way", "recipe", "kind"), [(way, *case) for way in WAYS for case in WAYS[way]], indirect=["recipe"]
)
def test_step_after_load_keeps_loaded_values(
    te: Any, recipe: Any, kind: str, way: str, tmp_path: Path
) -> None:
    source = build(
        te, None if way != "the same" else recipe, 0, torch.float32 if way == "fp32" else torch.bfloat16
    )
    if way == "plain":
        dcp.save(source.state_dict(), checkpoint_id=tmp_path / "a")
    else:
        checkpoint.save(tmp_path / "a", source)
    model, optimizers = trained(te, recipe, kind)
    before = values(model)
    loaded = checkpoint.load(tmp_path / "a", model)
    assert len([n for n in loaded.notes if "its main weights are set to the loaded weights" in n]) == len(
        optimizers
    )
    now = values(model)
    step(model, optimizers, lr=0.0)
    after = values(model)

    one = {"0": "fused", "1": "adamw"} if kind == "two" else {"": kind}
    for prefix, of_it in one.items():
        loaded_new, expected = begun(te, recipe, of_it, tmp_path / "a")
        assert_same(now, loaded_new)
        of_those = [name for name in expected if name.startswith(prefix)]
        assert_same({n: after[n] for n in of_those}, {n: expected[n] for n in of_those})
    assert not close(after, before, 2**-3), "the previous ones differ"


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float) -> bool:
    """Check that values are within the steps of an 8-bit format with three bits of mantissa."""
    return all(torch.allclose(found[n], expected[n], rtol=rtol, atol=rtol) for n in found)


@pytest.mark.parametrize("recipe", ["Float8CurrentScaling"], indirect=True)
def test_control_step_restores_outdated_main_weights(
    te: Any, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "a", build(te, recipe, seed=0))
    model, optimizers = trained(te, recipe, "fused")
    before = values(model)
    monkeypatch.setattr(loading, "optimizers_with_stale_main_weights", lambda owned, given=None: [])
    checkpoint.load(tmp_path / "a", model)
    assert not close(values(model), before, 2**-3)
    step(model, optimizers, lr=0.0)
    assert close(values(model), before, 2**-3), "the step restores the previous weights"


@pytest.mark.parametrize("recipe", ["MXFP8BlockScaling"], indirect=True)
def test_main_weights_follow_loaded_weights_only(te: Any, recipe: Any, tmp_path: Path) -> None:
    """Cover an optimizer that was not passed, skipped weights, and an optimizer without state."""
    source = build(te, recipe, seed=0)
    checkpoint.save(tmp_path / "a", nn.Sequential(source[0]), fused(source, source[0].parameters()))
    model, (first, second) = trained(te, recipe, "two")
    idle = fused(model)
    mains = {name: second.state[p][MAIN].clone() for name, p in model[1].named_parameters()}
    left = values(model[1])
    loaded = checkpoint.load(tmp_path / "a", model, first, strict=False)
    assert not idle.state and len(loaded.left) >= 2
    for name, parameter in model[1].named_parameters():
        assert torch.equal(second.state[parameter][MAIN], mains[name]), "its weight was not loaded"
    step(model, [first, second], lr=0.0)
    assert_same(values(model[1]), left)
    assert_same(values(model[0]), values(source[0]))


@pytest.mark.parametrize("recipe", ["bf16"], indirect=True)
def test_load_finds_frozen_wrapped_and_failed_optimizers(te: Any, recipe: Any, tmp_path: Path) -> None:
    """Cover gc.freeze(), wrappers, and main parameters that a failed step has left in the param groups."""
    model, (optimizer,) = trained(te, recipe, "adamw")
    other = torch.optim.SGD(model.parameters(), lr=1.0)  # which has never stepped
    assert {*optimizers_of(model.parameters())} == {optimizer, other}
    del other
    gc.collect()
    checkpoint.save(tmp_path / "a", build(te, recipe, seed=0))

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        @property
        def param_groups(self) -> Any:
            return self.inner.param_groups

    wrapper = Wrapper(optimizer)
    assert optimizers_of(model.parameters()) == [optimizer] and wrapper.inner is optimizer
    assert optimizers_of(build(te, recipe, seed=0).parameters()) == []
    gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        assert optimizers_of(model.parameters()) == [optimizer]
        # Nothing else was put aside for good: models and process groups would never be freed.
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()
    hook = optimizer.register_step_pre_hook(_stop)
    with pytest.raises(RuntimeError, match="stopped"):
        step(model, [optimizer])
    hook.remove()
    assert optimizer.param_groups[0]["params"][0] is not next(model.parameters())
    checkpoint.load(tmp_path / "a", model)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    now = values(model)
    step(model, [optimizer], lr=0.0)
    assert_same(values(model), now)


class Accelerated(torch.optim.Optimizer):
    """Like accelerate's wrapper: an object with the state and param groups of the inner optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, name: str = "optimizer") -> None:
        self.__dict__[name] = self.__dict__["_held"] = optimizer

    state: Any = property(lambda self: self._held.state)
    param_groups: Any = property(lambda self: self._held.param_groups)
    defaults: Any = property(lambda self: self._held.defaults)


@pytest.mark.parametrize("recipe", ["bf16", "Float8CurrentScaling"], indirect=True)
@pytest.mark.parametrize("kind", ["fused", "adamw"])
def test_load_unwraps_optimizers_and_loads_main_weights(
    te: Any, recipe: Any, kind: str, tmp_path: Path
) -> None:
    """Main weights are loaded instead of derived from the weights. Negative control: derived main weights differ."""
    source, (optimizer,) = trained(te, recipe, kind)
    checkpoint.save(tmp_path / "a", source, Accelerated(optimizer))
    checkpoint.load(tmp_path / "a", source, optimizer)  # under the class of the one within
    expected = [state[MAIN] for state in optimizer.state.values()]
    for steps in (0, 2):
        model = build(te, recipe, seed=2)
        (own,) = OPTIMIZERS[kind](model)
        for _ in range(steps):
            step(model, [own])
        loaded = checkpoint.load(tmp_path / "a", model, Accelerated(Accelerated(own)))
        assert not [note for note in loaded.notes if "not passed" in note]
        results = [state[MAIN] for state in own.state.values()]
        assert len(results) == len(expected) and all(map(torch.equal, results, expected))
    checkpoint.load(tmp_path / "a", model)
    assert not any(map(torch.equal, (state[MAIN] for state in own.state.values()), expected))
    scaled = fused(source, master_weight_dtype=torch.float16)
    with pytest.raises(te_fsdp.TeFsdpError, match="FusedAdam: state kept with a scale per shard"):
        checkpoint.save(tmp_path / "b", source, Accelerated(scaled))
    with pytest.raises(
        te_fsdp.TeFsdpError, match="LBFGS: state of all parameters in one vector.*model alone"
    ):
        checkpoint.save(tmp_path / "b", source, torch.optim.LBFGS(source.parameters()))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("recipe", ["bf16"], indirect=True)
def test_load_through_an_opaque_wrapper_restores_main_weights(te: Any, recipe: Any, tmp_path: Path) -> None:
    """The wrapper shares the state of the inner optimizer, so both count as one optimizer."""
    source, (optimizer,) = trained(te, recipe, "fused")
    checkpoint.save(tmp_path / "a", source, Accelerated(optimizer, "hidden"))
    model, (own,) = trained(te, recipe, "fused")
    step(model, [own])
    checkpoint.load(tmp_path / "a", model, Accelerated(own, "hidden"))
    result, expected = ([state[MAIN] for state in item.state.values()] for item in (own, optimizer))
    assert all(map(torch.equal, result, expected))


def _stop(*args: Any, **how: Any) -> None:
    raise RuntimeError("stopped")
