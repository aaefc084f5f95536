"""Kernels over lists of tensors, called as in an optimizer or in gradient clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES
from tests.conformance.inputs import Env

SHAPES = ((33, 7), (1,), (64, 80), (4096,))
CHUNK = 2048 * 32
SUM = Bound(2**-18, 0.0, why="a sum of positive fp32 numbers in a different order, then a square root")


def _lists(env: Env, dtype: torch.dtype, pattern: str) -> list[torch.Tensor]:
    return [env.x(300 + i, shape, dtype, pattern) for i, shape in enumerate(SHAPES)]


def _flag(env: Env) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=env.device)


def _scale(source: torch.dtype, target: torch.dtype, pattern: str, tensor: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        flag, inputs = _flag(env), _lists(env, source, pattern)
        outputs = [torch.zeros(item.shape, dtype=target, device=env.device) for item in inputs]
        if tensor:
            factor = torch.full((1,), 0.3, device=env.device)
            env.tex.multi_tensor_scale_tensor(CHUNK, flag, [inputs, outputs], factor)
        else:
            env.tex.multi_tensor_scale(CHUNK, flag, [inputs, outputs], 0.3)
        return {"flag": flag, **{f"y{i}": item for i, item in enumerate(outputs)}}

    return run


def _norm(dtype: torch.dtype, pattern: str, each: bool, unscale: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        flag, inputs = _flag(env), _lists(env, dtype, pattern)
        if unscale:
            factor = torch.full((1,), 0.125, device=env.device)
            total, norms = env.tex.multi_tensor_unscale_l2norm(CHUNK, flag, [inputs], factor, each)
        else:
            total, norms = env.tex.multi_tensor_l2norm(CHUNK, flag, [inputs], each)
        return {"flag": flag, "total": total, "norms": norms if each else None}

    return run


def _scales(pow2: bool, epsilon: float) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        import numpy as np

        values = [1.0, 0.37, 0.0, 448.0, 1e-38, 1e-45, 3e38, float("inf"), float("nan"), 5.1e-36]
        amax = [env.put(np.float32([value])) for value in values]
        scale, inverse = ([torch.full((1,), 7.0, device=env.device) for _ in values] for _ in range(2))
        lists = [amax, scale, inverse]
        env.tex.multi_tensor_compute_scale_and_scale_inv(CHUNK, _flag(env), lists, 448.0, pow2, epsilon)
        return {"scale": torch.cat(scale), "inverse": torch.cat(inverse)}

    return run


def _sgd(dtype: torch.dtype, nesterov: bool, first: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        grads, params = _lists(env, dtype, "normal"), [env.x(320 + i, s, dtype) for i, s in enumerate(SHAPES)]
        momenta = [env.x(330 + i, shape, dtype) for i, shape in enumerate(SHAPES)]
        options = (0.01, 0.9, 0.0 if nesterov else 0.1, 0.05, nesterov, first, False, 0.5)
        env.tex.multi_tensor_sgd(CHUNK, _flag(env), [grads, params, momenta], *options)
        outputs = {f"p{i}": item for i, item in enumerate(params)}
        return {**outputs, **{f"m{i}": item for i, item in enumerate(momenta)}}

    return run


def cases() -> Iterator[Case]:
    """Scale, norms, scales of amaxes, SGD."""
    for source in DTYPES:
        for target in dict.fromkeys((source, "fp32")):
            for pattern in ("normal", "special"):
                for tensor in (False, True):
                    label = f"multi_tensor/scale{'_tensor' if tensor else ''}/{source}_{target}/{pattern}"
                    yield Case(label, _scale(DTYPES[source], DTYPES[target], pattern, tensor))
        for pattern in ("normal", "special", "heavy"):
            for each in (False, True):
                for unscale in (False, True):
                    label = f"multi_tensor/{'unscale_' if unscale else ''}l2norm/{source}/{pattern}/"
                    run = _norm(DTYPES[source], pattern, each, unscale)
                    yield Case(label + ("each" if each else "total"), run, SUM, bounds=(("flag", Bound()),))
    for pow2 in (False, True):
        for epsilon in (0.0, 0.5):
            yield Case(f"multi_tensor/scales/pow2_{pow2}/epsilon_{epsilon}", _scales(pow2, epsilon))
    limit = Bound(2**-21, 2**-22, why="a handful of fp32 operations, fused or not")
    for nesterov in (False, True):
        for first in (False, True):
            yield Case(
                f"multi_tensor/sgd/nesterov_{nesterov}/first_{first}",
                _sgd(torch.float32, nesterov, first),
                limit,
            )
