"""Bodies: copies of a shard that are read by every rank, or once, from storage that counts the bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from checkpointing.bodies import differing, local_state
from checkpointing.models import Case, Run


@contextmanager
def CountedReads() -> Iterator[list[int]]:
    """Record the bytes of each read of tensors and tables from object storage, by this rank."""
    from te_fsdp.checkpoint.storage import RemotePath

    read_at, counts = RemotePath.read_at, []

    def counting(self: RemotePath, view: memoryview, offset: int) -> int:
        counts.append(read_at(self, view, offset))
        return counts[-1]

    RemotePath.read_at = counting
    try:
        yield counts
    finally:
        RemotePath.read_at = read_at


def save(case: Case, axes: dict[str, int], directory: str) -> tuple[Run, Any]:
    """Train a step, and save where all ranks see object storage."""
    import te_fsdp
    from te_fsdp.checkpoint.storage import resolve_path
    from tests.unit import remote_storage

    remote_storage.register()
    run = Run(case, axes, seed=0)
    run.steps(1)
    path = resolve_path(f"slow://{directory}/step-1")
    extra = {"step": 1, "own": te_fsdp.checkpoint.PerRank(torch.full((4,), float(dist.get_rank())))}
    te_fsdp.checkpoint.save(path, run.model, run.optimizer, extra=extra)
    return run, path


def compare_reads(case: Case, axes: dict[str, int], to: dict[str, int], directory: str) -> dict[str, Any]:
    """Load by each rank, and once: the same bits. The bytes that all ranks have read, each way and by default."""
    import te_fsdp
    from te_fsdp.collectives.agreement import gather

    run, path = save(case, axes, directory)
    states, counts = [], []
    for seed, read in enumerate(("each", "once", "auto")):
        other = Run(case, to, seed=seed + 1)
        with CountedReads() as own:
            extra = te_fsdp.checkpoint.load(path, other.model, other.optimizer, read=read)
        if axes == to:
            assert extra["own"].tolist() == [float(dist.get_rank())] * 4
        states.append(local_state(other))
        counts.append(sum(gather(sum(own))))
    if axes == to:
        states.append(local_state(run))
    wrong = [name for state in states[1:] for name in differing(states[0], state)]
    return {"wrong": wrong, "tensors": len(states[0]), "read": counts}


def errors_of_damaged_files(axes: dict[str, int], directory: str) -> tuple[list[str], list[str], int]:
    """Damage that a rank meets, also where ranks name several ways, and a word that is none: texts, changes, count."""
    import te_fsdp
    from te_fsdp.checkpoint.manifest import Manifest
    from te_fsdp.checkpoint.reading import Rectangle, Staged
    from te_fsdp.errors import CheckpointError

    _, path = save(Case(), axes, directory)
    other, texts = Run(Case(), axes, seed=1), []
    before = local_state(other)

    def without_memory(self: Staged, place: Rectangle, device: torch.device) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("no memory for the data that rank 1 sends")
        return new(self, place, device)

    # A rank that fails before it sends must not leave the others waiting for its data.
    new = Staged.new
    with (
        mock.patch.object(Staged, "new", without_memory),
        pytest.raises(CheckpointError, match="no memory for the data that rank 1 sends"),
    ):
        te_fsdp.checkpoint.load(path, other.model, other.optimizer, read="once")
    dist.barrier()
    if dist.get_rank() == 0:
        file = Manifest.read(path).data_folder(path) / "__0_0.distcp"
        name = Path(str(file).removeprefix("slow://"))
        data = bytearray(name.read_bytes())
        data[len(data) // 4] ^= 1
        name.write_bytes(data)
    dist.barrier()
    for read in ("once", ("each", "once")[dist.get_rank() % 2], "twice"):
        try:
            te_fsdp.checkpoint.load(path, other.model, other.optimizer, read=read)
        except CheckpointError as error:
            texts.append(str(error))
    return texts, differing(before, local_state(other)), len(before)
