"""Entries into files, step by step, so that writing may go on elsewhere: plan, compare replicas, copy, write, describe.

DCP's stock planner trusts ``compute_local_shape_and_global_offset``, which describes one contiguous box per rank.
Ours says exactly which boxes a rank holds, as many as there are, and rank 0 decides who writes which: a piece is two
tuples, where DCP has several objects for each, of which a large job has millions, and a rank hears only the numbers of
those that it writes. Planning talks to the other ranks, writing does not, and between the two the tensors to write, and
no others, can be copied. What is converted goes the same way, planned by one process from shapes, with blocks of rows
as the pieces, each read when it is its turn.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.agree import Ranks, digest
from te_fsdp.checkpoint.background import Block, Staging, background, blocks_of
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.index import Encoded, Rows, Stored, encode, is_tiling
from te_fsdp.checkpoint.lazy import Lazy
from te_fsdp.checkpoint.manifest import Manifest, read_manifest
from te_fsdp.checkpoint.paths import is_remote
from te_fsdp.checkpoint.sums import Listed, SummedFile, Tick, checksums, synced, without_collector
from te_fsdp.errors import CheckpointError, TeFsdpError, shorten

#: Where a piece begins in the original, and its shape.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: What a rank holds: key, shape and dtype of each tensor, and its pieces, which count from 0 over all tensors.
Held = list[tuple[str, tuple[int, ...], torch.dtype, list[Box]]]


@dataclass
class Part:
    """What one rank hears.

    Attributes:
        writes: Numbers of the pieces that it writes, ascending.
        shared: Its pieces that others hold as well, by the number that they have on all ranks.
        groups: Of these numbers, those that the same ranks hold, by the number of that set of ranks.
    """

    writes: list[int] = field(default_factory=list)
    shared: dict[int, int] = field(default_factory=dict)
    groups: dict[int, list[int]] = field(default_factory=dict)


def file_of(rank: int) -> str:
    """Name of the file that a rank writes, as DCP has it."""
    return f"__{rank}_0.distcp"


@dataclass
class Plan:
    """What the ranks agreed on for a save of a model, and agree on again while the model is the same.

    To plan takes a millisecond for each dozen of tensors, and the time of all ranks' tensors on rank 0.

    Attributes:
        token: Drawn by rank 0 for this plan.
        signature: What this rank had to write; no tensors.
        part: What this rank writes, and what of it others hold as well.
        blocks: Numbers of the pieces that are written together, among all that this rank holds.
        names: Of what several ranks hold, by number; rank 0 alone has them, as what follows.
        tensors: All of them, until index and metadata are made.
        encoded: Index and metadata.
        places: Of this rank's pieces, a row for each in the order of writing: its number, first byte, bytes.
    """

    token: str
    signature: Any
    part: Part
    blocks: list[list[int]]
    names: list[str]
    tensors: dict[str, Stored] | None = None
    encoded: Encoded | None = None
    places: Rows = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))


@dataclass
class Writing:
    """What this rank has to write, and where.

    Attributes:
        plan: Agreed on for this save, or before, if it has places in the files: they must be the same again.
        tensors: The model's own, by the numbers that pieces have; this rank's part of them, in blocks, is kept.
        copies: What is written instead: numbers of pieces with their rows on the host.
        problem: What went wrong when they were copied.
    """

    ranks: Ranks
    path: Path
    save_id: str
    plan: Plan
    tensors: InitVar[list[torch.Tensor]]
    copies: Iterable[tuple[list[int], torch.Tensor]] | None = None
    problem: Exception | None = None

    def __post_init__(self, tensors: list[torch.Tensor]) -> None:
        self.own = [Block(numbers, [tensors[at] for at in numbers]) for numbers in self.plan.blocks]

    @property
    def bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(block.bytes for block in self.own)

    def copy(self, staging: Staging) -> None:
        """Copy what this rank writes to the host, let the model's go; what goes wrong is raised by :meth:`write`."""
        try:
            rows = staging.copy(self.own)
            self.copies = [(block.keys, copy) for block, copy in zip(self.own, rows, strict=True)]
        except Exception as error:  # out of host memory, for one
            self.problem = error
        self.own = []

    def blocks(self) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Numbers of pieces with their rows on the host, in the order in which they are written."""
        if self.copies is not None:
            return iter(self.copies)
        return ((block.keys, rows) for block, rows in background().staging.through(self.own))

    def write(self, tick: Tick) -> tuple[Rows | None, dict[str, Listed]]:
        """Write this rank's part, synced to disk. Local operation.

        Returns:
            The plan's places, unless they are known; and what the manifest lists of each file.
        """
        if self.problem is not None:
            raise self.problem
        name, lies = file_of(self.ranks.rank), list[tuple[int, int, int]]()
        with synced(self.path / name) as raw:
            file = SummedFile(raw)
            for numbers, rows in self.blocks():
                lies += [(n, *place) for n, place in zip(numbers, file.write(rows), strict=True)]
                tick(rows.nbytes)
            listed = file.finish(name, self.save_id)
        places = np.array(lies, dtype=np.int64).reshape(-1, 3)
        is_known = len(self.plan.places) > 0
        if is_known and not np.array_equal(places, self.plan.places):
            raise CheckpointError(
                f"{self.path}: save: tensors were written in another order than by the save that planned it",
                expected=f"{len(self.plan.places)} pieces at the places of then",
                got="others",
                fix="please report this; a model built anew is planned anew",
            )
        self.plan.places = places
        return None if is_known else places, {name: listed}

    def finish(self, places: list[Rows | None], manifest: Manifest) -> None:
        """Write index and metadata, given the places of all ranks, and list them. Rank 0 alone calls this.

        Both are marked with what the manifest says: from now on nothing may change there but ``files``.
        """
        plan = self.plan
        if plan.encoded is None:
            files, tensors = [file_of(rank) for rank in range(self.ranks.size)], plan.tensors or {}
            known = [own for own in places if own is not None]
            plan.tensors, plan.encoded = None, encode(tensors, files, known, manifest.identity)
        plan.encoded.write(self.path, manifest)


def signature_of(entries: dict[str, Entry]) -> Any:
    """All that a plan depends on. Local operation."""
    return held(entries), [tensor.device for tensor in tensors_of(entries)]


def tensors_of(entries: Mapping[str, Entry]) -> list[torch.Tensor]:
    """The tensors of all pieces, by the numbers that pieces have. Local operation."""
    return [piece.tensor for entry in entries.values() for piece in entry.pieces]


def plan_entries(ranks: Ranks, path: Path, entries: dict[str, Entry], signature: Any) -> Plan:
    """Decide who writes what of this rank's entries, none of them empty. Collective over the ranks: one round.

    ``signature`` is that by which this rank knows that it holds the same again.

    Raises:
        CheckpointError: The pieces of all ranks do not fit together. All ranks raise it.
    """
    names, found = list[str](), list[dict[str, Stored]]()

    def mine() -> Held:
        if not is_remote(path):
            path.mkdir(parents=True, exist_ok=True)
        return held(entries)

    def all_of(seen: list[Held]) -> list[tuple[str, Part]]:
        with without_collector():
            parts, shared, tensors = divide(seen)
        names.extend(shared)
        found.append(tensors)
        token = secrets.token_hex(16)
        return [(token, part) for part in parts]

    token, part = ranks.round(mine, all_of)
    tensors = tensors_of(entries)
    blocks = [block.keys for block in blocks_of((at, tensors[at]) for at in part.writes)]
    return Plan(token, signature, part, blocks, names, found[0] if found else None)


def held(entries: Mapping[str, Entry]) -> Held:
    """What rank 0 needs to know of a rank's entries. Local operation."""
    return [
        (key, entry.shape, entry.dtype, [(p.offsets, tuple(p.tensor.shape)) for p in entry.pieces])
        for key, entry in entries.items()
    ]


