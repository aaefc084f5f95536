"""Comparison of the loss curves of benchmarks/convergence.py.

A curve maps steps to losses. The first word of a run's name is its recipe. "RECIPE one" is the reference of all runs
with this recipe. "RECIPE one, seed 1" minus the reference is the spread of two seeds, the yardstick.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

SMOOTH = 10  # values in a moving average


def moving(values: dict[int, float]) -> dict[int, float]:
    """Return the moving average over SMOOTH values (fewer at the start) by the step of the last value."""
    steps = sorted(values)
    windows = ((step, steps[max(0, n + 1 - SMOOTH) : n + 1]) for n, step in enumerate(steps))
    return {step: statistics.fmean(values[at] for at in window) for step, window in windows}


def gaps(losses: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """Return each run's smoothed loss minus that of one process with the same recipe and seed 0."""
    results = {}
    for name, values in losses.items():
        reference = f"{name.split()[0]} one"
        if name != reference and reference in losses:
            common = values.keys() & losses[reference].keys()
            results[name] = moving({step: values[step] - losses[reference][step] for step in common})
    return results


def yardstick(apart: dict[int, float]) -> dict[int, float]:
    """Return the largest difference of two seeds within a tenth of the run around each step."""
    reach = (max(apart) - min(apart)) / 10 if apart else 0.0
    return {at: max(abs(v) for s, v in apart.items() if abs(s - at) <= reach) for at in apart}


def summary(losses: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Return final losses and differences, and whether each curve is inside of the spread of two seeds."""
    apart, results = gaps(losses), {}
    for name, values in losses.items():
        about: dict[str, Any] = {
            "last step": max(values),
            "final loss": [*moving(values).values()][-1],
        }
        seeds = apart.get(f"{name.split()[0]} one, seed 1", {})
        if apart.get(name):
            about["final difference"] = apart[name][max(apart[name])]
            about["largest difference"] = max(abs(v) for v in apart[name].values())
            band = yardstick(seeds)
            common = band.keys() & apart[name].keys()
            if common:
                inside = [abs(apart[name][step]) <= band[step] for step in common]
                about["part inside the spread of two seeds"] = sum(inside) / len(inside)
        results[name] = about
    return results


def draw(losses: dict[str, dict[int, float]], title: str, path: Path) -> None:
    """Plot the losses, and below them the differences from one process with the spread of two seeds as a band."""
    apart = gaps(losses)
    kinds = list(dict.fromkeys(name.split()[0] for name in apart))
    figure = Figure(figsize=(8, 4 + 2.2 * len(kinds)), layout="constrained")
    axes = figure.subplots(
        1 + len(kinds), 1, sharex=True, squeeze=False, height_ratios=[2] + [1] * len(kinds)
    )[:, 0]
    for number, (name, values) in enumerate(losses.items()):
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--")[number // 10 % 2], "label": name}
        axes[0].plot([*values], [*values.values()], linewidth=1, **style)
        if name in apart and "seed" not in name:
            lower = axes[1 + kinds.index(name.split()[0])]
            lower.plot([*apart[name]], [*apart[name].values()], linewidth=1, **style)
    for kind, lower in zip(kinds, axes[1:], strict=True):
        band = yardstick(apart.get(f"{kind} one, seed 1", {}))
        heights = [*band.values()]
        lower.fill_between([*band], heights, [-h for h in heights], color="0.85", label="spread of two seeds")
        lower.set(ylabel=f"{kind}: difference\nfrom one process")
        if heights:
            top = 1.3 * max(heights[len(heights) // 4 :])
            lower.set_ylim(-top, top)
    axes[0].set(ylabel="loss (nats per byte)")
    axes[0].set_title(title, loc="left", fontsize=9)
    axes[0].legend(fontsize=7, ncols=2)
    axes[-1].set(xlabel="step")
    figure.savefig(path, dpi=90)
