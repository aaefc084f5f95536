"""Matrix products: layouts, operand formats, output dtypes, accumulation, epilogues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES, block, current, delayed
from tests.conformance.inputs import Env

M, N, K = 48, 32, 272
#: Names of operands: format of A, format of B.
FP8_PAIRS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))


def _operand(env: Env, name: str, fp8: str, seed: int, shape: tuple[int, int], weight: bool) -> Any:
    if name in DTYPES:
        return env.x(seed, shape, DTYPES[name])
    x = env.x(seed, shape, torch.bfloat16)
    if name == "delayed":
        return delayed(env, fp8, 16.0)(x)
    if name == "current":
        return current(env, fp8)(x)
    return block(env, fp8, 2 if weight else 1, pow2=name == "block_pow2")(x)


def _operands(env: Env, name: str, pair: tuple[str, str], layout: str) -> tuple[Any, Any]:
    a = _operand(env, name, pair[0], 21, (M, K) if layout[0] == "T" else (K, M), weight=layout != "NT")
    b = _operand(env, name, pair[1], 22, (K, N) if layout[1] == "T" else (N, K), weight=False)
    return a, b


def _product(name: str, pair: tuple[str, str], layout: str, out: torch.dtype, **options: Any) -> Callable:
    def run(env: Env) -> Outputs:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        a, b = _operands(env, name, pair, layout)
        given = dict(options)
        if given.get("accumulate"):
            given["out"] = env.x(23, (N, M), out)
        if "bias" in given:
            width = M
            given["bias"] = env.x(24, (width,), given["bias"])
        if given.pop("gelu_backward", False):
            given |= {"gelu": True, "grad": True, "gelu_in": env.x(25, (N, M), out)}
        result = general_gemm(a, b, out, layout=layout, **given)
        return dict(zip(("d", "dbias", "pre_gelu"), result[:3], strict=True))

    return run


def _quantized_output(name: str, fp8: str) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        a, b = _operands(env, name, ("e4m3", "e4m3"), "TN")
        quantizer = delayed(env, fp8, 2.0) if name == "delayed" else current(env, fp8)
        quantizer.set_usage(rowwise=True, columnwise=False)
        d = general_gemm(a, b, torch.bfloat16, quantization_params=quantizer, use_split_accumulator=True)[0]
        return {"d": d, "amax": getattr(quantizer, "amax", None)}

    return run


def _bgrad(name: str, dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        x, dy = env.x(26, (K, M), DTYPES[name]), env.x(27, (K, N), DTYPES[name])
        bias = env.x(28, (N,), DTYPES[name])
        dw, dbias, *_ = general_gemm(x, dy, dtype, layout="NT", grad=True, bias=bias)
        return {"d": dw, "dbias": dbias}

    return run


def _grouped(name: str, single: bool, accumulate: bool, dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        splits = [16, 0, 32]
        weights = [_operand(env, name, "e4m3", 30 + i, (M, K), True) for i in range(3)]
        inputs = [_operand(env, name, "e4m3", 40 + i, (rows, K), False) for i, rows in enumerate(splits)]
        if single:
            out = [env.x(50, (sum(splits), M), dtype)]
        else:
            out = [env.x(50 + i, (rows, M), dtype) for i, rows in enumerate(splits)]
        general_grouped_gemm(
            weights,
            inputs,
            out,
            [None] * 3,
            dtype,
            m_splits=splits,
            single_output=single,
            accumulate=accumulate,
            use_split_accumulator=True,
        )
        return {f"d{i}": item for i, item in enumerate(out)}

    return run


#: Tolerance for one rounding of the result: one ulp in each direction.
ULP = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def bound(name: str, out: torch.dtype, split: bool = True, accumulate: bool = False) -> Bound:
    """Bound a sum of K products of normal values, whose absolute values sum to about 3 times the largest result."""
    relative = ULP[out]
    if accumulate and out != torch.float32:
        return Bound(
            relative, relative, why="the product is rounded before the sum: an ulp of the largest product"
        )
    if name == "fp32":
        return Bound(
            relative, 3 * 2**-10, why="TransformerEngine multiplies fp32 in TF32: operands of 11 bits"
        )
    if name in ("bf16", "fp16"):
        return Bound(
            relative,
            3 * K * 2**-24,
            why="K additions in fp32 in a different order, one rounding of the result",
        )
    if split:
        return Bound(
            relative,
            3 * 2**-12,
            why="Hopper's FP8 tensor cores add products with 13 to 14 bits before each promotion to fp32",
        )
    return Bound(
        relative, 3 * 2**-10, why="without promotion the 13 to 14 bit accumulator is used for all of K"
    )


def cases() -> Iterator[Case]:
    """Yield layouts and formats, epilogues, groups, quantized results."""
    yield from _layouts()
    yield from _epilogues()
    yield from _quantized()


def _layouts() -> Iterator[Case]:
    for layout in ("TN", "NN", "NT"):
        for name in DTYPES:
            for out_name, out in DTYPES.items():
                if out_name not in (name, "fp32"):
                    continue
                label = f"gemm/{name}/{layout}/to_{out_name}"
                yield Case(label, _product(name, FP8_PAIRS[0], layout, out), bound(name, out))
                limit = bound(name, out, accumulate=True)
                yield Case(
                    label + "/accumulate", _product(name, FP8_PAIRS[0], layout, out, accumulate=True), limit
                )
        for name in ("delayed", "current", "block", "block_pow2"):
            for pair in FP8_PAIRS:
                for split in (True, False):
                    label = f"gemm/{name}/{'_'.join(pair)}/{layout}/{'split' if split else 'fast'}"
                    run = _product(name, pair, layout, torch.bfloat16, use_split_accumulator=split)
                    yield Case(label, run, bound(name, torch.bfloat16, split))
            run = _product(
                name, FP8_PAIRS[0], layout, torch.float32, use_split_accumulator=True, accumulate=True
            )
            yield Case(f"gemm/{name}/{layout}/to_fp32/accumulate", run, bound(name, torch.float32))


def _epilogues() -> Iterator[Case]:
    for name in ("fp32", "bf16", "delayed", "current", "block"):
        out = DTYPES.get(name, torch.bfloat16)
        bias = torch.float32 if name == "fp32" else torch.bfloat16
        limit = bound(name, out)
        options = {"use_split_accumulator": True}
        pair = FP8_PAIRS[0]
        yield Case(f"gemm/{name}/bias", _product(name, pair, "TN", out, bias=bias, **options), limit)
        yield Case(f"gemm/{name}/gelu", _product(name, pair, "TN", out, gelu=True, **options), limit)
        yield Case(
            f"gemm/{name}/bias_gelu", _product(name, pair, "TN", out, gelu=True, bias=bias, **options), limit
        )
        yield Case(
            f"gemm/{name}/dgelu", _product(name, pair, "NN", out, gelu_backward=True, **options), limit
        )
        for dtype in ("bf16", "fp32"):
            for kind, single, accumulate in (
                ("single", True, False),
                ("list", False, False),
                ("accumulate", False, True),
            ):
                label = f"gemm/{name}/grouped_{kind}" + ("" if dtype == "bf16" else "_fp32")
                run = _grouped(name, single, accumulate, DTYPES[dtype])
                yield Case(label, run, bound(name, DTYPES[dtype], accumulate=accumulate))
    for name in ("fp32", "bf16"):
        yield Case(f"gemm/{name}/bias_gradient", _bgrad(name, DTYPES[name]), bound(name, DTYPES[name]))


def _quantized() -> Iterator[Case]:
    delayed_codes = Bound(
        steps=48,
        share=0.02,
        why="the sums err by 3 * 2^-12 of the largest (about 60), which near zero is up to 45 neighbours of 2^-10",
    )
    current_codes = Bound(
        steps=2,
        share=0.1,
        why="one ulp of bf16 (2^-8) in the amax shifts the scale, and with it 2^-8 / 2^-4 of the codes by a step",
    )
    for name, codes in (("delayed", delayed_codes), ("current", current_codes)):
        for fp8 in ("e4m3", "e5m2"):
            amax = bound(name, torch.bfloat16)
            limits = (("d.data", codes), ("d.transpose", codes), ("d.scale_inv", amax), ("amax", amax))
            yield Case(f"gemm/{name}/quantized_{fp8}", _quantized_output(name, fp8), bounds=limits)