def divide(all_held: list[Held]) -> tuple[list[Part], list[str], dict[str, Stored]]:
    """Give each piece to one of the ranks that hold it: a replica to the one that has the least to write. Local.

    Returns:
        What each rank hears; names of what several ranks hold, by number; and the tensors.

    Raises:
        CheckpointError: The pieces do not make up the tensors.
    """
    described: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    pieces: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, one in enumerate(all_held):
        number = 0
        for key, shape, dtype, boxes in one:
            described.setdefault(key, (shape, dtype))
            have = pieces.setdefault(key, {})
            for box in boxes:
                have.setdefault(box, []).append((rank, number))
                number += 1
    parts, names = [Part() for _ in all_held], list[str]()
    load, groups = [0] * len(all_held), dict[tuple[int, ...], int]()
    tensors: dict[str, Stored] = {}
    for key, have in pieces.items():
        (shape, dtype), writers = described[key], list[tuple[int, int]]()
        for (_, sizes), holders in have.items():
            writer, number = holders[0]
            if len(holders) > 1:
                group = groups.setdefault(tuple(rank for rank, _ in holders), len(groups))
                for rank, at in holders:
                    parts[rank].shared[len(names)] = at
                    parts[rank].groups.setdefault(group, []).append(len(names))
                names.append(key)
                writer, number = min(holders, key=lambda holder: load[holder[0]])
            load[writer] += math.prod(sizes) * dtype.itemsize
            parts[writer].writes.append(number)
            writers.append((writer, number))
        boxes = np.array(list(have), dtype=np.int64).reshape(len(have), 2, len(shape))
        tensors[key] = Stored(shape, dtype, boxes, np.array(writers, dtype=np.int64))
    for part in parts:
        part.writes.sort()
    wrong = [key for key, stored in tensors.items() if not is_tiling(stored.shape, stored.boxes)]
    if wrong:
        raise CheckpointError(
            f"save: the pieces of {shorten(wrong)}",
            expected="together the whole tensor, each element once",
            got="others",
            fix="shard the model with te_fsdp.fully_shard; all ranks must make the call with the same model",
        )
    return parts, names, tensors


