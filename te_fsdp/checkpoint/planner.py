"""Steps of a save: plan, compare replicas, copy, write, describe.

DCP's planner describes one contiguous box per rank with several objects each: millions in a large job. Here a
rank sends its boxes as tuples, and rank 0 assigns the writers and returns only the numbers of a rank's own pieces.
Planning communicates with the other ranks. Writing does not, so the tensors can be copied in between. Converted tensors
are written the same way by one process, in blocks of rows.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint.async_save import background
from te_fsdp.checkpoint.host_memory import Block, Staging, blocks_of, flat_rows
from te_fsdp.checkpoint.index import Encoded, Stored, encode
from te_fsdp.checkpoint.lazy_tensors import Lazy
from te_fsdp.checkpoint.manifest import HAS_FOLDER, SUMS_PIECES, Manifest
from te_fsdp.checkpoint.shard_files import Listed, SummedFile, Tick, crc32, synced, view_of, without_collector
from te_fsdp.checkpoint.storage import is_remote
from te_fsdp.checkpoint.tensor_entries import (
    Piece,
    RankTensors,
    Rows,
    TensorEntry,
    add_entry,
    holders_of,
    lightest,
    pieces_held_by_rank,
)
from te_fsdp.collectives.agreement import RankMessenger, digest
from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.tensor_checksums import row_checksums


@dataclass
class WritePlan:
    """Work of a rank in a save of a model, reused while the model is the same. Rank 0 makes the plans of all ranks."""

    writes: list[int] = field(default_factory=list)  #: Numbers of the pieces that it writes, ascending
    #: Its replicated pieces, by number of the set of ranks, and by the number that these ranks share
    groups: dict[int, dict[int, int]] = field(default_factory=dict)
    token: str = ""  #: Drawn by rank 0 for this plan
    signature: Any = None  #: Signature of this rank's data, without tensors
    blocks: list[list[int]] = field(default_factory=list)  #: Numbers of the pieces that are written together
    #: A row for each piece, in the order of writing: its number, first byte, bytes; ``None`` until they are written
    places: Rows | None = None
    #: Names of replicated pieces, by number; this field and those below are set on rank 0 alone
    names: list[str] = field(default_factory=list)
    tensors: dict[str, Stored] | None = None  #: All tensors, until index and metadata exist
    encoded: Encoded | None = None  #: Index and metadata

    def check_replicas(self, ranks: RankMessenger, tensors: list[torch.Tensor]) -> None:
        """Raise CheckpointError on all ranks unless replicated pieces have the same bytes on all of their ranks.

        It names the tensors and the ranks. Collective over the ranks: one round with a checksum of each set of
        replicas, and a second one with a checksum of each piece if they differ.
        """
        if ranks.size == 1:
            return

        def of_groups() -> dict[int, int]:
            return {group: checksum(tensors[i] for i in own.values()) for group, own in self.groups.items()}

        def of_pieces() -> dict[int, int]:
            return {
                number: checksum([tensors[i]]) for own in self.groups.values() for number, i in own.items()
            }

        def refuse(seen: list[dict[int, int]]) -> list[None]:
            differing: dict[str, set[tuple[int, int]]] = {}
            for number, pairs in _differing_ranks(seen).items():
                differing.setdefault(self.names[number], set()).update(pairs)
            formatted = []
            for name, pairs in sorted(differing.items()):
                deviations = [f"rank {rank} from rank {holder}" for rank, holder in sorted(pairs)]
                formatted.append(
                    f"{name} ({', '.join(deviations[:2])}{', ...' if len(deviations) > 2 else ''})"
                )
            raise CheckpointError(
                f"save: {len(formatted)} tensor(s) differ between ranks that must have the same: {shorten(formatted)}",
                expected="equal values on all ranks",
                got="different values",
                why="The files contain one copy, and the others would be lost",
                fix="shard the model with te_fsdp.fully_shard; let the recipe reduce amaxes over all ranks; "
                "te_fsdp.broadcast_params(model, optimizer) makes differing copies of a sharded model equal again; "
                "buffers that each rank makes from its own data (BatchNorm) must be made equal before, or not "
                "persistent; experts that every rank numbers from 0 get global indices by "
                "te_fsdp.set_device_mesh(model, ..., ep_mesh=...)",
            )

        # One number for each set of replicas. The pieces are compared only to name the ones that differ.
        if ranks.round(of_groups, lambda seen: [bool(_differing_ranks(seen))] * len(seen)):
            ranks.round(of_pieces, refuse)


def file_of(rank: int) -> str:
    """Return the name of the file that a rank writes, as in DCP."""
    return f"__{rank}_0.distcp"


@dataclass
class RankWriter:
    """Data that this rank writes, and their destination."""

    ranks: RankMessenger
    path: Path
    manifest: Manifest  #: Manifest of all files; complete on rank 0 alone, when they are written
    plan: WritePlan  #: Plan of this save, or of an earlier one with the same places in the files
    own: list[Block[int]]  #: The model's tensors that this rank writes, by the numbers that pieces have
    #: Written instead: numbers of pieces with their rows on the host
    copies: Iterable[tuple[list[int], torch.Tensor]] | None = None
    problem: Exception | None = None  #: Error of :meth:`copy`

    @torch.no_grad()  # which takes less than to detach many small tensors one by one
    def copy(self, staging: Staging) -> None:
        """Copy this rank's data to the host, and release the model's tensors. :meth:`write` raises any error."""
        try:
            rows = staging.copy(self.own)
            self.copies = [(block.keys, copy) for block, copy in zip(self.own, rows, strict=True)]
        except Exception as error:  # out of host memory, for one
            self.problem = error
        # The model may change now: nothing of it is read after this.
        self.own = []

    def blocks(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Return numbers of pieces with their rows on the host, in the order of writing."""
        if self.copies is not None:
            return iter(self.copies)
        return ((block.keys, rows) for block, rows in background().staging.through(self.own))

    @torch.no_grad()
    def write(self, tick: Tick) -> tuple[Rows | None, Listed]:
        """Write this rank's file, synced; return the places unless the plan has them, and the manifest's entry."""
        if self.problem is not None:
            raise self.problem
        name, order = file_of(self.ranks.rank), list[int]()
        with synced(self.path / name) as raw:
            file = SummedFile(raw)
            for numbers, rows in self.blocks():
                order += numbers
                file.write(rows)
                tick(rows.nbytes)
            listed = file.finish(name, self.manifest.save_id)
        # A later save writes the same pieces at the same places, and then reuses index and metadata.
        lengths = np.array([length for length, _ in file.sums], dtype=np.int64)
        places = np.stack([np.array(order, dtype=np.int64), lengths.cumsum() - lengths, lengths], axis=1)
        planned = self.plan.places
        if planned is not None and not np.array_equal(places, planned):
            what = f"{self.path}: save: pieces are not at the places in the metadata of an earlier save"
            # Old metadata with new places would be a checkpoint that reads wrong bytes.
            raise CheckpointError(what, fix="please report this; building the model again makes a new plan")
        self.plan.places = places
        return None if planned is not None else places, listed

    def finish(self, written: list[tuple[Rows | None, Listed]]) -> None:
        """Write index and metadata, and list all files in the manifest. Rank 0 alone calls this.

        ``written`` has the results of :meth:`write` on all ranks. Both files are marked with a digest of the manifest,
        which must not change afterwards except for ``files``.
        """
        manifest, plan, files = self.manifest, self.plan, [file_of(rank) for rank in range(self.ranks.size)]
        manifest.files = {name: listed for name, (_, listed) in zip(files, written, strict=True)}
        manifest.folder = self.path.name if is_remote(self.path) else ""
        manifest.format_version = HAS_FOLDER if manifest.folder else SUMS_PIECES
        if plan.encoded is None:
            places = [rank_places for rank_places, _ in written if rank_places is not None]
            plan.encoded = encode(plan.tensors or {}, files, places, manifest.identity)
            # The boxes of all ranks. The encoded form is all that later saves need.
            plan.tensors = None
        plan.encoded.write(self.path, manifest)


