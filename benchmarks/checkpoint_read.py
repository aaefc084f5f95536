"""Time to load copies of a shard, by the way of reading.

    PYTHONPATH=. torchrun --nproc-per-node 4 benchmarks/checkpoint_read.py --replicate 2 --gib 0.5 --rate 200

Every rank reads, or one rank reads and sends to the others, from a local disk or from slow storage. The slow storage is
local files behind one simulated link that all ranks share: a transfer begins when the previous one has ended, at this
rate in MB/s. The variants take turns. Results are medians of the slowest rank's seconds, and CPU seconds of the busiest
rank.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from checkpoint import Stopwatch, build
from machine import join, machine

import te_fsdp
from tests.unit import remote_storage


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=0.5, help="weights and optimizer state together, GiB")
    parser.add_argument("--replicate", type=int, default=2, help="HSDP replicas")
    parser.add_argument("--rate", type=float, default=200.0, help="of the slow storage, MB a second")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="file for the results, JSON")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write the results."""
    options, device = arguments(), join()
    box: list[Any] = [tempfile.mkdtemp(prefix="te_fsdp-benchmark-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    slow = remote_storage.SlowFileSystem
    remote_storage.register()
    model, optimizer = build(options.gib, 0, options.replicate, device)
    places = {"disk": f"{box[0]}/disk", "slow": f"slow://{box[0]}/slow"}
    for path in places.values():
        te_fsdp.checkpoint.save(path, model, optimizer)
    slow.RATE, slow.CLOCK = options.rate * 1e6, f"{box[0]}/clock"
    rounds = []
    for _ in range(options.rounds + 1):  # the first pays for memory and imports
        timed = Stopwatch(device)
        for name, path in places.items():
            for read in ("each", "once"):
                timed(f"{name}, {read}", partial(te_fsdp.checkpoint.load, path, model, optimizer, read=read))
        rounds.append(timed.seconds)
    if dist.get_rank() == 0:
        medians = {key: statistics.median(r[key] for r in rounds[1:]) for key in rounds[0]}
        results = {"machine": machine(device), "ranks": dist.get_world_size(), "replicas": options.replicate}
        results |= {"GiB": options.gib, "MB/s": options.rate, "medians": medians, "rounds": rounds}
        text = json.dumps(results, indent=1)
        print(text)
        if options.out:
            Path(options.out).write_text(text + "\n", encoding="utf-8")
        shutil.rmtree(box[0])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
