"""Cost of te_fsdp on one rank for growing numbers of ranks: one process, torch's fake process group, no GPU.

    python benchmarks/scale.py --out benchmarks/results/scale-cpu.json --plot benchmarks/scale.png
    python benchmarks/scale.py --plot-of benchmarks/results/scale-cpu.json --plot benchmarks/scale.png   (only plots)

Measures on rank 0, for each number of ranks: set-up of models with the shapes of 405B and of 671B with experts, on
meta; materialize of as many modules and parameters, but narrow ones, because only the host's time is measured; and a
step of a small model with equal work per rank on every mesh. Each has CPU seconds, peak memory, process groups, and
collectives with their bytes by axis. Every row runs in a separate process (scale_worker.py). The other ranks are
simulated and collectives return immediately, so the results are costs of the host, not of a network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from machine import machine

MODELS = ("405b", "671b-moe", "step")
RANKS = (8, 64, 512, 4096, 16384)
WORKER = Path(__file__).with_name("scale_worker.py")


def run(model: str, ranks: int, library: str = "te_fsdp") -> dict[str, Any]:
    """Measure in a separate process."""
    command = [sys.executable, str(WORKER), model, str(ranks), library]
    environment = {"TE_FSDP_EMULATION": "9.0", "OMP_NUM_THREADS": "1", **os.environ}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        raise RuntimeError(f"{model} on {ranks} ranks: {ended.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return row


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot seconds and memory of set-up, and a step's own calls, over ranks."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.5), layout="constrained")
    for model in MODELS[:2]:
        mine = [row for row in rows if row["model"] == model]
        ranks = [row["ranks"] for row in mine]
        left.plot(ranks, [row["set_up_seconds"] for row in mine], "o-", label=f"{model}: te_fsdp")
        left.plot(ranks, [row["fsdp2_seconds"] for row in mine], "x--", label=f"{model}: FSDP2 alone")
        middle.plot(ranks, [max(row["peak_gib"].values()) for row in mine], "o-", label=model)
    steps = [row for row in rows if row["model"] == "step"]
    right.plot([row["ranks"] for row in steps], [row["calls"] for row in steps], "o-")
    for axes, title in (
        (left, "set-up, CPU s"),
        (middle, "peak of the process, GiB"),
        (right, "te_fsdp's calls in a step"),
    ):
        axes.set(xscale="log", xlabel="ranks", title=title)
        if axes is left:
            axes.set(yscale="log")  # from 0.1 to 160 s
        else:
            axes.set(ylim=(0, 1.1 * axes.get_ylim()[1]))
        if axes is not right:
            axes.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Rows": digest(rows)})


def digest(rows: list[dict[str, Any]]) -> str:
    """Return a digest of the rows, which the plot's file records, so that a test can compare it with the JSON."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def table(rows: list[dict[str, Any]]) -> None:
    """Print the summary table."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title="a rank's own cost (fake process group)")
    for name in (
        "model",
        "ranks",
        "set-up s",
        "FSDP2 alone s",
        "of it materialize s",
        "peak GiB",
        "groups",
        "calls a step",
    ):
        shown.add_column(name, justify="right")
    for row in rows:
        if row["model"] == "step":
            shown.add_row("step", str(row["ranks"]), "", "", "", "", "", str(row["calls"]))
            continue
        cells = (
            row["model"],
            str(row["ranks"]),
            f"{row['set_up_seconds']:.2f}",
            f"{row['fsdp2_seconds']:.2f}",
            f"{row['seconds']['materialize']:.2f}",
            f"{max(row['peak_gib'].values()):.2f}",
            str(row["groups"]),
            "",
        )
        shown.add_row(*cells)
    Console(width=110).print(shown)


def main() -> None:
    """Measure all rows, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--out", type=Path, help="rows there of other models stay, with their commit")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--plot-of", type=Path, help="draw --plot from this file of --out; measure nothing")
    options = parser.parse_args()
    if options.plot_of:
        plot(json.loads(options.plot_of.read_text(encoding="utf-8"))["rows"], options.plot)
        return
    rows = []
    for model in options.models:
        # Few milliseconds, on machines that others use: the best of rounds that take turns.
        rounds = [[run(model, ranks) for ranks in options.ranks] for _ in range(3 if model == "step" else 1)]
        for ranks, *result in zip(options.ranks, *rounds, strict=True):
            row = min(result, key=lambda one: one.get("own_seconds", 0.0))
            if model != "step":
                materialize = run(model, ranks, "materialize")
                row["seconds"]["materialize"] = materialize["seconds"]
                row["traffic"]["materialize"] = materialize["traffic"]
                row["set_up_seconds"] = sum(row["seconds"].values())
                row["fsdp2_seconds"] = run(model, ranks, "fsdp2")["fsdp2_seconds"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    about = machine(torch.device("cpu"))
    rows = [{**row, "commit": about["commit"]} for row in rows]
    if options.out and options.out.exists():
        before = json.loads(options.out.read_text(encoding="utf-8"))
        kept = [row for row in before["rows"] if row["model"] not in options.models]
        rows = [{"commit": before["machine"]["commit"], **row} for row in kept] + rows
    table(rows)
    if options.out:
        document = {"machine": about, "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.plot:  # all rows of the file, with those that were not measured now
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
