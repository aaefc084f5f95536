"""Training steps of te_fsdp, compared with those of other libraries.

    python benchmarks/step.py --out benchmarks/results/step-MACHINE.json --plot step.png
    python benchmarks/step.py --settings zero3 hsdp hfsdp "hfsdp no overlap" tp --ranks 4
    python benchmarks/step.py --model experts8 --settings zero3 ep "ep copy_engine" --ranks 4
    python benchmarks/step.py --model llama3-8b --microbatches 16 --weights fp8 --warmup 3 --steps 2 --seconds 600
    python benchmarks/step.py --settings "tp default" --libraries te_fsdp --ranks 4 --profile host.txt

All rows have the same TransformerLayers, tokens and optimizer. Weights are bf16 ("bf16"), bf16 with FP8 compute in
current scaling ("fp8-compute"), or FP8 ("fp8"). TE's FusedAdam has fp32 main weights, gradients are bf16. Three rows
differ. Recorded FP8 weights train with torch's AdamW over te_fsdp's main weights, which is 3 ms faster there than
FusedAdam. megatron-fsdp has its own main weights, under torch's AdamW. DDP replaces FSDP2 if nothing is sharded.
"te_fsdp graph" records full steps, "te_fsdp units" forward and backward of each unit. "limit" is the same compute and
the update of one rank's shard of the parameters, with the communication of tp and ep only. With tp, plain FSDP2 and
megatron-fsdp do not sum the gradients of norms over tp, as te_fsdp does.

Rows are measured one after the other: each is built, warmed up, timed and freed. te_fsdp, FSDP2 and megatron-fsdp run
in separate processes, because te_fsdp replaces methods of DTensor and megatron-fsdp does not free all of its
memory. Every second round runs in reverse order, because a machine's speed drifts. Steps follow each other without
waiting for the device: `ms` is the median over all steps of the slowest rank, `best_ms` the fastest. `host_ms` is the
time to issue a step from an idle device, `peak_gib` the peak of allocated memory above the memory allocated before. A
row that fails records the reason. A row that exceeds --row-seconds is ended, and the others continue. After --seconds
no further row starts. The file is written after each row.

On two ranks hsdp is 2 x 1, where FSDP2 copies each weight in every all-gather, so measure it on at least four ranks.

Model FLOPs of a token: 6 for each weight of a product that it meets, and 6 * sequence * heads * channels a layer for
causal attention.
Under emulation the script runs as a check of itself: its times then have no meaning.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from machine import machine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from step_profile import text

REPLICAS = 2


@dataclass(frozen=True)
class Setting:
    """How weights are sharded, and gathered by te_fsdp.

    Attributes:
        strategy: te_fsdp's.
        outer: Its outer strategy; ``None``: one data-parallel axis.
        tp: Size of the tensor-parallel axis.
        ep: Number of ranks over which experts are distributed.
        transport: Of gathers.
        zero_copy: Whether gradients are reduced without a copy.
        overlaps: Whether HFSDP hides its reductions.
    """

    strategy: str = "optim_grads_params"
    outer: str | None = None
    tp: int = 1
    ep: int = 1
    transport: Literal["nccl", "copy_engine", "auto"] = "nccl"
    zero_copy: bool | Literal["auto"] = False
    overlaps: bool = True


def _settings() -> dict[str, Setting]:
    """Return the settings by name: those of all libraries, then te_fsdp's own."""
    plain = {
        "zero3": Setting(),
        "no_shard": Setting("no_shard"),
        "optim": Setting("optim"),
        "optim_grads": Setting("optim_grads"),
        "hsdp": Setting(outer="no_shard"),
        "hfsdp": Setting(outer="optim"),
        "tp": Setting(tp=2),
        "tp4": Setting(tp=4),
        "ep": Setting(ep=2),
        "ep4": Setting(ep=4),
        "ep8": Setting(ep=8),
    }
    results = dict(plain)
    for name in ("zero3", "optim_grads", "hsdp", "hfsdp", "tp", "tp4", "ep", "ep4", "ep8"):
        for words in ("copy_engine", "zero_copy", "copy_engine zero_copy"):
            transport: Literal["nccl", "copy_engine"] = "copy_engine" if "copy_engine" in words else "nccl"
            zero_copy = "zero_copy" in words
            results[f"{name} {words}"] = replace(plain[name], transport=transport, zero_copy=zero_copy)
        # Arguments that te_fsdp.fully_shard has without being given any.
        results[f"{name} default"] = replace(plain[name], transport="auto", zero_copy="auto")
    results["hfsdp no overlap"] = replace(plain["hfsdp"], overlaps=False)
    return results


