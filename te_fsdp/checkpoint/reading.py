"""Data that a load reads: checked rectangles of the files' tensors, kept on the host until they are copied.

A weight of a different dtype or format is converted through high precision (:class:`Conversion`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_fsdp.checkpoint.async_save import background
from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.host_memory import HostMemory
from te_fsdp.checkpoint.index import FIXED, Index, Rows, files_in
from te_fsdp.checkpoint.lazy_tensors import DcpRecord
from te_fsdp.checkpoint.manifest import DCP_METADATA, INDEX, Manifest, main_weight_of
from te_fsdp.checkpoint.model_state import OwnedPart, OwnedTensor
from te_fsdp.checkpoint.shard_files import CheckedFile, DamagedFileError, open_checked
from te_fsdp.checkpoint.tensor_entries import Shape, TensorEntry, per_expert
from te_fsdp.collectives.agreement import RankMessenger, digest, rank_messenger
from te_fsdp.errors import CheckpointError
from te_fsdp.features.main_params import MAIN
from te_fsdp.layout import Box, slices
from te_fsdp.quantized.components import covering, dequantize_box, needed_components
from te_fsdp.quantized.shards import quantize_with_shared_scale
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.te_formats import Block

#: A part of a tensor of the files: key, offsets, shape.
Rectangle = tuple[str, Shape, Shape]

#: Stored pieces up to which a loop is faster than arrays.
_FEW = 8
#: Bytes of adjacent pieces that are read together.
_RUN = 1 << 20
#: Reading and summing release the interpreter lock, so threads help if there are cores for them.
_MOST_THREADS = 4
#: Most ranks that share one read: more ranks need more messages.
_MOST_RANKS = 64
#: Prefixes of tensors that ranks can share; other tensors may belong to one rank.
_COMMON = ("model.", "optimizer.", "delayed.")


@dataclass
class Staged:
    """Data that were read for a load, on the host, until everything is copied to its destination."""

    #: Offsets and values of the parts of each rectangle.
    parts: dict[Rectangle, list[tuple[Shape, torch.Tensor]]] = field(default_factory=dict)

    def copy(self, rectangle: Rectangle, target: torch.Tensor) -> None:
        """Copy the data of a rectangle into memory of its shape. Local operation."""
        for offsets, values in self.parts.get(rectangle, []):
            target[slices(offsets, values.shape)].copy_(values)

    def new(self, rectangle: Rectangle, device: torch.device) -> torch.Tensor:
        """Return the data of a non-empty rectangle as a new tensor. Local operation."""
        result = torch.empty(rectangle[2], dtype=self.parts[rectangle][0][1].dtype, device=device)
        self.copy(rectangle, result)
        return result

    def fill(self, entries: dict[str, TensorEntry]) -> None:
        """Copy the data of entries into their memory. Local operation."""
        for key, entry in entries.items():
            for piece in entry.pieces:
                self.copy((key, *piece.chunk), piece.tensor)


# --- from the files of a DCP directory


#: A stored piece, and the boxes of it (``local``) to read for parts of rectangles (``original``).
_PieceReads = tuple[DcpRecord, list[tuple[Rectangle, Box]]]


# The index has the locations (:mod:`te_fsdp.checkpoint.index`). DCP's reader is not used: it reads a piece
# once for each rectangle, checks nothing, and writes into the model while it reads.
def read_stored(
    path: Path, manifest: Manifest, index: Index, required: list[Rectangle], into: Staged
) -> None:
    """Read rectangles from the files of a checkpoint into ``into``; each byte is read once. Local operation.

    Raise CheckpointError for files that are not as saved, or incomplete.
    """
    by_file = pieces_to_read(path, manifest, index, required)
    path, memory = manifest.data_folder(path), HostMemory(background().spare())
    with reading_threads() as pool:
        for name, pieces in by_file.items():
            try:
                with open_checked(path / name, manifest.files.get(name), manifest.save_id) as file:
                    reads = [pool.submit(_read, file, run, into, memory.take(n)) for run, n in _runs(pieces)]
                    # Results in file order: of several damaged pieces the first one is reported.
                    try:
                        for read in reads:
                            read.result()
                    finally:
                        # A read that has begun still writes into its buffer after another one has failed.
                        wait(read for read in reads if not read.cancel())
            except (OSError, DamagedFileError) as error:
                # An error of the file has the damaged piece's offset, which identifies its tensor for the message.
                begin = getattr(error, "begin", None)
                keys = [f", of {piece.key}" for piece, _ in pieces if piece.offset == begin]
                damaged(path, [f"{name}: {error}{''.join(keys)}"])


def reading_threads() -> ThreadPoolExecutor:
    """Return a pool of at most four threads, no more than this rank's share of the cores of its node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores_of_process = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return ThreadPoolExecutor(max(1, min(_MOST_THREADS, cores_of_process)), "te_fsdp load")


