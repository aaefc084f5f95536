"""Step time and peak memory of each sharding strategy, beside plain FSDP2's closest setting and megatron-fsdp.

    python benchmarks/strategies.py --ranks 4 --out benchmarks/results/strategies-MACHINE.json

The same TransformerLayers, the same optimizer and the same tokens for all. `bf16`: fp32 main weights under bf16
compute, torch's fused AdamW. `fp8`: FP8 weights (current scaling), fp32 main weights in TE's FusedAdam. Each variant is
built, warmed up, timed and freed. te_fsdp and FSDP2 take turns in the same processes, setting by setting, since a
machine's speed drifts; megatron-fsdp has its own, as it does not free all of its memory. Each kind of weights and each
round has new processes, and every other round goes in the opposite order.

Steps follow each other without waiting for the device, as in training. Times are medians over rounds of the slowest
rank's median step, and that of the best round: on a machine that others use it is the one to compare. Memory is the
allocator's peak in those steps over what was there before the variant was built, of the rank with the most. Only what
stands in one table was measured side by side. Variants that a library refuses are reported with its reason. Under
emulation the script runs as a check of itself: its times then say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

OUTER = 2


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        library: "te_fsdp", "FSDP2" (or torch's DDP) or "megatron-fsdp".
        strategy: Of te_fsdp's names.
        outer: None for one data-parallel axis, else the outer strategy.
    """

    library: str
    strategy: str
    outer: str | None = None

    @property
    def setting(self) -> str:
        """What rows of different libraries are compared by."""
        return self.strategy + {None: "", "no_shard": " HSDP", "optim": " HFSDP"}[self.outer]

    def key(self, weights: str) -> str:
        """What the results call it."""
        return f"{weights} {self.setting} {self.library}"


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SETTINGS: list[tuple[str, str | None]] = [(name, None) for name in STRATEGIES]
SETTINGS += [("optim_grads_params", "no_shard"), ("optim_grads_params", "optim")]
VARIANTS = [Variant("te_fsdp", *setting) for setting in SETTINGS]
VARIANTS += [
    Variant("FSDP2", *setting) for setting in SETTINGS if setting[0] != "optim" and setting[1] != "optim"
]
VARIANTS += [Variant("megatron-fsdp", *setting) for setting in SETTINGS]
LIBRARIES = ("te_fsdp", "FSDP2", "megatron-fsdp")
#: Those of a group share processes, setting by setting: what is to be compared runs within seconds.
GROUPS = (("te_fsdp", "FSDP2"), ("megatron-fsdp",))


def variants_of(libraries: Sequence[str]) -> list[Variant]:
    """The variants of some libraries, those of one setting together."""
    chosen = [variant for variant in VARIANTS if variant.library in libraries]
    return sorted(chosen, key=lambda v: (SETTINGS.index((v.strategy, v.outer)), libraries.index(v.library)))


def arguments() -> argparse.Namespace:
    """The command line; sizes fit a GPU with 80 GiB, and small ones are the default on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    large = torch.cuda.is_available()
    parser.add_argument("--layers", type=int, default=8 if large else 2)
    parser.add_argument("--hidden", type=int, default=4096 if large else 128)
    parser.add_argument("--ffn", type=int, default=14336 if large else 256)
    parser.add_argument("--heads", type=int, default=32 if large else 4)
    parser.add_argument("--groups", type=int, default=8 if large else 2)
    parser.add_argument("--sequence", type=int, default=4096 if large else 32)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and microbatch")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12 if large else 2, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if large else 2)
    parser.add_argument("--limit", type=int, default=600, help="seconds for a part of a round")
    parser.add_argument("--weights", choices=["bf16", "fp8"], nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--out", help="file for the results, JSON")
    return parser.parse_args()


def table(results: dict[str, dict[str, Any]], weights: str) -> Table:
    """Rows by setting; ratios to FSDP2's row of the same setting, of times those of the best rounds."""
    shown = Table(title=f"{weights} weights")
    for header in (
        "setting",
        "library",
        "step, ms",
        "best round",
        "best / FSDP2",
        "peak, GiB",
        "memory / FSDP2",
        "set up, s",
    ):
        shown.add_column(header, justify="left" if header in ("setting", "library") else "right")
    for variant in sorted(VARIANTS, key=lambda v: SETTINGS.index((v.strategy, v.outer))):
        row = results.get(variant.key(weights))
        if row is None:
            continue
        if "refused" in row:
            shown.add_row(variant.setting, variant.library, row["refused"][:60])
            continue
        base = results.get(Variant("FSDP2", variant.strategy, variant.outer).key(weights), {})
        ratios = [f"{row[key] / base[key]:.2f}" if base.get(key) else "" for key in ("best_ms", "bytes")]
        gib = f"{row['bytes'] / 2**30:.2f}"
        setup = f"{row['setup_s']:.1f}"
        times = [f"{row[key]:.1f}" for key in ("ms", "best_ms")]
        shown.add_row(variant.setting, variant.library, *times, ratios[0], gib, ratios[1], setup)
    return shown


def part(
    options: argparse.Namespace, libraries: Sequence[str], weights: str, backwards: bool
) -> list[dict[str, Any]]:
    """The variants of some libraries and one kind of weights, measured by processes of their own."""
    given = {**vars(options), "chosen": libraries, "chosen_weights": weights, "backwards": backwards}
    worker = Path(__file__).with_name("strategies_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(options.ranks), str(worker), json.dumps(given), str(results)]
        process = subprocess.Popen(command)
        try:
            ended = f"exit status {process.wait(options.limit)}"
        except subprocess.TimeoutExpired:
            ended = f"after {options.limit} s"
            process.terminate()  # torchrun ends its ranks
            process.wait()
        found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    keys = [variant.key(weights) for variant in variants_of(libraries)]
    missing = set(keys) - {row["variant"] for row in found}
    return found + [{"variant": key, "refused": f"its process ended ({ended}) before"} for key in missing]


def main() -> None:
    """Measure, print, write down."""
    options = arguments()
    rounds: dict[str, list[dict[str, Any]]] = {}
    groups = [[name for name in group if name in options.libraries] for group in GROUPS]
    parts = [(weights, group) for weights in options.weights for group in groups if group]
    for number in range(options.rounds):
        for weights, group in parts[:: -1 if number % 2 else 1]:
            for row in part(options, group, weights, bool(number % 2)):
                rounds.setdefault(row.pop("variant"), []).append(row)
            write_down(options, rounds)  # after every part: a machine may be taken away
    for weights in options.weights:
        Console(width=140).print(table(medians(rounds), weights))


def medians(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Of each variant the medians over the rounds so far, or the reason against it."""
    return {
        key: next((f for f in found if "refused" in f), None)
        or {name: statistics.median(f[name] for f in found) for name in ("ms", "bytes", "setup_s")}
        | {"best_ms": min(f["ms"] for f in found)}
        for key, found in rounds.items()
    }


def write_down(options: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]]) -> None:
    """The results as JSON."""
    if options.out:
        sizes = {key: value for key, value in vars(options).items() if key != "out"}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        whole = {"machine": machine(device), "options": sizes}
        text = json.dumps({**whole, "results": medians(rounds), "rounds": rounds}, indent=1)
        Path(options.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
