"""Two training steps of complete modules: the order of rounding between the kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.inputs import Env

HIDDEN, ROWS = 128, 64


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


#: Share of the norm of an output. Single FP8 roundings fall the other way, since Hopper's FP8 products err by 2^-13 of
#: their largest value, and an unsharded tensor's do if its amax moves by an ulp of bf16. The emulation, with noise
#: of 2^-13.5 of the largest value on its FP8 products, moves as much: 2^-9 (one product), 2^-6 (three), 2^-3.4 (layer).
#: The bounds are twice that. Without FP8: bf16 roundings, also of PyTorch's own GELU gradient on the two devices.
PLAIN = Bound(norm=2**-6, why="bf16 rounding of each intermediate result")
FP8_BOUNDS = {
    "linear": Bound(norm=2**-8, why="twice the movement under noise as of Hopper's FP8 products"),
    "layernorm_linear": Bound(norm=2**-8, why="twice the movement under noise as of Hopper's FP8 products"),
    "grouped_linear": Bound(norm=2**-8, why="twice the movement under noise as of Hopper's FP8 products"),
    "layernorm_mlp_gelu": Bound(norm=2**-4, why="as linear, and an amax that moves by an ulp of bf16"),
    "layernorm_mlp_swiglu": Bound(norm=2**-4, why="as linear, and an amax that moves by an ulp of bf16"),
    "layer": Bound(norm=0.2, why="as linear, through four products and a softmax"),
}


def cases() -> Iterator[Case]:
    """Yield modules x recipes x weights."""
    for name, bound in FP8_BOUNDS.items():
        yield Case(f"module/{name}/none", _run(name, "none", False), PLAIN)
        for recipe in ("delayed", "current", "block"):
            yield Case(f"module/{name}/{recipe}", _run(name, recipe, False), bound)
            yield Case(f"module/{name}/{recipe}/quantized", _run(name, recipe, True), bound)