def pieces_to_read(
    path: Path, manifest: Manifest, index: Index, required: list[Rectangle]
) -> dict[str, list[_PieceReads]]:
    """Return the pieces that :func:`read_stored` reads, by file, in file order; raise the same. Local operation."""
    path = manifest.data_folder(path)
    unread: dict[str, list[Rectangle]] = {}
    for rectangle in required:
        unread.setdefault(rectangle[0], []).append(rectangle)
    by_file: dict[str, dict[int, _PieceReads]] = {}
    file_of = files_in(path)
    # The index is read in blocks of tensors, so all keys are requested together.
    for key, rows in index.rows([*unread]):
        covered, (shape, dtype) = 0, index.tensors[key]
        # A rectangle with a different number of dims overlaps nothing, and stays in the count of missing elements.
        for rectangle in (rectangle for rectangle in unread[key] if len(rectangle[1]) == len(shape)):
            for (number, begin, length), sizes, box in _overlapping(rows, rectangle):
                in_file = by_file.setdefault(index.files[number], {})
                if begin not in in_file:
                    file = file_of(index.files[number])
                    in_file[begin] = DcpRecord(file, key, begin, length, sizes, dtype), []
                in_file[begin][1].append((rectangle, box))
                covered += math.prod(box.sizes)
        # Stored pieces do not overlap (`is_tiling`), so a count of elements is enough.
        if covered == sum(math.prod(sizes) for _, _, sizes in unread[key]):
            del unread[key]
    if unread:
        said_by = INDEX if INDEX in manifest.files else DCP_METADATA
        damaged(path, [f"{said_by}: {next(iter(unread))} is missing, or incomplete"])
    return {name: [pieces[offset] for offset in sorted(pieces)] for name, pieces in by_file.items()}


def _overlapping(rows: Rows, rectangle: Rectangle) -> Iterator[tuple[tuple[int, int, int], Shape, Box]]:
    """Yield the stored pieces that overlap a rectangle: location, shape, and the box of both."""
    _, offsets, sizes = rectangle
    # A row has the file, the first byte, the length, then the offsets and the sizes of the piece.
    dims = len(offsets)
    if len(rows) > _FEW:
        begins, ends = rows[:, FIXED : FIXED + dims], rows[:, FIXED : FIXED + dims] + rows[:, FIXED + dims :]
        rows = rows[((begins < np.add(offsets, sizes)) & (ends > offsets)).all(axis=1)]
    for number, first, length, *box in rows.tolist():
        begins, piece_shape = box[:dims], tuple(box[dims:])
        low = tuple(map(max, begins, offsets))
        high = (min(a + n, b + m) for a, n, b, m in zip(begins, piece_shape, offsets, sizes, strict=True))
        own = tuple(b - a for a, b in zip(low, high, strict=True))
        if all(count > 0 for count in own):
            in_piece = tuple(a - b for a, b in zip(low, begins, strict=True))
            in_rectangle = tuple(a - b for a, b in zip(low, offsets, strict=True))
            yield (number, first, length), piece_shape, Box(in_rectangle, in_piece, own)


def _runs(pieces: list[_PieceReads]) -> Iterator[tuple[list[_PieceReads], int]]:
    """Yield runs of adjacent pieces, of at most :data:`_RUN` bytes or one larger piece, and their sizes."""
    first = end = start = 0
    for index, piece in enumerate(piece for piece, _ in pieces):
        if index > start and (piece.offset != end or piece.offset + piece.length - first > _RUN):
            yield pieces[start:index], end - first
            start = index
        first, end = piece.offset if index == start else first, piece.offset + piece.length
    yield pieces[start:], end - first


def _read(file: CheckedFile, run: list[_PieceReads], into: Staged, data: torch.Tensor) -> None:
    """Read and check adjacent pieces in one buffer, and keep the wanted parts."""
    lengths = [piece.length for piece, _ in run]
    file.read(run[0][0].offset, lengths, data)
    for (piece, parts), piece_data in zip(run, data.split(lengths), strict=True):
        # Adjacent pieces begin at any byte, where elements of several bytes cannot.
        piece_data = piece_data if len(run) == 1 else piece_data.clone()
        # A file without a table of checksums may have checksums of torch.save.
        tensor = piece.tensor_in(piece_data, check=file.pieces is None)
        is_kept = 2 * sum(math.prod(box.sizes) for _, box in parts) >= math.prod(piece.shape)
        for rectangle, box in parts:
            values = tensor[box.local_slices()]
            # A view keeps all of the piece in memory.
            into.parts[rectangle].append((box.original, values if is_kept else values.clone()))


