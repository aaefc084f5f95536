"""Bodies: trained biases whose weight is frozen."""

from __future__ import annotations

from typing import Any

import harness
import torch
from torch import nn

from quantization.te_faults import recipe_of


class Chain(nn.Sequential):
    """One module. Experts get half of the tokens each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x, [16, 16]) if type(self[0]).__name__.endswith("GroupedLinear") else self[0](x)


def untrained_parameters_of_stock_te(kind: str, recipe: str) -> list[str]:
    """Return the trained parameters of a stock module that get no gradient, or zeros."""
    model = _model(kind, harness.device_type())
    _forward(model, kind, recipe).float().square().mean().backward()
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]


def sharded(kind: str, recipe: str, late: bool) -> dict[str, Any]:
    """Return the error of a training forward, and whether the model trains after its fix."""
    import te_fsdp

    model = _model(kind, "meta", frozen=not late)
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()))
    te_fsdp.materialize(model, seed=1)
    text = ""
    if late:
        _forward(model, kind, recipe).float().square().mean().backward()
        _freeze(model)
    try:
        _forward(model, kind, recipe).float().square().mean().backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layer_norm" in name or "fc1_bias" in name)
        if kind not in ("Linear", "GroupedLinear"):
            _forward(model, kind, recipe).float().square().mean().backward()
    return {"error": text, "trained": any(p.grad is not None for p in model.parameters())}


def _model(kind: str, device: str, frozen: bool = True) -> nn.Module:
    import transformer_engine.pytorch as te

    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
    sizes = {"GroupedLinear": (2, 32, 32), "LayerNormMLP": (32, 64), "TransformerLayer": (32, 64, 2)}
    model = Chain(getattr(te, kind)(*sizes.get(kind, (32, 32)), **options))
    if frozen:
        _freeze(model)
    return model


def _freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or "layer_norm" in name)


def _forward(model: nn.Module, kind: str, recipe: str) -> torch.Tensor:
    import transformer_engine.pytorch as te

    torch.manual_seed(2)
    shape = (32, 2, 32) if kind == "TransformerLayer" else (32, 32)
    x = torch.randn(shape, device=harness.device(), dtype=torch.bfloat16, requires_grad=True)
    used = None if recipe == "none" else recipe_of(recipe)
    with te.autocast(enabled=used is not None, recipe=used):
        return model(x)


class Branches(nn.Module):
    """Two modules, of which a forward uses those that it is given."""

    def __init__(self, **options: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.first = te.Linear(32, 32, **options)
        self.second = te.Linear(32, 32, **options)

    def forward(self, x: torch.Tensor, second: bool = False, without: bool = False) -> torch.Tensor:
        x = self.first(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not without):
            extra = self.second(x) if second or without else 0
        return x + extra


def errors_of_unneeded_gradients(case: str) -> list[str]:
    """Return the errors of forwards whose biases get a gradient, or need none."""
    import te_fsdp

    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": harness.device_type()}
    torch.manual_seed(1)
    if case == "parts":
        options["parameters_split"] = {"query_": 16, "key_": 16}
    model = Branches(**options)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("query_weight" not in name and name != "second.weight")
    te_fsdp.fully_shard(model, te_fsdp.Meshes.build(dp_shard=2, device_type=harness.device_type()))
    x = torch.randn(32, 32, device=harness.device(), dtype=torch.bfloat16, requires_grad=True)
    texts = []
    try:
        model(x, second=case == "parts", without=case == "no gradients").float().square().mean().backward()
        if case == "evaluated":
            model.eval()
            with torch.no_grad():
                model(x, second=True)
        elif case == "trained again":
            model.second.weight.requires_grad_(True)
            model(x, second=True).float().square().mean().backward()
        elif case == "parts":
            texts += [n for n, p in model.named_parameters() if "bias" in n and not p.grad.to_local().any()]
    except Exception as error:
        texts.append(f"{type(error).__name__}: {error}")
    return texts
