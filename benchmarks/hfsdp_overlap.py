"""What each overlap of HFSDP gives: the same step with both, one, or none of them, in one set of processes.

    torchrun --nproc-per-node 4 benchmarks/hfsdp_overlap.py --out benchmarks/results/hfsdp-overlap-MACHINE.json

`reduce`: averages over dp_replicate begin during the backward that `microbatch` names the last. `gather`: new weights
travel during the next forward (`shard_optimizer(overlap_gather=True)`). Model, optimizer and timing are those of
strategies_worker.py; HSDP beside them. Variants take turns, every other round in the opposite order. Under emulation
the script runs as a check of itself: its times then say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import strategies_worker as worker
import torch
import torch.distributed as dist
from machine import join, machine
from rich.console import Console
from rich.table import Table
from strategies import Variant

import te_fsdp

HFSDP = Variant("te_fsdp", "optim_grads_params", "optim")
HSDP = Variant("te_fsdp", "optim_grads_params", "no_shard")
#: Row -> strategy, whether averages overlap backward, whether gathers overlap forward.
ROWS = {
    "HFSDP, reduce and gather": (HFSDP, True, True),
    "HFSDP, reduce": (HFSDP, True, False),
    "HFSDP, gather": (HFSDP, False, True),
    "HFSDP, none": (HFSDP, False, False),
    "HSDP": (HSDP, True, False),
}


def arguments() -> argparse.Namespace:
    """The command line; sizes as those of strategies.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    large = torch.cuda.is_available()
    for name, on_gpu, on_cpu in (
        ("layers", 8, 2),
        ("hidden", 4096, 128),
        ("ffn", 14336, 256),
        ("heads", 32, 4),
        ("groups", 8, 2),
        ("sequence", 4096, 32),
        ("steps", 16, 2),
        ("batch", 1, 1),
        ("microbatches", 1, 1),
        ("rounds", 2, 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=on_gpu if large else on_cpu)
    parser.add_argument("--weights", choices=["bf16", "fp8"], nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--out", type=Path, help="file for the results, JSON")
    return parser.parse_args()


def build(row: str, options: argparse.Namespace, fp8: bool, device: torch.device) -> Any:
    """Model, optimizer and context of a microbatch."""
    variant, reduce, gather = ROWS[row]
    meshes = te_fsdp.Meshes.build(dp_replicate=2, device_type=device.type)
    with worker.te.quantized_model_init(enabled=fp8, recipe=worker.Float8CurrentScaling()):
        model = worker.Model(options, torch.bfloat16, device)
    policy = te_fsdp.MixedPrecisionPolicy()
    te_fsdp.fully_shard(model, meshes, outer_strategy=variant.outer or "no_shard", precision=policy)
    optimizer = worker.make_optimizer(model, fp8)
    te_fsdp.main_weights(model, optimizer)
    if variant is HFSDP:
        te_fsdp.shard_optimizer(optimizer, overlap_gather=gather)
    if not reduce:
        return model, optimizer, lambda is_last: nullcontext()
    return model, optimizer, lambda is_last: te_fsdp.microbatch(model, is_last=is_last)


def measure(row: str, options: argparse.Namespace, fp8: bool, device: torch.device) -> dict[str, Any]:
    """One row of one round. Collective over the world."""
    hosts: list[float] = []
    timed = worker.timed

    def timed_and_issued(step: Any, count: int, device: torch.device) -> list[float]:
        times = timed(step, count, device)
        for _ in range(3):
            worker.synchronize(device)
            dist.barrier()
            began = time.perf_counter()
            step()
            hosts.append(1e3 * (time.perf_counter() - began))
        return times

    worker.timed = timed_and_issued
    worker.BUILDERS["te_fsdp"] = lambda variant, *given: build(row, *given)
    try:
        found = worker.attempt(ROWS[row][0], options, fp8, device)
    finally:
        worker.timed = timed
    return {**found, "host_ms": statistics.median(hosts) if hosts else None}


def main() -> None:
    """Measure, print, write down."""
    options, device = arguments(), join()
    rounds: dict[str, list[dict[str, Any]]] = {}
    for number in range(options.rounds):
        for weights in options.weights:
            for row in list(ROWS)[:: -1 if number % 2 else 1]:
                found = measure(row, options, weights == "fp8", device)
                rounds.setdefault(f"{weights} {row}", []).append(found)
                if dist.get_rank() == 0:
                    print(json.dumps({"row": f"{weights} {row}", **found}), flush=True)
    if dist.get_rank() == 0:
        show(rounds)
        if options.out:
            sizes = {name: value for name, value in vars(options).items() if name != "out"}
            whole = {"machine": machine(device), "options": sizes, "rounds": rounds}
            options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def show(rounds: dict[str, list[dict[str, Any]]]) -> None:
    """A table of medians over the rounds."""
    table = Table(title="Overlaps of HFSDP, 2 replicas")
    for header in ("row", "step, ms", "best round", "issued in, ms", "peak, GiB"):
        table.add_column(header, justify="left" if header == "row" else "right")
    for row, found in rounds.items():
        if any("refused" in one for one in found):
            table.add_row(row, next(one["refused"] for one in found if "refused" in one)[:60])
            continue
        middle = {key: statistics.median(one[key] for one in found) for key in ("ms", "host_ms", "bytes")}
        best = min(one["ms"] for one in found)
        cells = (middle["ms"], best, middle["host_ms"])
        table.add_row(row, *(f"{cell:.1f}" for cell in cells), f"{middle['bytes'] / 2**30:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