SETTINGS = _settings()
LIBRARIES = ("te_fsdp", "te_fsdp graph", "te_fsdp units", "FSDP2", "megatron-fsdp", "limit")
WEIGHTS = ("bf16", "fp8-compute", "fp8")
_TINY = {"layers": 2, "hidden": 128, "heads": 4, "groups": 2}
MODELS = {
    "layers8": {"layers": 8, "hidden": 4096, "ffn": 14336, "heads": 32, "groups": 8, "sequence": 4096},
    "llama3-8b": {
        "layers": 32,
        "hidden": 4096,
        "ffn": 14336,
        "heads": 32,
        "groups": 8,
        "sequence": 8192,
        "vocabulary": 128256,
    },
    "experts8": {
        "layers": 8,
        "hidden": 2048,
        "ffn": 5632,
        "heads": 16,
        "groups": 4,
        "sequence": 4096,
        "experts": 8,
    },
    "qwen3-30b-a3b": {  # of 48 layers
        "layers": 4,
        "hidden": 2048,
        "ffn": 768,
        "heads": 32,
        "groups": 4,
        "channels": 128,
        "sequence": 4096,
        "vocabulary": 151936,
        "experts": 128,
        "top_k": 8,
    },
    "tiny": _TINY | {"ffn": 256, "sequence": 32},
    "tiny-experts": _TINY | {"ffn": 128, "sequence": 64, "experts": 4},
}
SHAPE = (
    "layers",
    "hidden",
    "ffn",
    "heads",
    "groups",
    "channels",
    "sequence",
    "vocabulary",
    "experts",
    "top_k",
)
#: Options with the name of a file.
FILES = ("out", "plot", "profile")
#: Rows of a group share processes. te_fsdp replaces methods of DTensor in its process, which plain FSDP2 calls.
GROUPS = (("te_fsdp", "te_fsdp graph", "te_fsdp units"), ("FSDP2", "limit"), ("megatron-fsdp",))


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        library: One of LIBRARIES; "FSDP2" is DDP for no_shard.
        weights: "bf16"; "fp8-compute", bf16 weights under FP8 current scaling; "fp8", weights that are FP8.
        setting: A key of SETTINGS.
    """

    library: str
    weights: str
    setting: str

    @property
    def asked(self) -> Setting:
        """Return the setting of this name."""
        return SETTINGS[self.setting]

    def row(self) -> dict[str, str]:
        """Return the name used in the results."""
        library, _, graph = self.library.partition(" ")
        return {"library": library, "weights": self.weights, "setting": f"{self.setting} {graph}".strip()}


def variants(libraries: list[str], weights: list[str], settings: list[str]) -> list[Variant]:
    """Return the rows, grouped for comparison, without settings that a library does not support."""
    ours = {name for name in SETTINGS if " " in name}
    missing = {"FSDP2": {"optim", "hfsdp", *ours}, "megatron-fsdp": ours, "limit": ours}
    return [
        Variant(library, kind, setting)
        for kind in weights
        for setting in settings
        for library in libraries
        if setting not in missing.get(library, ())
    ]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; sizes of the model are those of --model unless they are given."""
    large = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="layers8" if large else "tiny")
    for name in SHAPE:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and microbatch")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--gradients", choices=["bf16", "fp32"], default="bf16", help="their dtype when sent")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=["zero3"])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--only", default="", help="pattern that 'library weights setting' of a row matches")
    parser.add_argument("--steps", type=int, default=12 if large else 2, help="timed steps per row and round")
    parser.add_argument(
        "--warmup", type=int, help="steps before the timed ones (default: 4, or 10 of te_fsdp on GPUs)"
    )
    parser.add_argument("--rounds", type=int, default=2 if large else 1)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if large else 2)
    parser.add_argument("--seconds", type=float, default=130, help="after which no row begins")
    parser.add_argument("--row-seconds", type=float, default=60, help="that a row may take")
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    parser.add_argument("--plot", type=Path, help="file for a plot (needs matplotlib)")
    parser.add_argument(
        "--profile", type=Path, help="file for the host's time by package and function, of rank 0"
    )
    options = parser.parse_args(words)
    sizes = dict(MODELS[options.model])
    if options.model == "layers8" and options.hidden == 8192:  # layers of Llama 3 70B
        sizes |= {"layers": 4, "ffn": 28672, "heads": 64}
    for name in SHAPE:
        if getattr(options, name) is None:
            setattr(options, name, sizes.get(name, 0))
    options.channels = options.channels or options.hidden // options.heads
    options.top_k = options.top_k or 2
    asked = [SETTINGS[name] for name in options.settings]
    if any(item.tp > 1 for item in asked) and (options.vocabulary or options.experts):
        parser.error("embedding, head and experts are not cut over tp: choose --model layers8")
    if any(options.experts % item.ep or (item.ep > 1 and not options.experts) for item in asked):
        parser.error("ep distributes experts: choose a model with a number of --experts that ep divides")
    return options


