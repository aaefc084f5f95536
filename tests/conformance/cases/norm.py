"""Normalization layers: forward, backward, quantized outputs, gamma around zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.case import EXACT, Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES, Make, block, current, delayed
from tests.conformance.inputs import Env

EPS = 1e-5
STATISTICS = Bound(2**-20, 2**-20, why="sums over a row in fp32 in a different order, rsqrt to 2 ulp")
#: The result after one rounding; sums over up to 1024 fp32 values before it.
OUTPUT = {
    torch.float32: Bound(2**-20, 2**-21, why="a few fp32 operations and a row sum in a different order"),
    torch.bfloat16: Bound(2**-7, 2**-18, why="as fp32, then one rounding each: one ulp of bf16"),
    torch.float16: Bound(2**-10, 2**-18, why="as fp32, then one rounding each: one ulp of fp16"),
}
NEAR = Bound(
    steps=1, share=0.002, why="values next to a rounding boundary of FP8, after fp32 in a different order"
)
SCALE = Bound(2**-7, 0.0, why="the scale follows the largest value, which may differ by one rounding")


def _x(env: Env, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = env.x(61, shape, dtype)
    return x, env.x(62, shape[1:], dtype, by=-1), env.x(63, shape[1:], dtype), env.x(64, shape, dtype)


def _forward(
    env: Env, layer: bool, x: torch.Tensor, gamma: Any, beta: Any, quantizer: Any, centered: bool
) -> list:
    kind = env.te_dtypes[x.dtype]
    if layer:
        return env.tex.layernorm_fwd(x, gamma, beta, EPS, None, quantizer, kind, 0, centered)
    return env.tex.rmsnorm_fwd(x, gamma, EPS, None, quantizer, kind, 0, centered)


def _plain(
    layer: bool, shape: tuple[int, int], dtype: torch.dtype, centered: bool
) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x, gamma, beta, dz = _x(env, shape, dtype)
        y, mu, rsigma = _forward(env, layer, x, gamma, beta, None, centered)
        if layer:
            dx, dgamma, dbeta = env.tex.layernorm_bwd(dz, x, mu, rsigma, gamma, 0, centered)
            return {"y": y, "mu": mu, "rsigma": rsigma, "dx": dx, "dgamma": dgamma, "dbeta": dbeta}
        dx, dgamma = env.tex.rmsnorm_bwd(dz, x, rsigma, gamma, 0, centered)
        return {"y": y, "rsigma": rsigma, "dx": dx, "dgamma": dgamma}

    return run


def _add(shape: tuple[int, int], dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x, gamma, _, dz = _x(env, shape, dtype)
        _, _, rsigma = _forward(env, False, x, gamma, None, None, False)
        add = env.x(65, shape, dtype)
        dx, dgamma = env.tex.rmsnorm_bwd_add(dz, x, add, rsigma, gamma, 0, False)
        return {"dx": dx, "dgamma": dgamma}

    return run


def _quantized(
    layer: bool, make: Make, dtype: torch.dtype, shape: tuple[int, int]
) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x, gamma, beta, _ = _x(env, shape, dtype)
        quantizer = make(env)
        y, _, rsigma = _forward(env, layer, x, gamma, beta, quantizer, False)
        amax = quantizer.amax if hasattr(quantizer, "scale") else None
        return {"y": y, "amax": amax, "rsigma": rsigma}

    return run


def quantizers() -> dict[str, Make]:
    """Return the formats whose quantization a kernel may have fused."""
    return {
        "delayed": lambda env: delayed(env, "e4m3", 16.0),
        "delayed_e5m2": lambda env: delayed(env, "e5m2", 16.0),
        "current": lambda env: current(env, "e4m3"),
        "current_pow2": lambda env: current(env, "e4m3", force_pow_2_scales=True),
        "block1d": lambda env: block(env, "e4m3", 1, pow2=False),
        "block2d": lambda env: block(env, "e4m3", 2, pow2=True),
    }


def near(name: str, output: str = "y") -> tuple[tuple[str, Bound], ...]:
    """Return bounds of a quantized output."""
    scale = EXACT if name.startswith("delayed") else SCALE
    codes = tuple(
        (f"{output}.{part}", NEAR) for part in ("data", "transpose", "rowwise_data", "columnwise_data")
    )
    scales = tuple(
        (f"{output}.{part}", scale) for part in ("scale_inv", "rowwise_scale_inv", "columnwise_scale_inv")
    )
    return (*codes, *scales, ("amax", SCALE))


def cases() -> Iterator[Case]:
    """Yield widths with a tuned kernel (1024) and without, odd ones too."""
    gradients = {
        torch.float32: Bound(2**-16, 2**-18, why="two row sums in fp32 in a different order"),
        torch.bfloat16: Bound(2**-7, 2**-16, why="as fp32, then one rounding each"),
        torch.float16: Bound(2**-10, 2**-16, why="as fp32, then one rounding each"),
    }
    for layer in (True, False):
        norm = "layernorm" if layer else "rmsnorm"
        for dtype_name, dtype in DTYPES.items():
            limits = (
                ("y", OUTPUT[dtype]),
                ("mu", STATISTICS),
                ("rsigma", STATISTICS),
                *((item, gradients[dtype]) for item in ("dx", "dgamma", "dbeta")),
            )
            for shape in ((24, 64), (9, 1024), (5, 83), (17, 272)):
                for centered in (False, True):
                    label = f"norm/{norm}/{dtype_name}/{shape[0]}x{shape[1]}/{'centered' if centered else 'plain'}"
                    yield Case(label, _plain(layer, shape, dtype, centered), bounds=limits)
            if not layer:
                yield Case(f"norm/rmsnorm_add/{dtype_name}", _add((24, 64), dtype), bounds=limits)
            for name, make in quantizers().items():
                for shape in ((32, 144), (16, 1024)):
                    label = f"norm/{norm}/{dtype_name}/{name}/{shape[0]}x{shape[1]}"
                    run = _quantized(layer, make, dtype, shape)
                    yield Case(label, run, bounds=(*near(name), ("rsigma", STATISTICS)))
