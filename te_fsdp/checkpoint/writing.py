"""Entries into files through PyTorch's distributed checkpoint, step by step, so that writing may go on elsewhere.

DCP's stock planner trusts ``compute_local_shape_and_global_offset``, which describes one contiguous box per rank.
Ours says exactly which boxes a rank holds, as many as there are. Who writes a replica, the global plan and its
validation, and the files are DCP's. Its steps are called one by one: planning talks to the other ranks, writing
does not, and between the two the tensors to write, and no others, can be copied.
"""

from __future__ import annotations

import io
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from te_fsdp.checkpoint.collective import Ranks
from te_fsdp.checkpoint.entries import Entry
from te_fsdp.checkpoint.manifest import FILE_NAME, Tick, checksum
from te_fsdp.checkpoint.replicas import check_replicas
from te_fsdp.errors import CheckpointError, TeFsdpError, message

__all__ = ["Writing", "plan_writing"]


class SavePlanner(dcp.DefaultSavePlanner):
    """Writes every piece of every entry; DCP removes the pieces that other ranks hold too."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        # A replica goes to the rank that has the least to write.
        super().__init__(
            flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=False
        )
        self.entries = {key: entry for key, entry in entries.items() if not entry.is_empty}
        self.tensors: dict[MetadataIndex, torch.Tensor] = {}
        self.tick: Tick = lambda count: None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.is_coordinator = state_dict, is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, entry in self.entries.items():
            for piece in entry.pieces:
                offsets = torch.Size(piece.offsets)
                index = MetadataIndex(key, offsets)
                chunk = ChunkStorageMetadata(offsets=offsets, sizes=piece.tensor.size())
                properties = TensorProperties.create_from_tensor(piece.tensor)
                data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(entry.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.tensors[index] = piece.tensor
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        tensor = self.tensors[index]
        self.tick(tensor.numel() * tensor.element_size())
        return tensor


@dataclass
class Writing:
    """What this rank has to write, and where.

    Attributes:
        ranks: The world.
        path: The directory.
        planner: Holds the tensors, the model's own ones until others are put in their place.
        plan: This rank's part.
        metadata: DCP's description of all tensors; rank 0 alone has it.
        writer: DCP's.
    """

    ranks: Ranks
    path: Path
    planner: SavePlanner
    plan: SavePlan
    metadata: Metadata | None
    writer: dcp.FileSystemWriter
    files: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[MetadataIndex, torch.Tensor]:
        """The tensors that this rank writes, by their place."""
        return {item.index: self.planner.tensors[item.index] for item in self.plan.items}

    @property
    def bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def replace(self, copies: dict[MetadataIndex, torch.Tensor]) -> None:
        """Write these tensors of the host instead; the model's are let go."""
        self.planner.tensors, self.planner.entries = copies, {}
        # Nothing to copy ahead. Doing so would synchronize with kernels of training.
        self.writer.per_thread_copy_ahead = 0

    def write(self, tick: Tick, *, alone: bool) -> tuple[list[WriteResult], dict[str, list[int]]]:
        """Write this rank's part, synced to disk. Local operation.

        Args:
            tick: Told the bytes of each tensor.
            alone: Whether the program waits meanwhile.

        Returns:
            DCP's results, and bytes and CRC-32 of each file.
        """
        self.planner.tick = tick
        files = _SummedFiles()
        self.writer.fs = files
        with _without_zip_checksums() if alone else nullcontext():
            results = self.writer.write_data(self.plan, self.planner)
        results.wait()
        return results.value(), files.sums()

    def finish(self, results: list[list[WriteResult]]) -> list[int]:
        """Write DCP's metadata, given the results of all ranks; its bytes and CRC-32. Rank 0 alone calls this."""
        assert self.metadata is not None
        self.writer.finish(self.metadata, results)
        path = self.path / ".metadata"
        return [path.stat().st_size, checksum(path)]


def plan_writing(ranks: Ranks, path: Path, entries: dict[str, Entry]) -> Writing:
    """Decide who writes what, and check that what several ranks hold is equal on all of them.

    Collective over the ranks: two rounds of small messages.

    Args:
        ranks: The world.
        path: An empty directory.
        entries: This rank's.

    Raises:
        CheckpointError: Replicas differ, or the pieces of all ranks do not fit together. All ranks raise it.
    """
    planner, writer = SavePlanner(entries), dcp.FileSystemWriter(path)
    metadata: list[Metadata] = []

    def local() -> SavePlan:
        planner.set_up_planner({}, is_coordinator=ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def together(plans: list[SavePlan]) -> list[tuple[SavePlan, list[MetadataIndex]]]:
        count = Counter(item.index for plan in plans for item in plan.items)
        shared = [[item.index for item in plan.items if count[item.index] > 1] for plan in plans]
        final, described = planner.create_global_plan(plans)
        metadata.append(described)
        return list(zip(writer.prepare_global_plan(final), shared, strict=True))

    plan, shared = ranks.round(local, together)
    check_replicas(ranks, {index: planner.tensors[index] for index in shared})
    plan = planner.finish_plan(plan)
    return Writing(ranks, path, planner, plan, metadata[0] if metadata else None, writer)


def as_failed_save(path: Path, error: TeFsdpError) -> CheckpointError:
    """The error of a save that failed somewhere in its second half."""
    why = "Nothing has appeared there; earlier checkpoints are as they were"
    if (path / FILE_NAME).is_file():  # a rank died after it had written
        why = "The checkpoint was whole by then, and lies there"
    return CheckpointError(
        message(
            f"{path}: save failed {error}",
            why=why,
            fix="see the cause above; check that all ranks reach the directory, and the space left",
        )
    )


@contextmanager
def _without_zip_checksums() -> Iterator[None]:
    """Spare torch.save the checksums of its zip format, which torch.load ignores; ours of the file cost as much.

    The option is the process', so nothing else may be saving.
    """
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


class _SummedFiles(FileSystem):
    """DCP's files, with the checksum of what goes into each."""

    def __init__(self) -> None:
        self.written: list[tuple[Path, _Summed]] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; of those that are written the checksum is kept."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Summed(io.FileIO(path, "w")) as stream:
            self.written.append((Path(path), stream))
            yield stream

    def sums(self) -> dict[str, list[int]]:
        """Bytes and CRC-32 of the files that were written."""
        sums = {}
        for path, stream in self.written:
            size = path.stat().st_size
            # Streams are written front to back. If one was not, what is on disk counts.
            sums[path.name] = [size, stream.crc if stream.count == size else checksum(path)]
        return sums


class _Summed(io.BufferedWriter):
    """A file that sums up what is written to it."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(raw)
        self.crc, self.count = 0, 0

    def fileno(self) -> int:
        """The file's number, all that was written behind it: DCP syncs by this number, without flushing before."""
        self.flush()
        return super().fileno()

    def write(self, data: Any) -> int:
        """Write and sum up."""
        self.crc = zlib.crc32(data, self.crc)
        self.count += memoryview(data).nbytes
        return super().write(data)