def flops_per_token(options: argparse.Namespace) -> float:
    """Return the FLOPs of forward and backward: GEMMs with weights, and causal attention."""
    wide, narrow = options.channels * options.heads, options.channels * options.groups
    attention = 2 * options.hidden * (wide + narrow)
    mlps = options.top_k if options.experts else 1
    products = options.layers * (attention + mlps * 3 * options.hidden * options.ffn)
    products += options.vocabulary * options.hidden
    return 6.0 * products + 6.0 * options.layers * options.sequence * wide


def summary(
    row: dict[str, str], found: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, Any] | None:
    """Return a row of the results, of its rounds so far."""
    measured = [item for item in found if "reason" not in item]
    if not measured:
        return {**row, "reason": found[0]["reason"]} if found else None
    times = [ms for item in measured for ms in item["times_ms"]]
    median = statistics.median(times)
    tp = SETTINGS[row["setting"].removesuffix(" graph").removesuffix(" units")].tp
    tokens = options.sequence * options.batch * options.microbatches / tp
    speed = tokens / median * 1e3
    whole = {
        **row,
        "ms": median,
        "best_ms": min(times),
        "host_ms": min(item["host_ms"] for item in measured),
        "peak_gib": max(item["peak_gib"] for item in measured),
        "tokens_per_s_gpu": speed,
        "model_tflops_gpu": speed * flops_per_token(options) / 1e12,
        "rounds": [statistics.median(item["times_ms"]) for item in measured],
    }
    if measured[0].get("optimizer_eager"):
        whole["optimizer_eager"] = measured[0]["optimizer_eager"]
    return whole


