"""Cases of the conformance tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.conformance.inputs import Env

Outputs = dict[str, Any]
#: Modules of `tests.conformance.cases`, each with a function `cases()`.
KINDS = (
    "quantize",
    "cast",
    "gemm",
    "norm",
    "activation",
    "softmax",
    "optimizer",
    "multi_tensor",
    "bookkeeping",
    "module",
)


@dataclass(frozen=True)
class Bound:
    """Maximum difference between an output and the recorded one.

    No bound given: equal bit for bit (any NaN equals any NaN). `relative` is a share of each value, `absolute` a
    share of the largest finite value of the output. `steps` and `share` are for 8-bit floats: how many neighbours
    apart, and how large a share of the values may differ at all. `norm` is a share of the norm of the output, instead
    of the others. `why` is the source of the numbers.
    """

    relative: float = 0.0
    absolute: float = 0.0
    steps: int = 0
    share: float = 0.0
    norm: float = 0.0
    why: str = ""

    @property
    def exact(self) -> bool:
        """Return whether the output must be equal bit for bit."""
        return self.relative == self.absolute == self.norm == 0.0 and self.steps == 0


EXACT = Bound()


@dataclass(frozen=True)
class Case:
    """One or a few calls of TransformerEngine. `run(env)` returns the outputs by name."""

    name: str
    run: Callable[[Env], Outputs]
    bound: Bound = EXACT
    bounds: tuple[tuple[str, Bound], ...] = ()  # by output, where it differs from `bound`

    def bound_of(self, output: str) -> Bound:
        """Return the bound of one output; a name in `bounds` also covers its parts (`name.part`)."""
        for name, bound in self.bounds:
            if output == name or output.startswith(name + "."):
                return bound
        return self.bound

    @property
    def kind(self) -> str:
        """Return the first part of the name."""
        return self.name.split("/")[0]


def every_case() -> Iterator[Case]:
    """Yield all cases, kind by kind.

    Raises:
        ValueError: two cases have the same name.
    """
    seen: set[str] = set()
    for kind in KINDS:
        module = importlib.import_module(f"tests.conformance.cases.{kind}")
        for case in module.cases():
            if case.name in seen or case.kind != kind:
                raise ValueError(f"case {case.name!r} of {kind}: the name is taken, or of a different kind")
            seen.add(case.name)
            yield case


def run_case(case: Case, env: Env) -> tuple[dict[str, torch.Tensor], str]:
    """Return outputs on the CPU, and the digest of the inputs."""
    env.start()
    outputs: dict[str, torch.Tensor] = {}
    for name, value in case.run(env).items():
        for key, part in parts(name, value):
            outputs[key] = part.detach().cpu().contiguous()
    return outputs, env.digest()


def parts(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an output: of a quantized tensor, its bytes and the used part of its scales."""
    if value is None:
        return
    if hasattr(value, "_is_2D_scaled"):
        yield from _block_parts(name, value)
    elif hasattr(value, "_fp8_dtype"):
        for key in ("_data", "_transpose"):
            if getattr(value, key, None) is not None:
                yield name + "." + key[1:], getattr(value, key)
        held = [getattr(value, key, None) for key in ("_data", "_transpose")]
        if any(item is not None and item.numel() for item in held):
            yield name + ".scale_inv", value._scale_inv  # that of an empty tensor stays as it was allocated
    elif isinstance(value, torch.Tensor):
        yield name, value
    else:
        raise TypeError(f"output {name}: no tensor but {type(value).__name__}")


def _block_parts(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    def up(n: int) -> int:
        return -(-n // 128)

    for side in ("rowwise", "columnwise"):
        data, scale = getattr(value, f"_{side}_data"), getattr(value, f"_{side}_scale_inv")
        if data is None:
            continue
        yield f"{name}.{side}_data", data
        rows = data.reshape(-1, data.shape[-1]).shape[0] if data.numel() else 0
        cols = data.shape[-1]
        if value._is_2D_scaled:
            used = scale[: up(rows), : up(cols)]
        else:
            used = scale[: up(cols), :rows]
        yield f"{name}.{side}_scale_inv", used
