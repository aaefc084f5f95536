"""Time of checkpoints against plain torch.distributed.checkpoint (DCP).

    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --gib 4 --out benchmarks/results/checkpoint-MACHINE.json
    torchrun --nproc-per-node 4 benchmarks/checkpoint.py --tensors 8000 --out benchmarks/results/checkpoint-small-M.json

One model of plain linear layers, or of many parameters of 64 elements, sharded by te_fsdp over all ranks, and AdamW
state. In each round: a save by plain DCP of the same tensors, a synchronous save, an asynchronous save, then a load by
each and te_fsdp's load of plain DCP's directory; every other round in the opposite order. The first round is not
counted, unless --seconds end the job before a second one. --only leaves operations out. Between saves dirty pages are
flushed, so that no save pays for the one before. Times are the slowest rank's. What is reported: medians over rounds,
the ratio of the best rounds (what remains when others use the machine as well), and CPU seconds of the busiest rank.
While an asynchronous save runs, a step of many small operations is timed, and again when none runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine import join, machine
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import te_fsdp

#: Width of a layer below 4 GiB and from 4 GiB on: setting up thousands of layers would take longer than a round.
HIDDEN = (1024, 4096)
#: Operations in the order of a round, each with the directory that it writes or reads.
OPERATIONS = {
    "plain save": "plain",
    "save": "sync",
    "async stall": "async",
    "plain load": "plain",
    "load": "sync",
    "load with verify": "sync",
    "load of plain": "plain",
}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="weights and optimizer state together, GiB")
    parser.add_argument(
        "--tensors", type=int, default=0, help="this number of parameters of 64 elements instead"
    )
    parser.add_argument("--replicate", type=int, default=1, help="HSDP replicas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=OPERATIONS, default=[*OPERATIONS], help="operations")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round after this time")
    parser.add_argument("--directory", help="where checkpoints go (default: a temporary directory)")
    parser.add_argument("--out", help="file for the results, JSON")
    options = parser.parse_args()
    written = {OPERATIONS[name] for name in options.only if "load" not in name}
    if missing := {OPERATIONS[name] for name in options.only} - written:
        parser.error(f"--only: a load needs its save ({', '.join(sorted(missing))})")
    return options


def build(
    gib: float, tensors: int, replicate: int, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return three sharded models with AdamW state after one step, of about this fp32 size or number of tensors."""
    hidden = HIDDEN[gib >= 4]
    layers = max(1, round(gib * 2**30 / (3 * 4 * hidden * hidden)))
    torch.manual_seed(0)
    if tensors:
        model: nn.Module = nn.ParameterList(torch.randn(64, device=device) for _ in range(tensors))
    else:
        linear = (nn.Linear(hidden, hidden, bias=i % 4 == 0, device=device) for i in range(layers))
        model = nn.Sequential(*linear)
    meshes = te_fsdp.Meshes.build(dp_replicate=replicate, dp_shard=-1, device_type=device.type)
    te_fsdp.fully_shard(model, meshes, units=[] if tensors else [nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class Stopwatch:
    """Seconds of named operations."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str, call: Callable[[], Any]) -> Any:
        """Call on all ranks from a common start; note the slowest rank's time, and the busiest one's CPU time."""
        self._synchronize()
        dist.barrier()
        began = time.perf_counter(), time.process_time()
        result = call()
        self._synchronize()
        spent = [time.perf_counter() - began[0], time.process_time() - began[1]]
        slowest = torch.tensor(spent, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        self.seconds[name], self.seconds[f"{name} (CPU)"] = slowest.tolist()
        if dist.get_rank() == 0:
            print(f"{name}: {self.seconds[name]:.2f} s", file=sys.stderr, flush=True)
        return result

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def flush() -> None:
    """Write back what is dirty, on one rank, while all wait."""
    dist.barrier()
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        os.sync()
    dist.barrier()


def small_step(device: torch.device) -> float:
    """Return the seconds of many small operations, as in a step limited by Python."""
    values, began = torch.ones(256, 256, device=device), time.perf_counter()
    for _ in range(300):
        values = values * 0.5 + 0.5
    values.sum().item()
    return time.perf_counter() - began


def one_round(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    where: Path,
    device: torch.device,
    number: int,
    only: list[str],
) -> dict[str, float]:
    """Return the seconds of each operation. Remove the written files."""

    def plain_state() -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state}

    def plain_load() -> None:
        state = plain_state()
        dcp.load(state, checkpoint_id=where / "plain")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def asynchronous() -> None:
        alone = [small_step(device) for _ in range(20)]
        call = lambda: save(where / "async", model, optimizer, asynchronous=True)  # noqa: E731
        handle, beside = timed("async stall", call), []

        def rest() -> None:
            while not handle.done():
                beside.append(small_step(device))
            handle.result()

        timed("async rest", rest)
        timed.seconds["step"] = statistics.median(alone)
        timed.seconds["step while saving"] = statistics.median(beside or alone)

    save, load, timed = te_fsdp.checkpoint.save, te_fsdp.checkpoint.load, Stopwatch(device)
    calls: dict[str, Callable[[], Any]] = {
        "plain save": lambda: dcp.save(plain_state(), checkpoint_id=where / "plain"),
        "save": lambda: save(where / "sync", model, optimizer),
        "plain load": plain_load,
        "load": lambda: load(where / "sync", model, optimizer),
        "load with verify": lambda: load(where / "sync", model, optimizer, verify=True),
        "load of plain": lambda: load(where / "plain", model, optimizer),
    }
    chosen = [name for name in OPERATIONS if name in only]
    order = 1 if number % 2 else -1
    saves, loads = [[n for n in chosen if ("load" in n) is kind][::order] for kind in (False, True)]
    for name in saves + loads:
        if name in saves or name == loads[0]:
            flush()
        asynchronous() if name == "async stall" else timed(name, calls[name])
    written = {OPERATIONS[name] for name in saves}
    sizes = {n: sum(f.stat().st_size for f in (where / n).rglob("*")) for n in sorted(written)}
    dist.barrier()
    if dist.get_rank() == 0:
        for name in sizes:
            shutil.rmtree(where / name)
    dist.barrier()
    return timed.seconds | {f"{name} bytes": float(size) for name, size in sizes.items()}


#: Ratios of a summary.
RATIOS = (
    ("async stall", "save"),
    ("save", "plain save"),
    ("load", "plain load"),
    ("load with verify", "plain load"),
    ("load of plain", "plain load"),
    ("async stall", "plain save"),
    ("step while saving", "step"),
)


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the medians over rounds, and ratios."""

    def ratio(above: str, below: str) -> dict[str, float]:
        results = {"of medians": median(above) / median(below)}
        results["of the best rounds"] = min(r[above] for r in rounds) / min(r[below] for r in rounds)
        if f"{above} (CPU)" in rounds[0]:
            results["of CPU time"] = median(f"{above} (CPU)") / median(f"{below} (CPU)")
        return results

    def median(key: str) -> float:
        return statistics.median(r[key] for r in rounds)

    pairs = [pair for pair in RATIOS if rounds[0].keys() >= {*pair}]
    return {"medians": {key: median(key) for key in rounds[0]}} | {
        f"{above} / {below}": ratio(above, below) for above, below in pairs
    }


def write(options: argparse.Namespace, device: torch.device, every: list[dict[str, float]]) -> None:
    """Print and write the results of the rounds so far, on one rank."""
    first, rounds = every[0], every[1:] or every
    results = {
        "machine": machine(device),
        "ranks": dist.get_world_size(),
        **summary(rounds),
        "first async stall": first.get("async stall"),
        "first round counted": first is rounds[0],
        "rounds": rounds,
    }
    text = json.dumps(results, indent=1)
    print(text)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print and write the results."""
    options, began = arguments(), time.time()
    device = join()
    box = [
        options.directory or tempfile.mkdtemp(prefix="te_fsdp-benchmark-") if dist.get_rank() == 0 else None
    ]
    dist.broadcast_object_list(box)
    where = Path(box[0] or "")
    model, optimizer = build(options.gib, options.tensors, options.replicate, device)
    # The first round pays for groups, imports and memory; it is not counted, but for the first stall.
    rounds: list[dict[str, float]] = []
    for number in (0, *range(options.rounds)):
        late = [bool(rounds) and time.time() - began > options.seconds]
        dist.broadcast_object_list(late)
        if late[0]:
            break
        rounds.append(one_round(model, optimizer, where, device, number, options.only))
        if dist.get_rank() == 0:  # after each round: a later one may be cut off
            write(options, device, rounds)
    if dist.get_rank() == 0 and not options.directory:
        shutil.rmtree(where, ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