# --- from other ranks


# [Note: read once] Ranks with copies of one shard (HSDP's replicas, all ranks without sharding) need the same
# data. If storage is the bottleneck, each of them reads a part, and sends it to the others once all ranks
# have read and checked theirs.
@dataclass
class ReadShare:
    """One rank's part of reading data for several ranks, and its exchange over te_fsdp's Gloo group."""

    ranks: RankMessenger  #: The world
    members: list[int]  #: Ranks that need the same data, in ascending order
    parts: list[dict[Rectangle, torch.dtype]]  #: Data that each of them reads for all
    index: int  #: This rank's number among them
    own: list[Rectangle]  #: Data that this rank reads: its part, and data for itself alone

    @classmethod
    def of(
        cls, ranks: RankMessenger, required: list[Rectangle], dtypes: Mapping[str, torch.dtype]
    ) -> ReadShare:
        """Find the ranks that need the same data. Collective over the ranks: a round of small messages.

        The parts have similar sizes, in the order of the request. Neighbors are adjacent in the files.
        """
        # In the order of the request, which ranks with the same data share.
        shared = {p: dtypes[p[0]] for p in required if p[0].startswith(_COMMON) and p[0] in dtypes}

        def ranks_with_same_reads(seen: list[int]) -> list[list[int]]:
            """Return, for each rank, the ranks with its number, limited so that each still reads a large part."""
            members_of: dict[int, list[int]] = {}
            result = []
            for rank, number in enumerate(seen):
                if len(members_of.setdefault(number, [])) == _MOST_RANKS:
                    members_of[number] = []
                members_of[number].append(rank)
                result.append(members_of[number])
            return result

        # Digests, because the lists of a large model have many MB on all ranks together.
        members = rank_messenger().round(lambda: digest(repr([*shared])), ranks_with_same_reads)
        parts: list[dict[Rectangle, torch.dtype]] = [{} for _ in members]
        ends = [*accumulate(math.prod(rectangle[2]) * dtype.itemsize for rectangle, dtype in shared.items())]
        for (rectangle, dtype), end in zip(shared.items(), ends, strict=True):
            parts[(end - 1) * len(members) // ends[-1]][rectangle] = dtype
        index = members.index(ranks.rank)
        own = [rectangle for rectangle in required if rectangle in parts[index] or rectangle not in shared]
        return cls(ranks, members, parts, index, own)

    def read(self, staged: Staged, read: Callable[[list[Rectangle]], None]) -> None:
        """Read this rank's data, each rectangle to send as one tensor, and allocate memory for the other ranks' parts.

        Local operation. It may fail: share the error with all ranks.
        """
        for rectangle, dtype in chain(*(part.items() for part in self.parts)):
            if rectangle not in self.parts[self.index]:
                values = torch.empty(rectangle[2], dtype=dtype, device="cpu")
                staged.parts[rectangle] = [((0,) * values.ndim, values)]
        read(self.own)
        for rectangle in self.parts[self.index]:
            staged.parts[rectangle] = [((0,) * len(rectangle[2]), staged.new(rectangle, torch.device("cpu")))]

    def exchange(self, staged: Staged) -> None:
        """Send this rank's part and receive the others'; raise CheckpointError if a rank has died.

        Collective over :attr:`members`, by sends and receives. In the k-th turn each rank sends to the k-th rank
        after it. If a rank has died, the others continue, because each would otherwise lose its neighbor as well.
        """
        group, count, lost = self.ranks.group, len(self.members), dict[int, str]()
        # Parts may differ in their number of rectangles, but all members make all turns.
        for rectangles in zip_longest(*self.parts):
            own = rectangles[self.index]
            sent: list[torch.Tensor] = []
            if own is not None and count > 1:
                sent.append(_bytes(staged.parts[own][0][1]))
            for turn in range(1, count):
                to, source = ((self.index + step) % count for step in (turn, -turn))
                calls, works = [], []
                # Posted before the send. Gloo sends may wait until the receiver has posted its buffer.
                if rectangles[source] is not None:
                    calls.append(
                        (group.recv, _bytes(staged.parts[rectangles[source]][0][1]), self.members[source])
                    )
                calls += [(group.send, data, self.members[to]) for data in sent]
                for start, data, other in calls:
                    try:
                        works.append((other, start([data], other, 1)))
                    except RuntimeError as error:  # gloo's
                        lost[other] = str(error)
                # A lost rank is not raised at once: this rank still has data that the others wait for.
                for other, work in works:
                    try:
                        work.wait()
                    except RuntimeError as error:
                        lost[other] = str(error)
        if lost:
            raise CheckpointError(
                f"load: rank(s) {', '.join(map(str, sorted(lost)))}",
                expected='a part of the data of each rank (read="once")',
                got=f"a rank that has ended: {next(iter(lost.values()))}",
                fix="restart the job",
            )


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor."""
    return values.view(-1).view(torch.uint8)


# --- weights that are converted


@dataclass
class Conversion:
    """Conversion of one parameter through high precision, with one rounding or quantization.

    Its values are, best first, the fp32 main weights of the checkpoint's optimizer; the saved values of a
    high-precision weight; the dequantized components of a quantized weight. A rank reads the blocks of components that
    cover its rectangles, which may cut through blocks.
    """

    owned: OwnedTensor
    source: str  #: Origin of the values, as text
    key: str  #: File key of the values, or the prefix of the components' keys
    #: Components that determine the values, with their blocks; "": the values themselves
    needed: dict[str, Block]
    format: str = ""  #: Format of the components

    @classmethod
    def of(cls, owned: OwnedTensor, saved: dict[str, Any], states: dict[str, Any]) -> Conversion:
        """Return the conversion of a saved parameter; raise CheckpointError for components without values."""
        main = main_weight_of(saved, states)
        has_main = main.get("dtype") == "float32" and main.get("shape") == saved["shape"]
        if has_main and per_expert(main, owned.expert) is not None:
            return cls(owned, "main weights", f"optimizer.state.{owned.key}.{MAIN}", {"": (1, 1)})
        if saved["format"] is None:
            return cls(owned, "saved values", f"model.{owned.key}", {"": (1, 1)})
        needed = needed_components(saved["format"], saved["components"], owned.fqn)
        return cls(owned, "dequantized values", f"model.{owned.key}:", needed, saved["format"])

    def reads(self) -> list[Rectangle]:
        """Return the rectangles of the files' tensors with the values. Local operation."""
        return [rectangle for _, _, rectangles in self._boxes() for rectangle in rectangles.values()]

    def value(self, staged: Staged) -> torch.Tensor:
        """Return the values that were read, float32 of the local shape. Local operation."""
        value = torch.empty(self.owned.local.shape, dtype=torch.float32, device=self.owned.local.device)
        for part, box, rectangles in self._boxes():
            read = {name: staged.new(rectangle, value.device) for name, rectangle in rectangles.items()}
            # Files have a leading dim of experts, and each part is one expert.
            if part.expert is not None:
                read = {name: own[0] for name, own in read.items()}
            weight = value if part.index is None else value[part.index]
            if self.format:
                read[""] = dequantize_box(self.format, read, self.needed, box.original, box.sizes)
            weight[box.local_slices()] = read[""]
        return value

    def _boxes(self) -> Iterator[tuple[OwnedPart, Box, dict[str, Rectangle]]]:
        """Yield this rank's boxes, of one expert's weight each, and for each component the blocks that cover it."""
        for part in self.owned.parts():
            for box in part.boxes:
                rectangles = {}
                for name, block in self.needed.items():
                    start, size = covering(box.original, box.sizes, block)
                    if part.expert is not None:
                        start, size = (part.expert.index, *start), (1, *size)
                    rectangles[name] = self.key + name, start, size
                yield part, box, rectangles

    def store(self, value: torch.Tensor, *, keep_delayed_scale: bool) -> None:
        """Set the parameter to its value (float32, of the local shape): rounded to its dtype, or quantized once.

        A scale of the unsharded weight is computed from its amax, unless delayed scaling's scale was loaded. Collective
        over the ranks with shards of a weight whose format has one scale per tensor, otherwise local.
        """
        module, local = self.owned.module, self.owned.local
        with torch.no_grad():
            if not _te.is_quantized(local):
                local.copy_(value)
                return
            # All ranks with a part of the weight take part, because one scale covers the unsharded weight.
            quantize_with_shared_scale(
                module, self.owned.name, local, value, keep_delayed_scale=keep_delayed_scale
            )
        self.owned.drop_derived_state()
        # Main weights are initialized from this value, which is more precise than the quantized weight.
        if _te.keeps_high_precision_value(module):
            parameter = self.owned.parameter
            _te.attach_high_precision_value(_torch.local_of(parameter), value.to(parameter.dtype).cpu())
