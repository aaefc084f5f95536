"""Whole modules, two steps forward and backward: the order of rounding between the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.inputs import Env

HIDDEN, ROWS = 128, 64
MODULES = (
    "linear",
    "layernorm_linear",
    "layernorm_mlp_gelu",
    "layernorm_mlp_swiglu",
    "grouped_linear",
    "layer",
)


def _recipe(name: str) -> Any:
    from transformer_engine.common import recipe

    return {
        "none": None,
        "delayed": recipe.DelayedScaling(amax_history_len=4, margin=1),
        "current": recipe.Float8CurrentScaling(),
        "block": recipe.Float8BlockScaling(),
    }[name]


def _build(env: Env, name: str) -> torch.nn.Module:
    te, options = env.te, {"params_dtype": torch.bfloat16, "device": env.device}
    if name == "linear":
        return te.Linear(HIDDEN, 2 * HIDDEN, **options)
    if name == "layernorm_linear":
        return te.LayerNormLinear(HIDDEN, 2 * HIDDEN, **options)
    if name == "layernorm_mlp_gelu":
        return te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options)
    if name == "layernorm_mlp_swiglu":
        return te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", normalization="RMSNorm", **options)
    if name == "grouped_linear":
        return te.GroupedLinear(2, HIDDEN, 2 * HIDDEN, **options)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, fuse_qkv_params=True, **dropout, **options)


def _fill(env: Env, module: torch.nn.Module) -> None:
    for index, (name, param) in enumerate(sorted(module.named_parameters())):
        by = -3 if param.dim() > 1 else -4
        value = env.x(500 + index, param.shape, torch.bfloat16, by=by)
        with torch.no_grad():
            param.copy_(value + 1 if "layer_norm_weight" in name else value)


def _run(name: str, recipe: str, quantized: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        te, chosen = env.te, _recipe(recipe)
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        init = te.quantized_model_init(enabled=True, recipe=chosen) if quantized else contextlib.nullcontext()
        with init:
            module = _build(env, name)
        _fill(env, module)
        shape = (16, 4, HIDDEN) if name == "layer" else (ROWS, HIDDEN)
        outputs: Outputs = {}
        for step in range(2):
            x = env.x(600 + step, shape, torch.bfloat16).requires_grad_()
            extra = ([32, 32],) if name == "grouped_linear" else ()
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                y = module(x, *extra)
            y.backward(env.x(610 + step, y.shape, torch.bfloat16, by=-3))
            outputs |= {f"y{step}": y, f"dx{step}": x.grad}
        for key, param in module.named_parameters():
            outputs[f"grad_{key}"] = param.grad
        return outputs

    return run


#: Share of the largest value of an output. One FP8 rounding that falls the other way moves a value by 2^-4 (E4M3) or
#: 2^-3 (E5M2) of itself, in a sum of at least 64 products; bf16 by 2^-8.
BOUNDS = {
    "none": Bound(2**-6, 2**-7, why="bf16 rounding of each intermediate result"),
    "delayed": Bound(2**-6, 2**-5, why="single FP8 roundings of intermediate results fall the other way"),
    "current": Bound(2**-6, 2**-5, why="single FP8 roundings of intermediate results fall the other way"),
    "block": Bound(2**-6, 2**-5, why="single FP8 roundings of intermediate results fall the other way"),
}


def cases() -> Iterator[Case]:
    """Modules x recipes x weights."""
    for name in MODULES:
        for recipe, bound in BOUNDS.items():
            for quantized in (False, True) if recipe != "none" else (False,):
                label = f"module/{name}/{recipe}" + ("/quantized" if quantized else "")
                yield Case(label, _run(name, recipe, quantized), bound)
