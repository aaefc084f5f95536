"""Comparisons for bodies: bit for bit, or within a relative error with a required reason."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor


class Difference(NamedTuple):
    """Result of a comparison."""

    elements: int
    relative: float
    """||actual - expected|| / ||expected||; 0 for a comparison of bits."""
    real: bool
    """False when there was nothing to compare: no element, or an expected tensor of zeros."""


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded logical tensor in high precision on the CPU, detached, in separate memory.

    A DTensor is gathered (Partial is reduced, `_StridedShard` and uneven shards are put in order):
    all ranks of its mesh must call this together. Quantized tensors, unsharded or as local tensors of a DTensor, are
    dequantized.

    Args:
        tensor: plain tensor, parameter, TE quantized tensor, or a DTensor over any of them.
    """
    with torch.no_grad():
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            if _is_quantized(local):
                tensor = DTensor.from_local(
                    local.dequantize(),
                    tensor.device_mesh,
                    tensor.placements,
                    run_check=False,
                    shape=tensor.shape,
                    stride=tensor.stride(),
                )
            tensor = tensor.full_tensor()
        if _is_quantized(tensor):
            tensor = tensor.dequantize()
        return tensor.detach().cpu().clone()


def assert_bitwise_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Require equal shape, dtype and bytes: NaN payloads and the sign of zero count.

    DTensors and quantized tensors go through `full()` first; to compare quantized bytes, pass those.
    """
    actual, expected = full(actual), full(expected)
    _same_shape(name, actual, expected)
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype: expected {expected.dtype}, got {actual.dtype}")
    if actual.numel():
        size = actual.element_size()
        differs = (_bytes(actual).view(-1, size) != _bytes(expected).view(-1, size)).any(dim=1)
        if differs.any():
            first = int(differs.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(differs.sum())} of {actual.numel()} elements differ in bits; "
                f"first at {_index(first, actual.shape)}: "
                f"expected {_show(expected, first)}, got {_show(actual, first)}"
            )
    return Difference(actual.numel(), 0.0, bool(actual.numel()) and bool((_bytes(expected) != 0).any()))


def assert_close(
    name: str, actual: torch.Tensor, expected: torch.Tensor, rtol: float, why: str, *, floor: float = 0.0
) -> Difference:
    """Require a small relative error of the unsharded tensor and of each element, computed in float64.

    Both must hold: ||a - e|| <= rtol * ||e||, and |a - e| <= rtol * max|e| for every element. All values must
    be finite. Dtypes may differ.

    Args:
        name: parameter or tensor, for the error text.
        actual: tested value; gathered and dequantized by `full()`.
        expected: expected value; likewise.
        rtol: relative tolerance.
        why: reason for the tolerance; required, and part of the error text.
        floor: smallest magnitude (per element) to be relative to, for tensors that are zero in exact
            arithmetic and hold only rounding noise (the gradient of a key bias, say). Leave it 0 elsewhere.

    Raises:
        AssertionError: naming the tensor, expected, got and the worst index.
    """
    if not why:
        raise ValueError(f"{name}: say where the tolerance {rtol} comes from")
    actual, expected = full(actual), full(expected)
    _same_shape(name, actual, expected)
    if not actual.numel():
        return Difference(0, 0.0, False)
    a, e = actual.to(torch.float64).flatten(), expected.to(torch.float64).flatten()
    for label, values in (("expected", e), ("got", a)):
        if not torch.isfinite(values).all():
            worst = int((~torch.isfinite(values)).nonzero()[0])
            raise AssertionError(f"{name}: {label} {values[worst].item()} at {_index(worst, actual.shape)}")
    error = (a - e).abs()
    norm = max(e.norm().item(), floor * e.numel() ** 0.5)
    largest = max(e.abs().max().item(), floor)
    distance = error.norm().item()
    worst = int(error.argmax())
    if distance > rtol * norm or error[worst].item() > rtol * largest:
        tiny = torch.finfo(torch.float64).tiny
        raise AssertionError(
            f"{name}: relative error {distance / max(norm, tiny):.3e} by norm, "
            f"{error[worst].item() / max(largest, tiny):.3e} at the worst element, "
            f"allowed {rtol:.3e} ({why}); worst at {_index(worst, actual.shape)}: "
            f"expected {_show(expected, worst)}, got {_show(actual, worst)}; "
            f"shape {tuple(actual.shape)}, max |expected| {largest:.6g}"
        )
    return Difference(a.numel(), distance / norm if norm else 0.0, bool((e != 0).any()))


@dataclass
class Comparisons:
    """Comparisons of one body, counted, so that a body that compared nothing cannot pass.

    Finish a body with `return comparisons.require(n)`.
    """

    real: int = 0
    """Comparisons with at least one element and a nonzero expected value."""
    vacuous: list[str] = field(default_factory=list)
    elements: int = 0
    worst: tuple[float, str] = (0.0, "")
    """Largest relative error so far, and whose it is."""

    def bitwise_equal(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Call `assert_bitwise_equal`, counted."""
        self._count(name, assert_bitwise_equal(name, actual, expected))

    def close(
        self,
        name: str,
        actual: torch.Tensor,
        expected: torch.Tensor,
        rtol: float,
        why: str,
        *,
        floor: float = 0.0,
    ) -> None:
        """Call `assert_close`, counted."""
        self._count(name, assert_close(name, actual, expected, rtol, why, floor=floor))

    def require(self, min_count: int = 1) -> dict[str, object]:
        """Require this number of actual comparisons; return the count for the body to return."""
        if self.real < min_count:
            raise AssertionError(
                f"expected at least {min_count} comparisons of non-empty, nonzero tensors, made {self.real} "
                f"(nothing to compare in: {', '.join(self.vacuous) or 'none'})"
            )
        return {"real": self.real, "vacuous": self.vacuous, "elements": self.elements, "worst": self.worst}

    def _count(self, name: str, difference: Difference) -> None:
        self.elements += difference.elements
        self.worst = max(self.worst, (difference.relative, name))
        if difference.real:
            self.real += 1
        else:
            self.vacuous.append(name)


def _is_quantized(tensor: torch.Tensor) -> bool:
    # every torch.Tensor has a method `dequantize`, so only the class is reliable
    te = sys.modules.get("transformer_engine.pytorch")
    return te is not None and isinstance(tensor, te.QuantizedTensor)


def _same_shape(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape: expected {tuple(expected.shape)}, got {tuple(actual.shape)}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape)) if shape else ()


def _show(tensor: torch.Tensor, flat: int) -> str:
    element = tensor.contiguous().reshape(-1)[flat : flat + 1]
    bits = "".join(f"{byte:02x}" for byte in reversed(element.view(torch.uint8).tolist()))
    return f"{element.item()!r} (0x{bits})"
