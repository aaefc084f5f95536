"""Test benchmarks/convergence_curves.py with made-up loss curves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = range(0, 2000, 10)


@pytest.fixture
def curves(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import convergence_curves

    return convergence_curves


def _curve(gap):
    return {step: 2.0 + math.exp(-step / 300) + gap(step) for step in STEPS}


def _losses():
    return {
        "bf16 one": _curve(lambda step: 0.0),
        "bf16 one, seed 1": _curve(lambda step: 0.01 * math.sin(step / 100)),
        "bf16 zero3": _curve(lambda step: 0.004),
        "bf16 wrong": _curve(lambda step: 0.02 * step / 2000),
        "bf16 resumed": {
            step: loss + 0.004 for step, loss in _curve(lambda step: 0.0).items() if step >= 1000
        },
        "fp8 zero3": _curve(lambda step: 1.0),  # without a reference
    }


def test_loss_curve_outside_of_the_seed_spread_is_detected(curves):
    result = curves.summary(_losses())
    inside = {name: about.get("part inside the spread of two seeds") for name, about in result.items()}
    assert inside["bf16 zero3"] == inside["bf16 resumed"] == inside["bf16 one, seed 1"] == 1.0
    assert 0.3 < inside["bf16 wrong"] < 0.7
    assert inside["bf16 one"] is inside["fp8 zero3"] is None
    # The mean over the last ten values of 0.02 * step / 2000.
    assert result["bf16 wrong"]["final difference"] == pytest.approx(0.02 * (1990 - 45) / 2000)
    assert result["bf16 resumed"]["final difference"] == pytest.approx(0.004)
