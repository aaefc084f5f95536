"""Functions of the extension around quantization: transposes, bias gradients, lists of tensors, amax."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tests.conformance.case import Bound, Case, Outputs
from tests.conformance.cases.quantize import DTYPES, Make, formats, read
from tests.conformance.inputs import PATTERNS, Env

ROWS = 48
BGRAD = Bound(
    relative=2**-7,
    absolute=ROWS * 2**-23,
    why="sum of the rows in fp32 in a different order: each addition errs by 2^-24 of a partial sum, and no partial "
    "sum is larger than a few times the largest result; then one rounding to bf16 each (2^-8 is one ulp)",
)


def _bgrad(make: Make, dtype: torch.dtype) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        quantizer = make(env)
        dbias, quantized = env.tex.bgrad_quantize(env.x(11, (ROWS, 160), dtype), quantizer)
        return {"dbias": dbias, **read(quantized, quantizer)}

    return run


def _split(make: Make, bulk: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        quantizers = [make(env) for _ in range(3)]
        x = env.x(12, (160, 144), torch.bfloat16, "heavy")
        options = {} if bulk else {"disable_bulk_allocation": True}
        parts = env.tex.split_quantize(x, [32, 0, 128], quantizers, **options)
        return {f"part{index}": part for index, part in enumerate(parts)}

    return run


def _list(make: Make) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        tensors = [
            env.x(13 + i, shape, torch.bfloat16) for i, shape in enumerate([(32, 64), (16, 128), (48, 16)])
        ]
        return {
            f"q{i}": q
            for i, q in enumerate(env.tex.multi_tensor_quantize(tensors, [make(env) for _ in tensors]))
        }

    return run


def _transpose(shape: tuple[int, ...], named: bool) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        x = env.x(14, shape, torch.bfloat16)
        data = (x * 7).to(torch.float8_e4m3fn).view(torch.uint8)
        out = torch.zeros([shape[-1], *shape[:-1]], dtype=torch.uint8, device=env.device)
        kind, new = env.fp8("e4m3"), {"out": None} if named else {}
        return {
            "new": env.tex.fp8_transpose(data, kind, **new),
            "out": env.tex.fp8_transpose(data, kind, out=out),
        }

    return run


def _amax(dtype: torch.dtype, pattern: str) -> Callable[[Env], Outputs]:
    def run(env: Env) -> Outputs:
        amax = torch.full((1,), 0.125, device=env.device)
        env.tex.compute_amax(env.x(15, (37, 41), dtype, pattern), amax)
        return {"amax": amax}

    return run


def cases() -> Iterator[Case]:
    """Yield one case per function for every format."""
    for name, _, make in formats():
        if name.split("/")[2] not in ("plain", "pow2", "scale3.5"):
            continue
        for dtype in ("fp32", "bf16"):
            yield Case(f"cast/bgrad/{name}/{dtype}", _bgrad(make, DTYPES[dtype]), bounds=(("dbias", BGRAD),))
        yield Case(f"cast/split/{name}", _split(make, bulk=True))
        yield Case(f"cast/split_one_by_one/{name}", _split(make, bulk=False))
        yield Case(f"cast/list/{name}", _list(make))
    for shape in ((32, 48), (7, 33), (3, 4, 16), (1, 16)):
        for named in (False, True):  # `out` must be given, be it None
            label = f"cast/transpose{'_out' if named else ''}/{'x'.join(map(str, shape))}"
            yield Case(label, _transpose(shape, named))
    for dtype in DTYPES:
        for pattern in PATTERNS:
            yield Case(f"cast/amax/{dtype}/{pattern}", _amax(DTYPES[dtype], pattern))