class Run:
    """All rows of a command line, and what is known of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.time()
        rows = variants(options.libraries, options.weights, options.settings)
        self.rows = [item for item in rows if re.search(options.only, " ".join(item.row().values()))]
        self.found: list[list[dict[str, Any]]] = [[] for _ in self.rows]
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.machine = machine(device) | {"ranks": options.ranks}
        if device.type == "cpu":
            self.machine["emulated"] = "a check of the script: its times say nothing"

    def results(self) -> list[dict[str, Any]]:
        """Return the rows so far. Rows without a measurement contain the reason."""
        pairs, late = zip(self.rows, self.found, strict=True), {"reason": "the time was up before"}
        return [summary(item.row(), result, self.options) or item.row() | late for item, result in pairs]

    def write(self) -> None:
        """Write the results as JSON."""
        if self.options.profile:
            profiles = [
                text(" ".join(variant.row().values()), item["profile"])
                for variant, result in zip(self.rows, self.found, strict=True)
                for item in result[-1:]
                if "profile" in item
            ]
            self.options.profile.write_text("\n".join(profiles), encoding="utf-8")
        if self.options.out:
            given = {k: v for k, v in vars(self.options).items() if k not in FILES}
            document = {"machine": self.machine, "options": given, "rows": self.results()}
            self.options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def measure(self) -> None:
        """Measure all rounds, group by group; processes that hang or die are begun again after the row at fault."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("steps", total=len(self.rows) * self.options.rounds)
            begun, rounds = 0, range(self.options.rounds)
            for number, group in [(r, group) for r in rounds for group in GROUPS[:: -1 if r % 2 else 1]]:
                members = [n for n, variant in enumerate(self.rows) if variant.library in group]
                if "megatron-fsdp" in group and find_spec("megatron_fsdp") is None:
                    for n in members:
                        self.found[n] = [{"reason": "megatron-fsdp is not installed"}]
                begun += len(members)
                deadline = self._deadline(begun)
                queue = [n for n in members[:: -1 if number % 2 else 1] if not self._hopeless(n)]
                while queue and time.time() < deadline:
                    done = self._part(queue, deadline, progress, task)
                    queue = [n for n in queue[done:] if not self._hopeless(n)]
                    if not done and time.time() < deadline:
                        for n in members:
                            self.found[n] = self.found[n] or [{"reason": "its processes did not start"}]
                        break

    def _deadline(self, begun: int) -> float:
        """Return the time after which none of the first ``begun`` rows of all rounds starts."""
        return self.began + self.options.seconds * begun / max(1, len(self.rows) * self.options.rounds)

    def _hopeless(self, place: int) -> bool:
        return any("reason" in item for item in self.found[place])

    def _part(self, queue: list[int], deadline: float, progress: Progress, task: Any) -> int:
        """Measure rows in new processes. Return the number of finished rows."""
        rows = [(self.rows[n].library, self.rows[n].weights, self.rows[n].setting) for n in queue]
        given = {k: v for k, v in vars(self.options).items() if k not in FILES}
        given |= {"profiled": self.options.profile is not None, "rows": rows, "deadline": deadline}
        worker = Path(__file__).with_name("step_worker.py")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "results.jsonl"
            file.touch()
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(self.options.ranks), str(worker), json.dumps(given), str(file)]
            process = subprocess.Popen(command)
            try:
                return self._follow(process, file, queue, progress, task)
            finally:
                try:
                    process.wait(15 if time.time() < deadline else 5)
                except subprocess.TimeoutExpired:
                    process.terminate()  # torchrun ends its ranks
                    process.wait()

    def _follow(
        self, process: subprocess.Popen[bytes], file: Path, queue: list[int], progress: Progress, task: Any
    ) -> int:
        """Take rows as they arrive, until the processes end or a row takes too long."""
        seen, begun, since = 0, -1, time.time()
        while True:
            ended = process.poll() is not None
            lines = file.read_text(encoding="utf-8").splitlines()
            for line in lines[seen:]:
                result, since = json.loads(line), time.time()
                if "begins" in result:
                    begun = result["begins"]
                    words = self.rows[queue[begun]].row().values()
                    progress.update(task, description=" ".join(words))
                    continue
                self.found[queue[result.pop("place")]].append(result)
                begun = -1
                progress.advance(task)
                self.write()
            seen = len(lines)
            behind = sum("place" in json.loads(line) for line in lines)
            late = time.time() - since > self.options.row_seconds
            if ended or late or behind == len(queue):
                if begun >= 0:
                    why = (
                        f"took more than {self.options.row_seconds:.0f} s" if late else "ended its processes"
                    )
                    self.found[queue[begun]].append({"reason": why})
                    self.write()
                    return behind + 1
                return behind
            time.sleep(0.2)


