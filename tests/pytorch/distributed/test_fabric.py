"""The strategy for Lightning Fabric.

Each error names its fix. Fabric's options have their effects or raise.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from test_integrations import Refusals
from torch import nn

pytestmark = pytest.mark.skipif(
    not find_spec("lightning_fabric"), reason="make test-integrations installs lightning_fabric"
)


def build(device: str = "meta", **kwargs: Any) -> nn.Module:
    import transformer_engine.pytorch as te

    return nn.Sequential(te.Linear(16, 16, device=device, **kwargs), te.RMSNorm(16, device=device, **kwargs))


def launched(**options: Any) -> Any:
    from lightning_fabric import Fabric

    from te_fsdp.integrations.fabric import TeFsdpStrategy

    fabric = Fabric(devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=TeFsdpStrategy(seed=0), **options)
    fabric.launch()
    return fabric


def refusals(path: Path) -> dict[str, str]:
    """Map each case to the error that it raised."""
    from lightning_fabric.plugins.precision import MixedPrecision

    from te_fsdp.integrations.fabric import TeFsdpStrategy

    refusal_texts = Refusals()
    with refusal_texts.refused("keyword"):
        TeFsdpStrategy(unit=[nn.Linear])
    with refusal_texts.refused("precision"):
        launched(plugins=MixedPrecision("bf16-mixed", device="cpu"))
    fabric = launched()
    with refusal_texts.refused("together"):
        model = build()
        fabric.setup(model, torch.optim.SGD(build("cpu").parameters()))
    with refusal_texts.refused("optimizer first"):
        fabric.setup_optimizers(torch.optim.SGD(build("cpu").parameters()))
    with refusal_texts.refused("empty_init"), fabric.init_module(empty_init=True):
        fabric.setup_module(build("cpu"))
    model = fabric.setup_module(build())
    with refusal_texts.refused("stale optimizer"):
        fabric.setup_optimizers(torch.optim.SGD(build("cpu").parameters()))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters()))
    with refusal_texts.refused("clip_val"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    state = {"model": model, "optimizer": optimizer, "step": 1}
    with refusal_texts.refused("filter"):
        fabric.save(path / "a", state, filter={"model": lambda name, value: True})
    with refusal_texts.refused("two optimizers"):
        fabric.save(path / "a", state | {"second": optimizer})
    with refusal_texts.refused("no model"):
        fabric.save(path / "a", {"step": 1})
    assert not (path / "a").exists()
    fabric.save(path / "a", state)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fabric.save(path / "b", state | {"more": [1, 2]})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    changed = [parameter.detach().clone() for parameter in model.parameters()]
    with refusal_texts.refused("missing"):
        fabric.load(path / "a", state | {"more": 0})
    with refusal_texts.refused("weights_only"):
        fabric.load(path / "a", state, weights_only=False)
    with refusal_texts.refused("whole"):
        fabric.load(path / "a")
    assert all(map(torch.equal, changed, model.parameters())), "a refused load has changed the model"
    assert fabric.load(path / "b", state) == {"more": [1, 2]}
    assert all(map(torch.equal, before, model.parameters()))
    fabric.load(path / "a", state | {"more": 0}, strict=False)
    fabric.load_raw(path / "a", model)
    return dict(refusal_texts)


SAYS = {
    "keyword": "TypeError: got an unexpected keyword argument 'unit'",
    "precision": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    "together": "model = fabric.setup_module(model)",
    "optimizer first": "set up the model first",
    "empty_init": 'device="meta"',
    "stale optimizer": "3 of 3 parameters are not the model's",
    "clip_val": "max_norm=",
    "filter": "CheckpointError: Fabric.save(filter=...)",
    "two optimizers": "got 1 models and 2 optimizers",
    "no model": "got 0 models and 0 optimizers among step",
    "missing": "lacks more",
    "weights_only": "no pickled objects",
    "whole": "got 0 models and 0 optimizers among nothing",
}


@pytest.mark.ranks(2)
def test_unsupported_options_raise(pool, tmp_path):
    for refusal_texts in pool.run(refusals, 2, path=tmp_path):
        assert refusal_texts.keys() == SAYS.keys()
        for case, words in SAYS.items():
            assert words in refusal_texts[case], refusal_texts[case]


def precisions() -> dict[str, Any]:
    """Return the dtypes that reach the modules under Fabric's precisions, and the arguments of a sampler."""
    import transformer_engine.pytorch as te
    from lightning_fabric.plugins.precision import TransformerEnginePrecision
    from torch.utils.data import DataLoader
    from transformer_engine.common.recipe import Float8CurrentScaling
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    found: dict[str, Any] = {}
    recipe = Float8CurrentScaling()
    te_precision = TransformerEnginePrecision(
        weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=True
    )
    for name, options in (("half", {"precision": "bf16-true"}), ("te", {"plugins": te_precision})):
        fabric = launched(**options)
        model = fabric.setup_module(build() if name == "half" else nn.Sequential(nn.Linear(16, 16)))
        inner = model.module[0]
        assert isinstance(inner, te.Linear)
        seen = []
        inner.register_forward_pre_hook(
            lambda module, args, seen=seen: seen.append(
                (args[0].dtype, FP8GlobalStateManager.is_fp8_enabled())
            )
        )
        model(torch.ones(32, 16)).sum().backward()
        found[name] = [str(inner.weight.dtype), str(inner.weight.grad.dtype), str(seen[0][0]), seen[0][1]]
    loader = fabric.setup_dataloaders(DataLoader(torch.arange(8), batch_size=2))
    found["data"] = [batch.tolist() for batch in loader]
    return found


@pytest.mark.cpu
@pytest.mark.ranks(2)
def test_fabric_precisions_and_samplers(pool):
    half = ["torch.bfloat16"] * 3
    first, second = pool.run(precisions, 2)
    assert first["half"] == [*half, False]
    assert first["te"] == [*half, True]
    assert (first["data"], second["data"]) == ([[0, 2], [4, 6]], [[1, 3], [5, 7]])
