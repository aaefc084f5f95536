"""Entries into files through PyTorch's distributed checkpoint, step by step, so that writing may go on elsewhere.

DCP's stock planner trusts ``compute_local_shape_and_global_offset``, which describes one contiguous box per rank.
Ours says exactly which boxes a rank holds, as many as there are. Who writes a replica, the global plan and its
validation, and the files are DCP's. Its steps are called one by one: planning talks to the other ranks, writing
does not, and between the two the tensors to write, and no others, can be copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
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
from te_fsdp.checkpoint.manifest import DCP_METADATA, FILE_NAME, Manifest
from te_fsdp.checkpoint.replicas import check_replicas
from te_fsdp.checkpoint.sums import Listed, SummingWriter, Tick
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
        save_id: Of this save.
    """

    ranks: Ranks
    path: Path
    planner: SavePlanner
    plan: SavePlan
    metadata: Metadata | None
    writer: SummingWriter
    save_id: str

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

    def write(self, tick: Tick, *, alone: bool) -> tuple[list[WriteResult], dict[str, Listed]]:
        """Write this rank's part, synced to disk. Local operation.

        Args:
            tick: Told the bytes of each tensor.
            alone: Whether the program waits meanwhile.

        Returns:
            DCP's results, and what the manifest lists of each file.
        """
        self.planner.tick = tick
        with _without_zip_checksums() if alone else nullcontext():
            results = self.writer.write_data(self.plan, self.planner)
        results.wait()
        written = results.value()
        return written, self.writer.finish_files(self.save_id, [result.storage_data for result in written])

    def finish(self, results: list[list[WriteResult]], manifest: Manifest) -> None:
        """Write DCP's metadata, given the results of all ranks, and list it. Rank 0 alone calls this.

        The metadata is marked with what the manifest says: from now on nothing may change there but ``files``.
        """
        assert self.metadata is not None
        self.writer.mark = manifest.identity
        self.writer.finish(self.metadata, results)
        manifest.files[DCP_METADATA] = self.writer.list_metadata()


def plan_writing(ranks: Ranks, path: Path, entries: dict[str, Entry], save_id: str) -> Writing:
    """Decide who writes what, and check that what several ranks hold is equal on all of them.

    Collective over the ranks: two rounds of small messages.

    Args:
        ranks: The world.
        path: An empty directory.
        entries: This rank's.
        save_id: Of this save, the same on all ranks.

    Raises:
        CheckpointError: Replicas differ, or the pieces of all ranks do not fit together. All ranks raise it.
    """
    planner, writer = SavePlanner(entries), SummingWriter(path)
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
    return Writing(ranks, path, planner, plan, metadata[0] if metadata else None, writer, save_id)


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
