"""Bodies: HFSDP against one process."""

from __future__ import annotations

from typing import Any

import harness

from hfsdp.models import Case, Run

STEPS = 3
#: fp32 sums in another order over 24 x 8 tokens, through three optimizer steps (Adam with eps 1e-3).
CLOSE = {"rtol": 1e-5, "why": "fp32, sums in another order, three steps"}


def parity(axes: dict[str, int], cases: list[dict[str, Any]], outer: str = "optim") -> list[int]:
    """Parameters and norms after each step equal those of one process; returns comparisons per case."""
    counts = []
    for options in cases:
        case = Case(**options)
        run, oracle = Run(case, axes, outer=outer), Run(case, None)
        checks = harness.Comparisons()
        for step in range(STEPS):
            norms, expected = run.steps(1), oracle.steps(1)
            for ours, theirs in zip(norms, expected, strict=True):
                assert abs(ours - theirs) <= 1e-5 * theirs, f"{case}: norm {ours}, one process {theirs}"
            for (name, ours), theirs in zip(
                run.model.named_parameters(), oracle.model.parameters(), strict=True
            ):
                checks.close(f"{case} step {step} {name}", ours, theirs, **CLOSE)
        counts.append(checks.require(STEPS))
    return counts
