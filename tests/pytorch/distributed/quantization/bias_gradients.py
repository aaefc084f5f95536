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


def stock(kind: str, recipe: str) -> list[str]:
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
