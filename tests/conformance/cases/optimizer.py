"""Steps of FusedAdam: its tensors after three steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES, current, delayed
from tests.conformance.inputs import Env

SHAPES = ((32, 48), (5, 7), (129,))
STEPS = 3
BOUNDS = {
    torch.float32: Bound(2**-20, 2**-22, why="a dozen fp32 operations a step, fused or not; three steps"),
    torch.bfloat16: Bound(2**-7, 2**-20, why="as fp32, then one rounding: one ulp of bf16"),
    torch.float16: Bound(2**-10, 2**-20, why="as fp32, then one rounding: one ulp of fp16"),
}
#: States kept in 8 or 16 bits are rounded in every step, so that an ulp of difference may become two.
COARSE = Bound(2**-5, 2**-6, why="moments rounded to 8 or 16 bits in every step, with a scale of their own")


def _step(env: Env, optimizer: Any, params: list[torch.nn.Parameter], dtype: torch.dtype) -> None:
    for step in range(STEPS):
        for index, param in enumerate(params):
            param.grad = env.x(200 + 10 * step + index, param.shape, dtype, by=-2)
        optimizer.step()


def _states(optimizer: Any, params: list[torch.nn.Parameter]) -> Outputs:
    outputs: Outputs = {}
    for index, param in enumerate(params):
        state = optimizer.state[param]
        for name in ("exp_avg", "exp_avg_sq", "master_param"):
            if state.get(name) is None:
                continue
            raw = name == "master_param" and state[name].dtype == torch.int16
            outputs[f"{name}{index}"] = (
                state[name] if raw else optimizer.get_unscaled_state(param, name).float()
            )
    return outputs


def _plain(dtype: torch.dtype, grad: torch.dtype, options: dict[str, Any]) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        params = [torch.nn.Parameter(env.x(90 + i, shape, dtype)) for i, shape in enumerate(SHAPES)]
        optimizer = env.te.optimizers.FusedAdam(params, lr=0.02, **{"weight_decay": 0.1, **options})
        _step(env, optimizer, params, grad)
        return {**{f"p{i}": p for i, p in enumerate(params)}, **_states(optimizer, params)}

    return run


def _main(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master weights from bf16 parameters and their remainders."""
    low = remainder.to(torch.int32)
    high = param.detach().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


def _whole(options: dict[str, Any]) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        params = [torch.nn.Parameter(env.x(90 + i, shape, torch.bfloat16)) for i, shape in enumerate(SHAPES)]
        optimizer = env.te.optimizers.FusedAdam(params, lr=0.02, weight_decay=0.1, **options)
        _step(env, optimizer, params, torch.bfloat16)
        return {f"main{i}": _main(p, optimizer.state[p]["master_param"]) for i, p in enumerate(params)}

    return run


def _fp8(kind: str) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        quantizers = [
            delayed(env, "e4m3", 64.0) if kind == "delayed" else current(env, "e4m3") for _ in range(2)
        ]
        shapes = ((32, 48), (16, 64))
        params = [
            torch.nn.Parameter(q(env.x(95 + i, shape, torch.bfloat16)))
            for i, (q, shape) in enumerate(zip(quantizers, shapes, strict=True))
        ]
        optimizer = env.te.optimizers.FusedAdam(params, lr=0.02, weight_decay=0.1, master_weights=True)
        _step(env, optimizer, params, torch.bfloat16)
        outputs = {f"p{i}": param.data for i, param in enumerate(params)}
        for index, quantizer in enumerate(quantizers):
            outputs[f"amax{index}"] = quantizer.amax if kind == "delayed" else None
        return {**outputs, **_states(optimizer, params)}

    return run


def _options() -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Name, parameter dtype, gradient dtype, options."""
    for dtype in DTYPES:
        yield "plain", dtype, dtype, {}
        yield "l2", dtype, dtype, {"adam_w_mode": False}
        yield "no_bias_correction", dtype, dtype, {"bias_correction": False}
        yield "capturable", dtype, dtype, {"capturable": True}
    for dtype in ("bf16", "fp16"):
        yield "master", dtype, dtype, {"master_weights": True}
        yield "master_l2", dtype, dtype, {"master_weights": True, "adam_w_mode": False}
        yield "master_capturable", dtype, dtype, {"master_weights": True, "capturable": True}
    remainders = {"master_weights": True, "store_param_remainders": True}
    yield "remainders", "bf16", "bf16", remainders
    yield "remainders_l2", "bf16", "bf16", {**remainders, "adam_w_mode": False}
    for name in ("bf16", "fp16"):
        moments = {"exp_avg_dtype": DTYPES[name], "exp_avg_sq_dtype": DTYPES[name]}
        yield f"moments_{name}", "bf16", "bf16", {"master_weights": True, **moments}
    yield "moments_uint8", "bf16", "bf16", {"master_weights": True, "exp_avg_dtype": torch.uint8}
    half = {"master_weights": True, "master_weight_dtype": torch.float16}
    yield "master_fp16", "bf16", "bf16", half


def cases() -> Iterator[Case]:
    """Yield modes of the optimizer, then quantized parameters."""
    fp32 = BOUNDS[torch.float32]
    for name, dtype, grad, options in _options():
        coarse = "moments" in name or name == "master_fp16"
        state = COARSE if coarse else fp32
        param = COARSE if coarse else BOUNDS[DTYPES[dtype]]
        if name.startswith("remainders"):
            state_limits = tuple((f"master_param{i}", REMAINDER) for i in range(3))
        else:
            state_limits = tuple((f"master_param{i}", state) for i in range(3))
        moments = tuple((f"{item}{i}", state) for item in ("exp_avg", "exp_avg_sq") for i in range(3))
        run = _plain(DTYPES[dtype], DTYPES[grad], options)
        yield Case(f"optimizer/{name}/{dtype}", run, param, bounds=(*state_limits, *moments))
    remainders = {"master_weights": True, "store_param_remainders": True}
    yield Case("optimizer/remainders_whole/bf16", _whole(remainders), fp32)
    near = Bound(steps=1, share=0.01, why="main weights next to a rounding boundary of FP8")
    for kind in ("delayed", "current"):
        codes = tuple((f"p{i}.{part}", near) for i in range(2) for part in ("data", "transpose"))
        yield Case(f"optimizer/fp8_{kind}", _fp8(kind), fp32, bounds=codes)


#: Low halves of fp32 numbers as int16: an ulp is 1, and many ulps where a parameter comes near zero. The whole
#: numbers are compared in their own case.
REMAINDER = Bound(0.0, 2**-7, why="2^-22 of a parameter of size 1 is 2^8 ulps of one of size 2^-10")