def signature_of(entries: dict[str, TensorEntry]) -> Any:
    """Return everything that a plan depends on. Local operation."""
    return pieces_held_by_rank(entries), [tensor.device for tensor in tensors_of(entries)]


def tensors_of(entries: Mapping[str, TensorEntry]) -> list[torch.Tensor]:
    """Return the tensors of all pieces, in the order of the pieces' numbers. Local operation."""
    return [piece.tensor for entry in entries.values() for piece in entry.pieces]


def plan_entries(
    ranks: RankMessenger, path: Path, entries: dict[str, TensorEntry], signature: Any
) -> WritePlan:
    """Decide which rank writes each of this rank's entries, none of them empty. Collective over the ranks: one round.

    ``signature`` identifies this rank's data in a later save. Raise CheckpointError on all ranks if the pieces of all
    ranks do not fit together.
    """

    def mine() -> RankTensors:
        # Also on ranks that do not share rank 0's disk: the end of the save names the files that rank 0 does not see.
        if not is_remote(path):
            path.mkdir(parents=True, exist_ok=True)
        return pieces_held_by_rank(entries)

    plan, tensors = ranks.round(mine, assign_writers), tensors_of(entries)
    plan.signature = signature
    # Numbers only: the plan outlives this save, and must not keep its tensors alive.
    plan.blocks = [block.keys for block in blocks_of((number, tensors[number]) for number in plan.writes)]
    return plan


