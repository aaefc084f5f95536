"""Compare the losses of several runs of examples/fsdp2_tp/train_moe.py.

    usage: scripts/moe_losses.py RUNS_DIR RESULT        writes RESULT.png, RESULT.csv and RESULT.json

RUNS_DIR is what `make train-moe` leaves: a folder with metrics.jsonl for each run, "one" among them, which the others
are compared with.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

REFERENCE = "one"
NAMES = {"one": "", "ep2": "", "ep2-tp2": "", "ep4": "resumed: ", "back": "resumed: "}


def read(runs: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Run -> step -> row, runs in the order of NAMES."""
    results = {}
    for name in NAMES:
        path = runs / name / "metrics.jsonl"
        if path.exists():
            results[name] = {row["step"]: row for row in map(json.loads, path.read_text().splitlines())}
    return results


def label(name: str, rows: dict[int, dict[str, Any]]) -> str:
    """Return a run's label in the plot: its mesh, and whether it was resumed."""
    mesh = next(iter(rows.values()))["mesh"].removeprefix("dp_replicate=1 x ")
    return NAMES[name] + ("one process" if mesh == "dp_shard=1 x tp=1" else mesh)


def apart(runs: dict[str, dict[int, dict[str, Any]]]) -> dict[str, float]:
    """Run -> largest difference of its losses from those of the reference, over the steps that it made."""
    reference = runs[REFERENCE]
    return {
        name: max(abs(row["loss"] - reference[step]["loss"]) for step, row in rows.items())
        for name, rows in runs.items()
        if name != REFERENCE
    }


def draw(runs: dict[str, dict[int, dict[str, Any]]], path: Path) -> None:
    """Plot the losses, and their differences from the reference below."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    about = next(iter(runs[REFERENCE].values()))
    for rank, (name, rows) in enumerate(runs.items()):
        style = {"linewidth": 5 - rank, "label": label(name, rows), "color": f"C{rank}", "alpha": 0.8}
        upper.plot(list(rows), [row["loss"] for row in rows.values()], **style)
        if name != REFERENCE:
            gaps = [row["loss"] - runs[REFERENCE][step]["loss"] for step, row in rows.items()]
            lower.plot(list(rows), gaps, color=f"C{rank}", linewidth=1)
    upper.set(ylabel="loss (nats per byte)")
    upper.set_title(f"recipe {about['recipe']}", loc="left")
    if about["emulated"]:
        upper.set_title(
            f"TransformerEngine emulated on the CPU, arch {about['emulated']}", loc="right", fontsize=8
        )
    upper.legend()
    lower.set(xlabel="step", ylabel="difference from\none process")
    figure.savefig(path, dpi=80)


def main(folder: str, result: str) -> None:
    """Read, draw, write the numbers, print the differences."""
    runs = read(Path(folder))
    gaps = apart(runs)
    draw(runs, Path(f"{result}.png"))
    with Path(f"{result}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *runs])
        for step in runs[REFERENCE]:
            table.writerow([step, *(rows[step]["loss"] if step in rows else "" for rows in runs.values())])
    about = {
        name: {k: row[k] for k in ("mesh", "recipe", "emulated")}
        for name, rows in runs.items()
        for row in [*rows.values()][:1]
    }
    Path(f"{result}.json").write_text(
        json.dumps({"runs": about, "largest difference of loss": gaps}, indent=1) + "\n"
    )
    for name, gap in gaps.items():
        print(f"{label(name, runs[name])}: losses at most {gap:.1e} from those of one process")


if __name__ == "__main__":
    main(*sys.argv[1:])