def write_tensors(path: Path, tensors: Mapping[str, Lazy], tick: Tick, manifest: Manifest) -> Manifest:
    """Write a checkpoint's tensors, its files synced to disk. Local operation: one process, no process group.

    Empty tensors are left out, as in every checkpoint of te_fsdp. ``tick`` is told the bytes of each block.

    Returns:
        The manifest as of a save of its own, with the files.

    Raises:
        CheckpointError: A tensor cannot be read, or the files cannot be written.
    """
    manifest = replace(manifest, save_id=secrets.token_hex(16), files={})
    manifest.lay_out(path)
    entries = {key: _entry_of_blocks(tensor) for key, tensor in tensors.items() if tensor.bytes}
    alone = Ranks(0, 1, None)
    plan = plan_entries(alone, path, entries, None)
    pieces = [(tensors[key], piece) for key, entry in entries.items() for piece in entry.pieces]
    copies = (([at], _rows_of(*pieces[at])) for at in plan.part.writes)
    writing = Writing(alone, path, manifest.save_id, plan, tensors_of(entries), copies)
    try:
        places, files = writing.write(tick)
    except CheckpointError:
        raise
    except Exception as error:
        text = f"{path}: cannot be written ({type(error).__name__}: {error})"
        raise CheckpointError(text, fix="check the space left") from error
    manifest.files.update(files)
    writing.finish([places], manifest)
    return manifest


def _entry_of_blocks(tensor: Lazy) -> Entry:
    """A tensor that is not in memory, in pieces without data."""
    below = (0,) * (len(tensor.shape) - 1)
    shapes = (((f, *below) if tensor.shape else (), tensor.shape_of(f, last)) for f, last in tensor.blocks())
    pieces = (Piece(at, torch.empty(shape, dtype=tensor.dtype, device="meta")) for at, shape in shapes)
    return Entry(tensor.shape, tensor.dtype, tuple(pieces))


def _rows_of(tensor: Lazy, piece: Piece) -> torch.Tensor:
    """The rows of a planned block, read now, as one row for the writer."""
    first, count = (piece.offsets[0], len(piece.tensor)) if piece.offsets else (0, 1)
    return tensor.rows(first, first + count).unsqueeze(0)


def as_failed_save(path: Path, error: TeFsdpError, save_id: str) -> CheckpointError:
    """The error of a save that failed somewhere in its second half."""
    why = "Nothing has appeared there of this save; earlier checkpoints are as they were"
    try:
        if read_manifest(path).save_id == save_id:  # a rank died after it had written
            why = "The checkpoint was whole by then, and lies there"
    except CheckpointError:
        pass  # there is none
    return CheckpointError(
        f"{path}: save failed {error}",
        why=why,
        fix="see the cause above; check that all ranks reach the directory, and the space left",
    )


def check_replicas(ranks: Ranks, part: Part, tensors: list[torch.Tensor], names: list[str]) -> None:
    """Raise on all ranks unless this rank's pieces that others hold too have the same bytes on all of them.

    Collective over the ranks: a round of a number for each set of ranks that hold the same, of which there are few; one
    more, of a number for each piece, only if they differ. Rank 0 alone needs ``names``, those of :class:`Plan`.

    Raises:
        CheckpointError: Names the tensors and the ranks.
    """
    if ranks.size == 1:
        return
    sums: dict[int, int] = {}

    def digests() -> dict[int, int]:
        found = checksums(tensors[at] for at in part.shared.values())
        sums.update(zip(part.shared, found, strict=True))
        return {group: digest(repr([sums[n] for n in numbers])) for group, numbers in part.groups.items()}

    def differ(seen: list[dict[int, int]]) -> list[bool]:
        first: dict[int, int] = {}
        same = all(first.setdefault(group, found) == found for one in seen for group, found in one.items())
        return [not same] * len(seen)

    def compare(seen: list[dict[int, int]]) -> list[None]:
        first: dict[int, tuple[int, int]] = {}
        differing: dict[str, set[tuple[int, int]]] = {}
        for rank, values in enumerate(seen):
            for number, value in values.items():
                holder, expected = first.setdefault(number, (rank, value))
                if value != expected:
                    differing.setdefault(names[number], set()).add((rank, holder))
        raise _drifted(differing)

    if ranks.round(digests, differ):
        ranks.round(lambda: sums, compare)


def _drifted(differing: dict[str, set[tuple[int, int]]]) -> CheckpointError:
    shown = []
    for name, pairs in sorted(differing.items()):
        who = [f"rank {rank} from rank {holder}" for rank, holder in sorted(pairs)]
        shown.append(f"{name} ({', '.join(who[:2])}{', ...' if len(who) > 2 else ''})")
    return CheckpointError(
        f"save: {len(shown)} tensor(s) differ between ranks that must hold the same: {shorten(shown)}",
        expected="equal values on all ranks",
        got="differing ones",
        why="The files hold one of them, and the others would be lost",
        fix="shard the model with te_fsdp.fully_shard; let the recipe reduce amaxes over all ranks; "
        "te_fsdp.broadcast_params(model, optimizer) makes drifted copies of a sharded model equal again; buffers that "
        "each rank makes from its own data (BatchNorm) must be made equal before, or not persistent; experts that "
        "every rank counts from 0 get global indices by te_fsdp.set_device_mesh(model, ..., ep_mesh=...)",
    )