@without_collector()
def assign_writers(all_held: list[RankTensors]) -> list[WritePlan]:
    """Assign each piece to one of its ranks, a replica to the rank with the least to write. Local operation.

    Return the plan of each rank. Raise CheckpointError if the pieces do not tile the tensors.
    """
    token, names = secrets.token_hex(16), list[str]()
    # Rank 0 only sends numbers back: a plan with all boxes would grow with ranks x parameters.
    plans = [WritePlan(token=token) for _ in all_held]
    load, groups = Counter[int](), dict[tuple[int, ...], int]()
    tensors: dict[str, Stored] = {}
    for key, (shape, dtype, pieces, boxes) in holders_of("save", all_held).items():
        writers: list[tuple[int, int]] = []
        for (_, sizes), holders in pieces.items():
            if len(holders) > 1:
                group = groups.setdefault(tuple(rank for rank, _ in holders), len(groups))
                for rank, index in holders:
                    plans[rank].groups.setdefault(group, {})[len(names)] = index
                # Replicated pieces only, because no other piece can differ between ranks.
                names.append(key)
            writer, number = lightest(holders, load, math.prod(sizes) * dtype.itemsize)
            plans[writer].writes.append(number)
            writers.append((writer, number))
        tensors[key] = Stored(shape, dtype, boxes, np.array(writers, dtype=np.int64))
    for plan in plans:
        # In the order in which the rank has its pieces, so that equal ones form blocks.
        plan.writes.sort()
    plans[0].names, plans[0].tensors = names, tensors
    return plans


def write_tensors(path: Path, tensors: Mapping[str, Lazy], tick: Tick, manifest: Manifest) -> Manifest:
    """Write a checkpoint's tensors, synced to disk. Return the manifest with a new save id and the files.

    Local operation: one process, no process group. Empty tensors are left out, as in every checkpoint of te_fsdp. Raise
    CheckpointError for a tensor that cannot be read, OSError for files that cannot be written.
    """
    manifest = replace(manifest, save_id=secrets.token_hex(16))
    blocks = [(tensor, *block, key) for key, tensor in tensors.items() for block in tensor.blocks()]
    entries: dict[str, TensorEntry] = {}
    for tensor, first, last, key in blocks:
        shape = (last - first, *tensor.shape[1:]) if tensor.shape else ()
        piece = torch.empty(shape, dtype=tensor.dtype, device="meta")
        offsets = (first, *(0 for _ in tensor.shape))[: piece.ndim]
        add_entry(entries, key, TensorEntry(tensor.shape, tensor.dtype, (Piece(offsets, piece),)))
    # The same code as for a job, so that converted and saved files have one format.
    alone = RankMessenger(0, 1, None)
    plan = plan_entries(alone, path, entries, None)
    rows = (tensor.rows(first, last).unsqueeze(0) for tensor, first, last, _ in blocks)
    # Generators: one block of rows is in memory at a time.
    copies = (([number], stacked) for number, stacked in enumerate(rows))
    writer = RankWriter(alone, path, manifest, plan, [], copies)
    writer.finish([writer.write(tick)])
    return manifest


def _differing_ranks(seen: list[dict[int, int]]) -> dict[int, list[tuple[int, int]]]:
    """Return the ranks whose value of a number differs from its first rank, with that rank, by number."""
    # Ranks in order, so that the first holder of a piece is the reference of all others.
    first: dict[int, tuple[int, int]] = {}
    differing: dict[int, list[tuple[int, int]]] = {}
    for rank, values in enumerate(seen):
        for number, value in values.items():
            holder, expected = first.setdefault(number, (rank, value))
            if value != expected:
                differing.setdefault(number, []).append((rank, holder))
    return differing


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return one number for the bytes of tensors: CRC-32 on the host; on a device weighted sums, fetched together."""
    sums, on_devices = list[int](), list[torch.Tensor]()
    for block in blocks_of(enumerate(tensors)):
        rows = flat_rows(block.rows())
        if block.is_on_host:
            sums.append(crc32(view_of(rows.view(torch.uint8).view(-1))))
        else:
            on_devices.append(row_checksums(rows))
    return digest(repr([*sums, *(torch.cat(on_devices).tolist() if on_devices else [])]))
