"""Scaled softmax kernels of unfused attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES
from tests.conformance.inputs import Env, whole

BOUNDS = {
    torch.bfloat16: Bound(
        2**-7, 2**-20, why="fp32 inside (exp to 2 ulp, a sum), one rounding each: one ulp of bf16"
    ),
    torch.float16: Bound(2**-9, 2**-12, why="as bf16; one ulp of fp16, and its subnormals below 2^-14"),
}
BACKWARD = {
    torch.bfloat16: Bound(
        2**-6, 2**-8, why="from results rounded on each side, g * p - p * sum(g * p) cancels"
    ),
    torch.float16: Bound(2**-9, 2**-11, why="as bf16, with ulps of fp16"),
}


def _softmax(name: str, dtype: torch.dtype, pattern: str) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        shape = (8, 32, 32) if "upper" in name else (2, 4, 16, 32)
        x, grad, extra = env.x(81, shape, dtype, pattern, by=2), env.x(82, shape, dtype), ()
        if name == "scaled_masked_softmax":
            mask = whole(83, (2, 1, 16, 32), 0, 2).astype(bool)
            mask[0, 0, 3] = True  # a row without any key
            extra = (env.put(mask),)
        y = getattr(env.tex, f"{name}_forward")(x, *extra, 0.3)
        # On the GPU the backward may write into its first argument.
        return {"y": y.clone(), "dx": getattr(env.tex, f"{name}_backward")(grad.clone(), y, 0.3)}

    return run


def cases() -> Iterator[Case]:
    """Yield the four kernels; they take 16-bit floats only."""
    for kind in ("", "_masked", "_upper_triang_masked", "_aligned_causal_masked"):
        name = f"scaled{kind}_softmax"
        for dtype in (torch.bfloat16, torch.float16):
            for pattern in ("normal", "ties", "zeros"):
                label = next(key for key, value in DTYPES.items() if value is dtype)
                run = _softmax(name, dtype, pattern)
                limits = (("y", BOUNDS[dtype]), ("dx", BACKWARD[dtype]))
                yield Case(f"softmax/{name}/{label}/{pattern}", run, bounds=limits)