def table(rows: list[dict[str, Any]], kind: str) -> Table:
    """Return the table of one kind of weights, with ratios to FSDP2 and to the limit of the same setting."""
    shown = Table(title=f"{kind} weights" if kind != "fp8-compute" else "bf16 weights, FP8 compute")
    headers = (
        "setting",
        "library",
        "ms",
        "best",
        "/ FSDP2",
        "/ limit",
        "host ms",
        "peak GiB",
        "tokens/s",
        "TFLOP/s",
    )
    for header in headers:
        shown.add_column(header, justify="left" if header in ("setting", "library") else "right")
    times = {(row["library"], row["setting"]): row.get("ms") for row in rows if row["weights"] == kind}
    for row in rows:
        if row["weights"] != kind:
            continue
        if "reason" in row:
            shown.add_row(row["setting"], row["library"], "-")
            continue
        setting = row["setting"].split()[0]
        ratios = []
        for other in ("FSDP2", "limit"):
            base = times.get((other, setting))
            ratios.append(f"{row['ms'] / base:.3f}" if base else "")
        shown.add_row(
            row["setting"],
            row["library"],
            f"{row['ms']:.1f}",
            f"{row['best_ms']:.1f}",
            *ratios,
            f"{row['host_ms']:.1f}",
            f"{row['peak_gib']:.1f}",
            f"{row['tokens_per_s_gpu']:,.0f}",
            f"{row['model_tflops_gpu']:.0f}",
        )
    return shown


def plot(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot milliseconds, one panel per kind of weights, with a dashed line at the first setting's limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in WEIGHTS if any(r["weights"] == kind and "ms" in r for r in rows)]
    colors = {"te_fsdp": "#76b900", "FSDP2": "#ee4c2c", "megatron-fsdp": "#4b8bbe", "limit": "#999999"}
    figure, panels = pyplot.subplots(
        1, max(len(kinds), 1), squeeze=False, figsize=(5 * max(len(kinds), 1), 4.2)
    )
    for panel, kind in zip(panels[0], kinds, strict=False):
        shown = [row for row in rows if row["weights"] == kind and "ms" in row]
        labels = [f"{row['library']}\n{row['setting']}" for row in shown]
        bars = panel.bar(
            labels, [row["ms"] for row in shown], color=[colors[row["library"]] for row in shown]
        )
        panel.bar_label(bars, fmt="%.1f", fontsize=8)
        limits = [row["ms"] for row in shown if row["library"] == "limit"]
        if limits:
            panel.axhline(limits[0], color="#555555", linestyle="--", linewidth=0.8)
        panel.set_title(kind)
        panel.set_ylabel("ms a step")
        panel.tick_params(axis="x", labelrotation=60, labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measure, print, write and plot the results."""
    run = Run(arguments())
    run.measure()
    run.write()
    console, rows = Console(width=140), run.results()
    for kind in run.options.weights:
        console.print(table(rows, kind))
    for row in rows:
        for key in ("reason", "optimizer_eager"):
            if key in row:
                words = "the optimizer runs eagerly: " if key == "optimizer_eager" else ""
                name = f"{row['library']}, {row['setting']}, {row['weights']}"
                console.print(f"{name}: {words}{row[key]}", markup=False, soft_wrap=True)
    about = (
        f"{run.options.ranks} x {run.machine['device']}, torch {run.machine['torch']}, {run.options.model}"
    )
    console.print(about)
    if "emulated" in run.machine:
        console.print(run.machine["emulated"])
    if run.options.plot:
        plot(rows, f"{about}, sequence {run.options.sequence}", run.options.plot)


if __name__ == "__main__":
    main()
