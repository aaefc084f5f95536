"""Cost of a copy of each rank's state in a neighbor's memory, compared with a save to disk. No copy is kept.

    torchrun --nproc-per-node 2 benchmarks/neighbour_copy.py --mib 256 --out RESULTS.json

Each rank has the given amount of state (weights, main weights, moments). It first copies the state to its own memory,
which delays training. A thread then sends this copy to the next rank over a separate gloo group, while training
continues. CPU only: the cores also do the work of a GPU's copy engine and of a network card.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import join, machine
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.placement_types import Shard

import te_fsdp


class State(torch.nn.Module):
    """Return this number of MiB on each rank, in matrices of 4 MiB."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        for number in range(mib // 4):
            local = torch.randn(1024, 1024)
            self.register_parameter(
                f"w{number}", torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
            )

    def locals(self) -> list[torch.Tensor]:
        """Return this rank's parts."""
        return [parameter.to_local().detach() for parameter in self.parameters()]


def step() -> float:
    """Return the seconds of some computation, which simulates a training step."""
    began = time.perf_counter()
    x = torch.ones(256, 256)
    for _ in range(60):
        x = (x @ x).tanh()
    return time.perf_counter() - began


def exchange(group: Any, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Send to the next rank what the one before sends to us."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = group.send([mine], (rank + 1) % size, 0)
    group.recv([theirs], (rank - 1) % size, 0).wait()
    sending.wait()


def measure(mib: int, rounds: int) -> dict[str, Any]:
    """Return median seconds of the slowest rank."""
    state, group = State(mib), dist.new_group(backend="gloo")
    flat = torch.empty(mib << 18)
    theirs = torch.empty_like(flat)
    results: dict[str, list[float]] = {}

    def timed(name: str, call: Any) -> None:
        dist.barrier()
        began = time.perf_counter()
        call()
        slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        results.setdefault(name, []).append(float(slowest))

    def during_exchange() -> None:
        thread = threading.Thread(target=exchange, args=(group, flat, theirs))
        thread.start()
        taken = []
        while thread.is_alive():
            taken.append(step())
        thread.join()
        results.setdefault("step during it", []).append(median(taken))

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for number in range(rounds + 1):  # the first of each touches fresh memory
            results.setdefault("step alone", []).append(median(step() for _ in range(20)))
            timed(
                "copy to own memory", lambda: torch.cat([part.flatten() for part in state.locals()], out=flat)
            )
            timed("exchange with neighbours", lambda: exchange(group, flat, theirs))
            timed("exchange during steps", during_exchange)
            timed("back into the weights", lambda: scatter(theirs, state.locals()))
            path = Path(folder[0], f"step-{number}")
            timed("save", lambda path=path: te_fsdp.checkpoint.save(path, state, keep_last=1))
            timed("load", lambda path=path: te_fsdp.checkpoint.load(path, state))
        dist.barrier()
    return {name: median(values[1:]) for name, values in results.items()}


def scatter(flat: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy one long tensor into many."""
    for part, piece in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        part.copy_(piece.view_as(part))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="state of a rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = join()
    torch.set_num_threads(1)
    seconds = measure(options.mib, options.rounds)
    rates = {name: options.mib / 1024 / s for name, s in seconds.items() if not name.startswith("step")}
    row = {
        "ranks": dist.get_world_size(),
        "mib_of_a_rank": options.mib,
        "seconds": seconds,
        "gib_per_s": rates,
    }
    if dist.get_rank() == 0:
        print(json.dumps(row, indent=1))
        if options.out:
            document = {"machine": machine(device), **row}
            options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
