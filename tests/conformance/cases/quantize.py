"""Quantization: each stored or dequantized value, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.case import Case, Outputs
from tests.conformance.inputs import PATTERNS, Env

Make = Callable[[Env], Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = ("e4m3", "e5m2")


def delayed(env: Env, fp8: str, scale: float = 3.5, amax: float = 0.0, **usage: bool) -> Any:
    """Return a delayed-scaling quantizer with this scale."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    tensors = (torch.full((1,), value, device=env.device) for value in (scale, amax))
    return Float8Quantizer(*tensors, env.fp8(fp8), **usage)


def current(env: Env, fp8: str, **options: Any) -> Any:
    """Return a current-scaling quantizer."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    return Float8CurrentScalingQuantizer(env.fp8(fp8), torch.device(env.device), **options)


def block(env: Env, fp8: str, dims: int, pow2: bool, epsilon: float = 0.0) -> Any:
    """Return a block-scaling quantizer: 1 x 128 (`dims` 1) or 128 x 128."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    return Float8BlockQuantizer(
        env.fp8(fp8),
        rowwise=True,
        columnwise=True,
        amax_epsilon=epsilon,
        force_pow_2_scales=pow2,
        block_scaling_dim=dims,
    )


def formats() -> Iterator[tuple[str, tuple[int, int], Make]]:
    """Yield name, a shape with several blocks, and the quantizer of every format."""
    for fp8 in FP8:
        for scale in (3.5, 0.25, 1000.0):
            yield (
                f"delayed/{fp8}/scale{scale}",
                (48, 80),
                lambda env, fp8=fp8, scale=scale: delayed(env, fp8, scale),
            )
        for name, options in {
            "plain": {},
            "pow2": {"force_pow_2_scales": True},
            "epsilon": {"amax_epsilon": 64.0},
            "pow2_epsilon": {"force_pow_2_scales": True, "amax_epsilon": 48.0},
        }.items():
            yield (
                f"current/{fp8}/{name}",
                (48, 80),
                lambda env, fp8=fp8, options=options: current(env, fp8, **options),
            )
        for dims in (1, 2):
            for name, pow2, epsilon in (("plain", False, 0.0), ("pow2", True, 0.0), ("epsilon", False, 8.0)):
                yield (
                    f"block{dims}d/{fp8}/{name}",
                    (144, 272),
                    lambda env, fp8=fp8, dims=dims, pow2=pow2, epsilon=epsilon: block(
                        env, fp8, dims, pow2, epsilon
                    ),
                )


def read(quantized: Any, quantizer: Any, name: str = "q") -> Outputs:
    """Return a quantized tensor, what it dequantizes to, and the amax that delayed scaling has recorded."""
    outputs = {name: quantized, f"{name}_back": quantized.dequantize()}
    if hasattr(quantizer, "scale") and hasattr(quantizer, "amax"):
        outputs[f"{name}_amax"] = quantizer.amax
    return outputs


def _quantize(
    make: Make, shape: tuple[int, ...], dtype: torch.dtype, pattern: str
) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        quantizer = make(env)
        return read(quantizer(env.x(1, shape, dtype, pattern)), quantizer)

    return run


def _dequantize(make: Make, shape: tuple[int, ...], otype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        return {"back": make(env)(env.x(2, shape, torch.float32, "heavy")).dequantize(dtype=otype)}

    return run


def _update(make: Make, shape: tuple[int, ...], noop: float | None) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        quantizer = make(env)
        quantized = quantizer(env.x(3, shape, torch.bfloat16))
        flag = None if noop is None else torch.full((1,), noop, device=env.device)
        quantizer.update_quantized(env.x(4, shape, torch.float32, by=3), quantized, noop_flag=flag)
        return read(quantized, quantizer)

    return run


def _one_direction(make: Make, shape: tuple[int, ...], rowwise: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        quantizer = make(env)
        quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
        return {"q": quantizer(env.x(5, shape, torch.bfloat16))}

    return run


def _full(format_name: str) -> bool:
    return format_name.split("/")[2] in ("plain", "pow2", "scale3.5")


def cases() -> Iterator[Case]:
    """Yield formats x dtypes x patterns, then shapes, output dtypes, updates, directions."""
    for name, shape, make in formats():
        for dtype_name, dtype in DTYPES.items():
            for pattern in (
                PATTERNS if _full(name) and dtype_name != "fp16" else ("normal", "special", "tiny")
            ):
                yield Case(f"quantize/{name}/{dtype_name}/{pattern}", _quantize(make, shape, dtype, pattern))
        if not _full(name):
            continue
        for odd in ((7, 33), (1, 16), (130, 48), (3, 5, 32), (96,), (0, 64), (64, 0), (257, 129), (16, 1040)):
            label = "x".join(map(str, odd))
            for dtype_name in ("fp32", "bf16"):
                run = _quantize(make, odd, DTYPES[dtype_name], "normal")
                yield Case(f"quantize/{name}/{dtype_name}/shape{label}", run)
        for dtype_name, dtype in DTYPES.items():
            yield Case(f"quantize/{name}/dequantize_{dtype_name}", _dequantize(make, shape, dtype))
        for noop in (None, 0.0, 1.0):
            yield Case(f"quantize/{name}/update_noop_{noop}", _update(make, shape, noop))
        for rowwise in (True, False):
            label = "rowwise" if rowwise else "columnwise"
            yield Case(f"quantize/{name}/only_{label}", _one_direction(make, shape, rowwise))
