"""Every activation: forward, backward, bias gradient, quantized results."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.norm import near, quantizers
from tests.conformance.cases.quantize import DTYPES, Make
from tests.conformance.inputs import Env

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu", "clamped_swiglu")
SHAPE = (16, 64)
#: fp32 formulas with tanh, exp and a division: the GPU's tanhf and expf err by up to 2 ulp, sums with cancellation
#: (1 + tanh of a negative number) lose some bits relative to the result, but not relative to its largest value.
BOUNDS = {
    torch.float32: Bound(2**-20, 2**-22, why="tanh and exp of two libraries, cancellation in 1 + tanh"),
    torch.bfloat16: Bound(2**-7, 2**-21, why="as fp32, then one rounding each: one ulp of bf16"),
    torch.float16: Bound(2**-10, 2**-21, why="as fp32, then one rounding each: one ulp of fp16"),
}


def _backward_name(name: str) -> str:
    return "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"


def _inputs(env: Env, name: str, dtype: torch.dtype, pattern: str, rows: int, cols: int) -> tuple:
    x = env.x(71, (rows, cols), dtype, pattern, by=1)
    return x, env.x(72, (rows, cols if name in PLAIN else cols // 2), dtype)


def _plain(name: str, dtype: torch.dtype, pattern: str, with_bias: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x, grad = _inputs(env, name, dtype, pattern, *SHAPE)
        y = getattr(env.tex, name)(x, None)
        dx = getattr(env.tex, _backward_name(name))(grad, x, None)
        outputs = {"y": y, "dx": dx}
        if with_bias:  # the extension refuses this without a quantizer
            dbias, same = getattr(env.tex, f"dbias_d{name}")(grad, x, None)
            outputs |= {"dbias": dbias, "dx_with_bias": same}
        return outputs

    return run


def _quantized(name: str, make: Make, dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x, grad = _inputs(env, name, dtype, "normal", 32, 288)
        forward, backward = make(env), make(env)
        outputs = {
            "y": getattr(env.tex, name)(x, forward),
            "dx": getattr(env.tex, _backward_name(name))(grad, x, backward),
        }
        if hasattr(forward, "scale"):
            outputs |= {"amax": forward.amax, "dx_amax": backward.amax}
        return outputs

    return run


def _dbias_quantized(name: str, make: Make, dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x, grad = _inputs(env, name, dtype, "normal", 32, 144)
        quantizer = make(env)
        dbias, dx = getattr(env.tex, f"dbias_d{name}")(grad, x, quantizer)
        return {"dbias": dbias, "dx": dx}

    return run


def cases() -> Iterator[Case]:
    """Yield every activation in all dtypes, a few patterns and each format."""
    for name in PLAIN + GATED:
        for dtype_name, dtype in DTYPES.items():
            bound = BOUNDS[dtype]
            dbias = Bound(bound.relative, 16 * 2**-20, why="as the gradient, plus a sum over 16 rows")
            for pattern in ("normal", "special", "heavy"):
                run = _plain(name, dtype, pattern, with_bias=False)
                if name in PLAIN:
                    yield Case(f"activation/{name}/{dtype_name}/{pattern}/alone", run, bound)
                    run = _plain(name, dtype, pattern, with_bias=True)
                label = f"activation/{name}/{dtype_name}/{pattern}"
                yield Case(label, run, bound, bounds=(("dbias", dbias),))
        for label, make in quantizers().items():
            limits = (*near(label), *near(label, "dx"), ("dx_amax", BOUNDS[torch.bfloat16]))
            yield Case(
                f"activation/{name}/bf16/{label}", _quantized(name, make, torch.bfloat16), bounds=limits
            )
            if name in PLAIN:
                limits = (
                    *near(label, "dx"),
                    ("dbias", Bound(2**-7, 32 * 2**-20, why="sum over 32 rows, one rounding")),
                )
                run = _dbias_quantized(name, make, torch.bfloat16)
                yield Case(f"activation/dbias_{name}/bf16/{label}", run, bounds=limits)
