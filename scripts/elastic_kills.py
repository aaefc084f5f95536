"""Kill ranks or nodes of examples/fsdp2_tp/train_elastic.py at random.

    usage: scripts/elastic_kills.py [--kills 20] [--seed 0] [--nodes 2] [--per-node 1] [--tp 1] ...

Each node is a separate torchrun on this machine. A kill ends one rank, or a node with its torchrun and all its ranks.
A killed node starts again after a while. Kills happen at random moments: while ranks start, load, train, or save. At
the end the checkpoint is compared bit for bit with that of plain torchruns, which run one after the other on the same
numbers of ranks from the same steps. The exit status is 0 if they are equal. Without a GPU: export
TE_FSDP_EMULATION=9.0 OMP_NUM_THREADS=1 first.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

import te_fsdp

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/fsdp2_tp/train_elastic.py"
TINY = "--layers 1 --hidden 64 --ffn 64 --heads 2 --seq 32 --batch 8 --micro 2 --megabytes 0.3 --lr 3e-3"
# In the environment of all processes of a node, to find them.
MARK = "TE_FSDP_ELASTIC_NODE"

Phase = Literal["start", "load", "train", "save"]
PHASES: tuple[Phase, ...] = ("start", "load", "train", "save")


@dataclass(frozen=True)
class Options:
    """Kill ranks and nodes of a job at random, and compare it with one that was resumed by hand."""

    kills: int = 20
    """Number of kills."""
    seed: int = 0
    """Seed of the moments and of the killed ranks."""
    nodes: int = 2
    """Maximum number of nodes; at least one is never killed."""
    per_node: int = 1
    """Ranks of a node."""
    tp: int = 1
    """Tensor-parallel ranks."""
    recipe: str = "current"
    """Recipe of the example."""
    steps: int | None = None
    """Steps of the run; by default it ends with the first checkpoint after the last kill."""
    save_every: int = 4
    """Steps between two saves."""
    freeze: bool = False
    """Also stop ranks without killing them, so that others wait in vain; --python must be a real one."""
    patience: int = 60
    """Seconds after which a rank stops waiting for a silent one."""
    lost: int = 5
    """Seconds after which torchrun declares a silent node lost (15 by default in torch); more on a busy machine."""
    last_call: int = 1
    """Seconds that nodes wait for further ones (torch's own default is 30)."""
    hangs: float = 300.0
    """Seconds without progress after which this script reports a hang."""
    phases: tuple[Phase, ...] = PHASES
    """When kills hit, in turn if --in-turn."""
    in_turn: bool = False
    """Go through --phases in their order, killing a node and a rank by turns; the node comes back after the rank."""
    out: Path = Path("out/elastic_kills")
    """Folder for all that is written; must not exist."""
    by_hand: bool = True
    """Whether the same resumes are made by hand, and compared."""
    python: str = sys.executable
    """Interpreter of torchrun."""
    rank_python: str = sys.executable
    """Interpreter of the ranks."""


@dataclass
class Kill:
    """One of them, and its result."""

    phase: str
    hit: str
    ranks: int
    at: float
    seconds: float = 0.0
    after: str = ""


@dataclass
class Job:
    """The nodes that are running, and what they have written."""

    options: Options
    port: int
    steps: int
    agents: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    count: int = 0

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.options.out / "checkpoints"

    def add_node(self) -> None:
        """Start one more."""
        name = f"{os.getpid()}.{self.count}"
        self.count += 1
        o = self.options
        lost = (
            f"is_host=0,last_call_timeout={o.last_call},keep_alive_interval=1,keep_alive_max_attempt={o.lost}"
        )
        command = [o.python, "-m", "torch.distributed.run", "--nnodes", f"1:{o.nodes}"]
        command += [
            "--nproc-per-node",
            str(o.per_node),
            "--max-restarts",
            "1000",
            "--monitor-interval",
            "0.1",
        ]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        command += ["--rdzv-conf", lost, "--rdzv-id", "elastic", "--no-python", o.rank_python, str(EXAMPLE)]
        command += [*example_options(o, self.steps), "--save", str(self.folder), "--out", str(o.out / "run")]
        # torch keeps one store for all starts otherwise, in which ranks find the addresses of dead ones.
        environment = {**os.environ, MARK: name, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (o.out / "run.log").open("ab") as log:
            self.agents[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)

    def poll(self) -> None:
        """Notice which nodes have ended by themselves."""
        for name, agent in list(self.agents.items()):
            status = agent.poll()
            if status is not None:
                self.ended.append(status)
                del self.agents[name]

    def processes(self, node: str) -> tuple[list[int], list[int]]:
        """Return the processes of a node: all, and its ranks."""
        everyone, ranks = [], []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={node}".encode() in variables:
                everyone.append(int(folder.name))
                if any(variable.startswith(b"LOCAL_RANK=") for variable in variables):
                    ranks.append(int(folder.name))
        return everyone, ranks

    def hit(self, draw: random.Random, kind: str) -> str | None:
        """Kill or freeze a node or a rank; return a description, empty if no process runs yet."""
        node = draw.choice(sorted(self.agents))
        everyone, ranks = self.processes(node)
        if kind == "node" and len(self.agents) > 1:
            send(signal.SIGKILL, everyone)
            self.agents.pop(node).wait()
            return "node"
        if not ranks:
            return None
        send(signal.SIGSTOP if kind == "freeze" else signal.SIGKILL, [draw.choice(sorted(ranks))])
        return "rank frozen" if kind == "freeze" else "rank"

    def starts(self) -> list[dict]:
        """Return the records of all starts."""
        path = self.folder / "starts.jsonl"
        return [json.loads(row) for row in path.read_text().splitlines()] if path.exists() else []

    def trained(self) -> int:
        """Return the bytes of the rows of steps."""
        path = self.options.out / "run/metrics.jsonl"
        return path.stat().st_size if path.exists() else 0

    def saved(self) -> int:
        """Return the number of the last start that has saved a checkpoint."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return max((int(name.split("-")[1]) for name in names if name.startswith("start-")), default=0)

    def saving(self) -> bool:
        """Return whether a checkpoint is being written while a complete one exists."""
        return self.saved() > 0 and any(".te_fsdp-saving." in name for name in os.listdir(self.folder))

    def end(self) -> None:
        """Leave nothing behind."""
        for node, agent in self.agents.items():
            send(signal.SIGKILL, self.processes(node)[0])
            agent.wait()


def send(number: signal.Signals, pids: list[int]) -> None:
    """Send a signal to processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def example_options(options: Options, steps: int) -> list[str]:
    """Return the options shared with the runs by hand."""
    args = [*TINY.split(), "--recipe", options.recipe, "--tp", str(options.tp), "--steps", str(steps)]
    return [*args, "--save-every", str(options.save_every), "--patience", str(options.patience)]


class Killer:
    """Waits for the moments that were drawn, and kills."""

    def __init__(self, job: Job) -> None:
        self.job, self.draw = job, random.Random(job.options.seed)
        self.kills: list[Kill] = []
        self.back_at: list[float] = []  # when nodes return

    def wait(self, what: str, ready: Callable[[], bool], most: float | None = None) -> bool:
        """Wait until it is ready; False where the job has ended before."""
        most = most or self.job.options.hangs
        deadline = time.monotonic() + most
        while not ready():
            self.job.poll()
            if 0 in self.job.ended:
                return False
            now = time.monotonic()
            if not self.job.agents:
                raise SystemExit(f"elastic_kills: all nodes have given up; see {self.job.options.out}")
            if self.back_at and self.back_at[0] <= now:
                self.back_at = self.back_at[1:]
                self.job.add_node()
            if now > deadline:
                raise SystemExit(
                    f"elastic_kills: waited for {most:.0f} s for {what}; see {self.job.options.out}"
                )
            time.sleep(0.005)
        return True

    def sleep(self, seconds: float) -> bool:
        """Let so much time pass; False where the job has ended."""
        until = time.monotonic() + seconds
        return self.wait("a moment", lambda: time.monotonic() >= until)

    def reach(self, phase: str, known: int, rows: int) -> bool:
        """Wait for a moment of a phase, after `known` starts and `rows` bytes of steps; False: the job has ended."""
        if phase == "start":
            return self.sleep(self.draw.uniform(0.2, 4.0))
        if not self.wait("the next start", lambda: len(self.job.starts()) > known):
            return False
        if phase == "load":
            return self.sleep(self.draw.uniform(0.0, 0.3))
        if not self.wait("a step", lambda: self.job.trained() != rows):
            return False
        if not self.job.options.in_turn and not self.wait("its first save", lambda: self.job.saved() > known):
            return False
        if phase == "train":
            return self.sleep(self.draw.uniform(0.0, 2.0))
        return self.wait("a save", self.job.saving) and self.sleep(self.draw.uniform(0.0, 0.05))

    def run(self) -> None:
        """Return all kills, and the job to its end."""
        options, known, rows = self.job.options, 0, -1
        kinds = ["rank", "node"] + ["freeze"] * options.freeze
        everyone = options.nodes * options.per_node
        self.wait("all nodes", lambda: any(row["ranks"] == everyone for row in self.job.starts()[-1:]))
        for number in range(options.kills):
            self.note(known)
            phase = (
                options.phases[number % len(options.phases)]
                if options.in_turn
                else self.draw.choice(options.phases)
            )
            kind = kinds[(number + 1) % 2] if options.in_turn else self.draw.choice(kinds)
            if not self.reach(phase, known, rows):
                break
            self.note(known)
            seen, gone = self.job.starts(), options.nodes - len(self.job.agents)
            hit = self.job.hit(self.draw, kind)
            while hit is None and self.sleep(0.1):  # torchrun is between two starts
                hit = self.job.hit(self.draw, kind)
            ranks = seen[-1]["ranks"] if seen else 0
            self.kills.append(Kill(phase, hit or "none", ranks, time.monotonic()))
            if options.in_turn:
                self.back_at = [0.0] * gone
            elif hit == "node":
                away = 4 * (options.lost + options.last_call)
                self.back_at.append(time.monotonic() + self.draw.uniform(0.0, away))
            known, rows = len(seen), self.job.trained()
        self.wait("the next start", lambda: len(self.job.starts()) > known)
        self.note(known)
        if options.steps is None:
            self.wait("its first checkpoint", lambda: self.job.saved() > known)
        else:
            self.wait("the end", lambda: False, most=4 * options.hangs)

    def note(self, known: int) -> None:
        """Record the effect of the last kill, unless recorded already."""
        starts = self.job.starts()
        if self.kills and not self.kills[-1].after and len(starts) > known:
            last, row = self.kills[-1], starts[known]
            last.seconds = time.monotonic() - last.at
            last.after = f"{row['ranks']} ranks, {row['from'] or 'from the beginning'}"


def lineage(starts: list[dict], last: str) -> list[tuple[int, int]]:
    """Return (ranks, last step) of each start that led to a checkpoint, in order."""
    results: list[tuple[int, int]] = []
    name: str | None = last
    while name is not None:
        start, step = map(int, re.fullmatch(r"start-(\d+)-step-(\d+)", name).groups())  # type: ignore[union-attr]
        row = starts[start - 1]
        results.append((row["ranks"], step))
        name = row["from"]
    return results[::-1]


def by_hand(options: Options, parts: list[tuple[int, int]]) -> Path:
    """Run one plain torchrun after the other and return the last checkpoint."""
    before: Path | None = None
    for number, (ranks, step) in enumerate(parts):
        folder = options.out / f"by-hand/{number}"
        command = [
            options.python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        command += ["--no-python", options.rank_python, str(EXAMPLE), *example_options(options, step)]
        command += ["--save", str(folder), "--out", str(folder)]
        command += ["--no-asynchronous"] + (["--resume", str(before)] if before else [])
        with (options.out / "by-hand.log").open("ab") as log:
            subprocess.run(command, stdout=log, stderr=log, check=True, cwd=ROOT)
        before = folder / f"start-1-step-{step}"
    assert before is not None
    return before


def report(killer: Killer, parts: list[tuple[int, int]], verdict: str) -> None:
    """Return the table."""
    table = Table(
        title=f"seed {killer.job.options.seed}: {len(killer.kills)} kills, {len(killer.job.starts())} starts"
    )
    for name in ("", "while ranks", "killed", "of ranks", "seconds to the next start", "it goes on with"):
        table.add_column(name)
    for number, kill in enumerate(killer.kills, 1):
        later = (f"{kill.seconds:.1f}", kill.after) if kill.after else ("-", "the next kill came first")
        cells = kill.phase, kill.hit, str(kill.ranks), *later
        table.add_row(str(number), *cells)
    console = Console(width=110)
    console.print(table)
    console.print("by hand: " + ", ".join(f"{ranks} ranks to step {step}" for ranks, step in parts))
    console.print(verdict)


def main(options: Options) -> int:
    """Run the job, kill, compare; the exit status."""
    options.out.mkdir(parents=True)
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    steps = options.steps or 1_000_000
    job = Job(options, store.port, steps)
    killer = Killer(job)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("elastic_kills: ended"))  # and with it the job
    try:
        for _ in range(options.nodes):
            job.add_node()
        killer.run()
    finally:
        job.end()
    if len(killer.kills) < options.kills:
        raise SystemExit(f"elastic_kills: the job ended after {len(killer.kills)} kills")
    newest = te_fsdp.checkpoint.latest(job.folder)
    assert newest is not None
    last = newest.name
    parts = lineage(job.starts(), last)
    result = json.dumps({"last": last, "parts": parts, "kills": [asdict(kill) for kill in killer.kills]})
    (options.out / "result.json").write_text(result + "\n")
    if not options.by_hand:
        report(killer, parts, "not compared")
        return 0
    other = by_hand(options, parts)
    command = [options.python, "-m", "te_fsdp.cli", "ckpt", "diff", str(job.folder / last), str(other)]
    compared = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    report(killer, parts, f"{last} and the run by hand: {compared.stdout.strip() or compared.stderr[-2000:]}")
    return compared.returncode


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
