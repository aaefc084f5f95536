"""Bodies: optimizer steps on stacked weights under tp, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import harness
import torch
from torch.distributed.tensor import DTensor

from plain_dcp.row_functions import FUNCTIONS

#: Functions of a weight whose results depend on the order of its rows, or not.
TRACED = ("mul", "view rows", "cumsum", "softmax", "minus mean", "diagonal")


def _model(meshes: Any) -> Any:
    import transformer_engine.pytorch as te

    import te_fsdp

    size = {"set_parallel_mode": True, "params_dtype": torch.float32, "device": "meta"}
    group = {"tp_group": meshes.tp.get_group(), "tp_size": 2}
    layer = te.LayerNormMLP(32, 64, activation="swiglu", bias=False, **size, **group)
    te_fsdp.fully_shard(layer, meshes)
    return te_fsdp.materialize(layer, seed=0)


def _batch(seed: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(harness.device())


def _train(name: str, foreach: bool, wrap: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """Train three steps; return the weights."""
    import te_fsdp

    torch._dynamo.reset()
    meshes = te_fsdp.Meshes.build(dp_shard=-1, tp=2, device_type=harness.device_type())
    model = _model(meshes)
    # Adam's epsilon, so that a compiled step may round differently where gradients are tiny.
    options = {"eps": 1e-2} if name == "AdamW" else {"momentum": 0.5}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, foreach=foreach, **options)
    step = wrap(optimizer)
    for number in range(3):
        model(_batch(number)).square().mean().backward()
        step()
        optimizer.zero_grad()
    return {name: harness.full(parameter) for name, parameter in model.named_parameters()}


WAYS: dict[str, Callable[[Any], Any]] = {
    "method": lambda optimizer: torch.compile(optimizer.step, backend="aot_eager"),
    "function": lambda optimizer: torch.compile(lambda: optimizer.step(), backend="aot_eager"),
}


def compiled(name: str, foreach: bool, way: str) -> list[str]:
    """Return the weights that differ from those of eager steps by more than rounding."""
    expected = _train(name, foreach, lambda optimizer: optimizer.step)
    found = _train(name, foreach, WAYS[way])
    # Compiled steps of Adam compute bias corrections as tensors. Steps are of 1e-2.
    far = {key: (found[key] - value).abs().max().item() for key, value in expected.items()}
    return [f"{key} by {distance:.1e}" for key, distance in far.items() if distance > 1e-6]


def traced() -> dict[str, str]:
    """Return whether each function of a stacked weight returns under torch.compile what it returns without."""
    import te_fsdp

    meshes = te_fsdp.Meshes.build(dp_shard=-1, tp=2, device_type=harness.device_type())
    weight = _model(meshes).fc1_weight.detach()
    assert weight.shape == (128, 32)
    found = {}
    for name in TRACED:
        torch._dynamo.reset()
        expected = FUNCTIONS[name](weight)
        try:
            result = torch.compile(FUNCTIONS[name], backend="aot_eager")(weight)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        full = [t.full_tensor() if isinstance(t, DTensor) else t for t in (expected, result)]
        found[name] = "equal" if torch.equal(*full) else "WRONG"
    return found


def calls_in_order() -> int:
    """Count calls of a later AdamW step that search for arguments in a different order of rows."""
    import te_fsdp
    from te_fsdp import boxed_dtensor

    meshes = te_fsdp.Meshes.build(dp_shard=-1, tp=2, device_type=harness.device_type())
    model = _model(meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    stock = boxed_dtensor.run_in_order
    for number in range(2):
        model(_batch(number)).square().mean().backward()
        with mock.patch.object(boxed_dtensor, "run_in_order", side_effect=stock) as called:
            optimizer.step()
        optimizer.zero_grad()
    return called.call_count
