"""A process group that trains some cases: `group.py CASES.json DIGESTS.json`, with PYTHONPATH saying which te_fsdp.

torch, the emulation and TE are imported once, then the ranks are forked. Started by `__main__.py`.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from cases import Case

import te_fsdp.emulation

te_fsdp.emulation.install(arch="10.0")

import training  # noqa: E402
import transformer_engine.pytorch  # noqa: E402
import transformer_engine.pytorch.optimizers  # noqa: E402, F401


def main(given: Path, result: Path) -> None:
    """Train the cases of a file on their number of ranks, and write the results of each rank."""
    chunk = [Case(**fields) for fields in json.loads(given.read_text())]
    context = multiprocessing.get_context("fork")
    queue: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="same_bits_") as stores:
        ranks = [
            context.Process(target=_rank, args=(rank, chunk, stores, queue)) for rank in range(chunk[0].ranks)
        ]
        for process in ranks:
            process.start()
        seen = dict(queue.get(timeout=600 * len(chunk)) for _ in ranks)
        for process in ranks:
            process.join()
    digests = {str(case): [seen[rank][index] for rank in sorted(seen)] for index, case in enumerate(chunk)}
    result.write_text(json.dumps(digests))


def _rank(rank: int, chunk: list[Case], stores: str, queue: Any) -> None:
    """Run every case on one rank and record its values."""
    torch.set_num_threads(1)
    queue.put((rank, [training.run(case, rank, Path(stores) / str(i)) for i, case in enumerate(chunk)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
