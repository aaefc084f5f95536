"""Bookkeeping of delayed scaling, rotary embedding, row padding, swapped dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES
from tests.conformance.inputs import Env


def _amax_update(algo: str, fp8: str, margin: float, length: int) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        history = np.abs(env.x(401, (length, 6)).cpu().numpy())
        history[:, 1] = 0.0
        history[0, 2] = 0.0
        history[length // 2, 3] = np.inf
        if length > 1:
            history[-1, 4] = np.nan
        reduced = history[0].copy()
        reduced[0] = 9.0
        reduced[5] = 1e-44
        first, second = env.put(history), env.put(history[:, :2])
        scales = [torch.full((6,), 3.0, device=env.device), torch.full((2,), 3.0, device=env.device)]
        buffer = env.put(np.concatenate([reduced, reduced[:2]]))
        env.tex.fused_amax_and_scale_update_after_reduction(
            buffer, [first, second], scales, algo, env.fp8(fp8), margin
        )
        return {"history0": first, "history1": second, "scale0": scales[0], "scale1": scales[1]}

    return run


def _unused(algo: str) -> Callable[[Env], Outputs]:
    """Return a reduced amax of 0 with and without one in the history's own slot."""

    def run(env: Env) -> Outputs:
        values = np.float32([[0.5, 0.0, 0.25], [2.0, 1.0, np.nan], [0.125, 3.0, np.inf]])
        history, scale = env.put(values), torch.full((3,), 3.0, device=env.device)
        env.tex.fused_amax_and_scale_update_after_reduction(
            env.put(np.zeros(3, np.float32)), [history], [scale], algo, env.fp8("e4m3"), 0.0
        )
        return {"history": history, "scale": scale}

    return run


def _rope(
    layout: str, dtype: torch.dtype, interleaved: bool, start: bool, width: int
) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        from transformer_engine.pytorch.cpp_extensions.fused_attn import QKVFormat

        shape = (10, 2, 3, 32) if layout == "sbhd" else (2, 10, 3, 32)
        x, grad = env.x(411, shape, dtype), env.x(412, shape, dtype)
        freqs = env.x(413, (16, 1, 1, width), by=1)
        starts = env.put(np.int32([0, 5])) if start else None
        rest = (freqs, starts, QKVFormat[layout], interleaved, None, 1, 0)
        y = env.tex.fused_rope_forward(x, *rest)
        return {"y": y, "dx": env.tex.fused_rope_backward(grad, *rest)}

    return run


def _padding(dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x = env.x(421, (20, 24), dtype)
        padded = torch.full((48, 24), 7.0, dtype=dtype, device=env.device)
        env.tex.fused_multi_row_padding(x, padded, [5, 0, 15], [16, 0, 32])
        back = torch.full((20, 24), 7.0, dtype=dtype, device=env.device)
        env.tex.fused_multi_row_unpadding(padded, back, [16, 0, 32], [5, 0, 15])
        return {"padded": padded, "back": back}

    return run


def _swap(dtype: torch.dtype, shape: tuple[int, ...], named: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x = env.x(431, shape, dtype)
        swapped = [shape[1], shape[0], *shape[2:]]
        out = torch.zeros(swapped, dtype=dtype, device=env.device)
        new = {"out": None} if named else {}
        return {"new": env.tex.swap_first_dims(x, **new), "out": env.tex.swap_first_dims(x, out=out)}

    return run


def cases() -> Iterator[Case]:
    """Yield one case per function for the relevant dtypes and options."""
    for algo in ("max", "most_recent"):
        yield Case(f"bookkeeping/amax_unused/{algo}", _unused(algo))
        for fp8 in ("e4m3", "e5m2"):
            for margin, length in ((0.0, 4), (2.0, 4), (0.0, 1), (1.0, 1024)):
                label = f"bookkeeping/amax_update/{algo}/{fp8}/margin{margin:g}/history{length}"
                yield Case(label, _amax_update(algo, fp8, margin, length))
    limits = {
        torch.float32: Bound(0.0, 2**-21, why="sine and cosine of two libraries, two products and a sum"),
        torch.bfloat16: Bound(2**-7, 2**-21, why="as fp32, then one rounding each"),
    }
    for layout in ("sbhd", "bshd"):
        for dtype_name in ("fp32", "bf16"):
            for interleaved in (False, True):
                for start, width in ((False, 32), (True, 32), (False, 16)):
                    pairs = "interleaved" if interleaved else "halves"
                    label = f"bookkeeping/rope/{layout}/{dtype_name}/{pairs}/start_{start}/width{width}"
                    dtype = DTYPES[dtype_name]
                    yield Case(label, _rope(layout, dtype, interleaved, start, width), limits[dtype])
    for dtype_name, dtype in DTYPES.items():
        yield Case(f"bookkeeping/padding/{dtype_name}", _padding(dtype))
        for shape in ((4, 6, 8), (5, 7)):
            for named in (False, True):  # `out` must be given, be it None
                label = f"bookkeeping/swap_first_dims{'_out' if named else ''}"
                label += f"/{dtype_name}/{'x'.join(map(str, shape))}"
                yield Case(label, _swap(dtype, shape, named))
