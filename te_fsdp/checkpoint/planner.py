"""Entries out of files through PyTorch's distributed checkpoint: a planner for it, and its errors made ours.

DCP's stock planner trusts ``compute_local_shape_and_global_offset``, which describes one contiguous box per
rank. Ours says exactly which boxes a rank holds, as many as there are; reading what overlaps is DCP's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from te_fsdp.checkpoint.reading import Reader
from te_fsdp.errors import CheckpointError, message

if TYPE_CHECKING:
    from te_fsdp.checkpoint.entries import Entry

__all__ = ["Entries", "read_entries", "read_metadata", "readable_metadata"]

Entries = dict[str, "Entry"]


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads every piece of every entry, straight into the rank's own memory."""

    def __init__(self, entries: Entries) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.entries = entries

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, entry in self.entries.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), key
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), p.tensor.size()) for p in entry.pieces]
            items += create_read_items_for_chunk_list(key, saved, chunks)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        # DCP numbers the pieces in the order in which it was given them. Several may have one place.
        piece = self.entries[index.fqn].pieces[index.index or 0]
        assert piece.offsets == tuple(index.offset or ()), index
        return piece.tensor


def read_entries(path: Path, entries: Entries) -> None:
    """Fill the memory of entries from a directory. Collective over the world.

    Raises:
        CheckpointError: Any rank failed; raised on all of them. Some tensors may have been filled.
    """
    planner = _LoadPlanner({k: e for k, e in entries.items() if not e.is_empty})
    reader = Reader(path)
    _run("load", path, lambda no_dist: dcp.load({}, storage_reader=reader, planner=planner, no_dist=no_dist))


def read_metadata(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor in a directory, by key. Local operation.

    Raises:
        CheckpointError: The metadata is unreadable.
    """
    saved = readable_metadata(path).state_dict_metadata.items()
    return {k: (tuple(m.size), m.properties.dtype) for k, m in saved if isinstance(m, TensorStorageMetadata)}


def readable_metadata(path: Path) -> Metadata:
    """DCP's metadata of a directory. Local operation.

    Raises:
        CheckpointError: It is unreadable.
    """
    try:
        return Reader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(
            message(
                f"{path}: unreadable .metadata ({error})",
                fix="the checkpoint is damaged, load an earlier one",
            )
        ) from error


def _run(what: str, path: Path, call: Callable[[bool], Any]) -> None:
    """Call DCP; its CheckpointException, which is no Exception, becomes a CheckpointError."""
    try:
        with warnings.catch_warnings():
            # One process without torch.distributed is a mesh like any other.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call(not dist.is_initialized())
    except dcp.api.CheckpointException as error:
        ranks = sorted(error.failures)
        first = error.failures[ranks[0]][0]
        why = "Some tensors of the model may have been read already" if what == "load" else ""
        raise CheckpointError(
            message(
                f"{path}: {what} failed on rank(s) {', '.join(map(str, ranks))}: {type(first).__name__}: {first}",
                why=why,
                fix="see the cause above; check that all ranks reach the directory",
            )
        ) from first
