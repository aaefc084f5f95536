"""Compare a result with a recorded one under a bound."""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance import golden
from tests.conformance.case import Bound, Case


def difference(got: torch.Tensor, recorded: Any, bound: Bound) -> str | None:
    """Return `None` if `got` is within the bound of the recorded output, else one line on the difference."""
    dtype, shape = (
        (str(recorded.dtype).split(".")[1], list(recorded.shape))
        if isinstance(recorded, torch.Tensor)
        else (recorded["dtype"], recorded["shape"])
    )
    if (str(got.dtype).split(".")[1], list(got.shape)) != (dtype, shape):
        return f"is {got.dtype} {list(got.shape)}, recorded {dtype} {shape}"
    if not isinstance(recorded, torch.Tensor):
        if "digest" in recorded:
            return None if golden.digest(got) == recorded["digest"] else "bits differ (recorded as a digest)"
        got, recorded = golden.sample(got, recorded["every"]), recorded["sample"]
    if bound.exact or got.numel() == 0:
        return _bits(got, recorded)
    if bound.steps:
        return _steps(got, recorded, bound)
    return _near(got.double(), recorded.double(), bound)


def _bits(got: torch.Tensor, recorded: torch.Tensor) -> str | None:
    left, right = (golden.canonical(item).reshape(-1).view(torch.uint8) for item in (got, recorded))
    wrong = int((left != right).sum())
    if not wrong:
        return None
    first = int((left != right).nonzero()[0]) // got.element_size()
    values = f"{got.reshape(-1)[first].item()!r}, recorded {recorded.reshape(-1)[first].item()!r}"
    return f"{wrong} of {left.numel()} bytes differ, first at {first}: {values}"


def order(codes: torch.Tensor) -> torch.Tensor:
    """Return the position of 8-bit floats (as bytes) on the number line."""
    size = (codes & 0x7F).to(torch.int16)
    return torch.where(codes >= 128, -size, size)


def _steps(got: torch.Tensor, recorded: torch.Tensor, bound: Bound) -> str | None:
    away = (order(got.view(torch.uint8)) - order(recorded.view(torch.uint8))).abs()
    count, most = int((away > 0).sum()), int(away.max())
    if most <= bound.steps and count <= bound.share * away.numel() + 1:  # one, of a short output
        return None
    return (
        f"{count} of {away.numel()} codes differ, by up to {most} steps; bound {bound.share:.2%} and one, "
        f"{bound.steps} steps"
    )


def _near(got: torch.Tensor, recorded: torch.Tensor, bound: Bound) -> str | None:
    finite = torch.isfinite(recorded)
    odd = ~finite & ~((got == recorded) | (torch.isnan(got) & torch.isnan(recorded)))
    if bool(odd.any()) or not bool(torch.isfinite(got[finite]).all()):
        return "NaN or infinity in other places"
    if not bool(finite.any()):
        return None
    left, right = got[finite], recorded[finite]
    if bound.norm:
        away = float((left - right).norm() / right.norm().clamp_min(1e-300))
        return None if away <= bound.norm else f"norm of the difference {away:.3g}, bound {bound.norm:.3g}"
    largest = float(right.abs().max())
    excess = (left - right).abs() - bound.relative * right.abs() - bound.absolute * largest
    if float(excess.max()) <= 0:
        return None
    at = int(excess.argmax())
    return (
        f"{int((excess > 0).sum())} of {left.numel()} values out of bound, worst {left[at].item():.8g}, recorded "
        f"{right[at].item():.8g}; {measure(got, recorded)}; bound relative {bound.relative:.3g}, "
        f"absolute {bound.absolute:.3g}"
    )


def measure(got: torch.Tensor, recorded: torch.Tensor) -> str:
    """Return sizes of the difference, for reports."""
    finite = torch.isfinite(recorded) & torch.isfinite(got)
    left, right = got[finite].double(), recorded[finite].double()
    away, largest = (left - right).abs(), right.abs().max().clamp_min(1e-300)
    relative = (away / right.abs().clamp_min(1e-300)).max()
    return (
        f"largest relative {float(relative):.3g}, largest over the maximum {float(away.max() / largest):.3g}"
    )


def differences(
    case: Case, outputs: dict[str, torch.Tensor], inputs: str, recorded: dict[str, Any]
) -> list[str]:
    """Return one line for each output of a case that differs from the recorded one."""
    if inputs != recorded["inputs"]:
        return [f"{case.name}: the inputs are not those that were recorded"]
    expected = recorded["outputs"]
    if set(outputs) != set(expected):
        return [f"{case.name}: outputs {sorted(outputs)}, recorded {sorted(expected)}"]
    lines = []
    for key, value in outputs.items():
        line = difference(value, expected[key], case.bound_of(key))
        if line is not None:
            lines.append(f"{case.name} {key}: {line}")
    return lines
