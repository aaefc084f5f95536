"""Two checkpoints compared by logical value: quantized weights dequantized, whatever mesh or format wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.portable.contents import Contents
from te_fsdp.checkpoint.portable.lazy import BLOCK_BYTES, Lazy
from te_fsdp.modules.semantics import differences, from_json, in_words

__all__ = ["Difference", "Report", "compare_contents"]


@dataclass
class Difference:
    """One tensor that is not the same in both.

    Attributes:
        name: Of the parameter or buffer, or the key of optimizer state and the like.
        kind: ``"only in A"``, ``"only in B"``, ``"shape"``, ``"dtype"``, ``"format"`` or ``"values"``.
        detail: In words.
        elements: Number of elements beyond the tolerance, of ``"values"``.
        max_abs: Largest absolute difference, of ``"values"``; infinite where one of the two is no number.
        max_rel: Largest difference relative to the larger magnitude.
    """

    name: str
    kind: str
    detail: str = ""
    elements: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0

    @property
    def is_note(self) -> bool:
        """Whether the values may still be the same."""
        return self.kind in ("dtype", "format")


@dataclass
class Report:
    """All differences.

    Attributes:
        differences: Of tensors.
        others: Of the optimizer's options, ``extra`` and the settings of modules, in words.
        compared: Number of tensors whose values were compared.
        equal: Number of these within the tolerance.
    """

    differences: list[Difference] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    compared: int = 0
    equal: int = 0

    def is_same(self, *, strict: bool = False) -> bool:
        """Whether nothing differs; dtypes and formats count if ``strict``."""
        return not self.others and not [d for d in self.differences if strict or not d.is_note]


def compare_contents(
    a: Contents, b: Contents, tick: Tick, *, rtol: float = 0.0, atol: float = 0.0, weights_only: bool = False
) -> Report:
    """Compare two checkpoints. Local operation; a block of each tensor is in memory at a time.

    An element is beyond the tolerance if ``|a - b| > atol + rtol * |b|``, or if one of the two is no number and
    the other is not the same.

    Args:
        a: One.
        b: The other.
        tick: Told the bytes of A that were compared.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        weights_only: Leave optimizer, delayed-scaling state and extra.
    """
    report = Report()
    for name in sorted({*a.names, *b.names}):
        if _in_both(report, name, name in a.names, name in b.names):
            _compare_formats(report, name, a, b)
            _compare(report, name, a.value(name), b.value(name), tick, rtol, atol)
    if weights_only:
        return report
    others_a, others_b = ({k for k in c.tensors if not k.startswith("model.")} for c in (a, b))
    for key in sorted(others_a | others_b):
        if _in_both(report, key, key in others_a, key in others_b):
            _compare(report, key, a.tensors[key], b.tensors[key], tick, rtol, atol)
    report.others = _compare_plain(a, b)
    return report


def _in_both(report: Report, name: str, in_a: bool, in_b: bool) -> bool:
    if not (in_a and in_b):
        report.differences.append(Difference(name, "only in A" if in_a else "only in B"))
    return in_a and in_b


def _compare_formats(report: Report, name: str, a: Contents, b: Contents) -> None:
    formats = [c.manifest.parameters.get(name, {}).get("format") for c in (a, b)]
    if formats[0] != formats[1]:
        one, other = (text or "high precision" for text in formats)
        report.differences.append(Difference(name, "format", f"{one} / {other}"))


def _compare(report: Report, name: str, a: Lazy, b: Lazy, tick: Tick, rtol: float, atol: float) -> None:
    if a.shape != b.shape:
        report.differences.append(Difference(name, "shape", f"{a.shape} / {b.shape}"))
        return
    if a.dtype != b.dtype:
        one, other = (str(t.dtype).removeprefix("torch.") for t in (a, b))
        report.differences.append(Difference(name, "dtype", f"{one} / {other}"))
    found = Difference(name, "values")
    # In fp64 a block takes eight times the bytes of an fp8 one.
    for first, last in a.blocks(BLOCK_BYTES // 4):
        _add_block(found, a.rows(first, last), b.rows(first, last), rtol, atol)
        tick(a.bytes // a.height * (last - first))
    report.compared += 1
    report.equal += not found.elements
    if found.elements:
        total = math.prod(a.shape)
        found.detail = (
            f"{found.elements} of {total}, max abs {found.max_abs:.3g}, max rel {found.max_rel:.3g}"
        )
        report.differences.append(found)


def _add_block(found: Difference, a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
    if a.dtype == b.dtype and torch.equal(a, b):
        return
    if not a.dtype.is_floating_point and a.dtype == b.dtype and a.dtype.itemsize == 8:
        a, b = a.to(torch.int64), b.to(torch.int64)  # fp64 would round them
        differs = a != b
    else:
        a, b = a.double(), b.double()
        same = (a == b) | (a.isnan() & b.isnan())
        # Written so that NaN and infinities on one side are beyond any tolerance.
        near = (a - b).abs() <= atol + rtol * b.abs()
        differs = ~(same | (near & a.isfinite() & b.isfinite()))
    count = int(differs.sum())
    if not count:
        return
    gap = (a - b).abs().double()[differs]
    largest = torch.maximum(a.abs(), b.abs()).double()[differs]
    gap = torch.where(gap.isfinite(), gap, torch.inf)
    relative = torch.where(
        gap.isfinite() & (largest > 0), gap / largest, torch.where(gap > 0, torch.inf, 0.0)
    )
    found.elements += count
    found.max_abs = max(found.max_abs, float(gap.max()))
    found.max_rel = max(found.max_rel, float(relative.max()))


def _compare_plain(a: Contents, b: Contents) -> list[str]:
    """Differences of the optimizer's options, the user's values and what modules compute, in words."""
    texts = []
    one, other = a.manifest.optimizer, b.manifest.optimizer
    if one is not None and other is not None:
        if one["class"] != other["class"]:
            texts.append(f"optimizer: {one['class']} / {other['class']}")
        if len(one["groups"]) != len(other["groups"]):
            texts.append(f"optimizer: {len(one['groups'])} / {len(other['groups'])} groups")
        else:
            for n, (first, second) in enumerate(zip(one["groups"], other["groups"], strict=True)):
                texts += _compare_dicts(f"optimizer group {n}", first["options"], second["options"])
                if set(first["parameters"]) != set(second["parameters"]):
                    texts.append(f"optimizer group {n}: other parameters")
    elif (one is None) != (other is None):
        texts.append(f"optimizer: only in {'B' if one is None else 'A'}")
    texts += _compare_dicts("extra", a.manifest.extra, b.manifest.extra)
    records = [from_json(r) for r in (a.manifest.semantics, b.manifest.semantics) if r and r["modules"]]
    if len(records) == 2:  # files of other kinds have none
        found = differences(records[0], records[1], set(a.names) ^ set(b.names))
        texts += in_words((one for one in found if one.effect != "note"), "{} / {}")
    return texts


def _compare_dicts(label: str, a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    texts = []
    for key in sorted({*a, *b}):
        if key not in a or key not in b:
            texts.append(f"{label}: {key} only in {'A' if key in a else 'B'}")
        elif a[key] != b[key]:
            texts.append(f"{label}: {key} is {a[key]} / {b[key]}")
    return texts
