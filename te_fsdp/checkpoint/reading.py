"""What is read for a load: rectangles of the files' tensors, each checked, and kept on the host until it is copied.

A weight of another dtype or format goes through high precision (:class:`Conversion`).

The index says what lies where (:mod:`te_fsdp.checkpoint.index`). Reading is ours: DCP's reader takes a piece from its
file once for each rectangle, checks nothing, and writes into the model as it goes.

Ranks that hold copies of one shard (HSDP's replicas, all ranks without sharding) ask for the same. Where storage is the
limit, each of them reads a part of that, and sends it to the others, once all is read, and right, on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from te_fsdp.checkpoint import torch_files
from te_fsdp.checkpoint.async_save import HostMemory, background, threads_here
from te_fsdp.checkpoint.directory import damaged
from te_fsdp.checkpoint.index import FIXED, Index, Rows, files_in
from te_fsdp.checkpoint.manifest import DCP_METADATA, INDEX, Manifest
from te_fsdp.checkpoint.model_state import OwnedPart, OwnedTensor
from te_fsdp.checkpoint.shard_files import CheckedFile, DamagedFileError, elements_of, open_checked
from te_fsdp.checkpoint.tensor_entries import Entry, Piece, per_expert
from te_fsdp.collectives.agreement import RankMessenger, digest
from te_fsdp.errors import CheckpointError
from te_fsdp.features.main_params import MAIN
from te_fsdp.layout import Box, slices
from te_fsdp.quantized.components import covering, dequantize_box, drop_derived_state, needed_components
from te_fsdp.quantized.shards import quantize_with_shared_scale
from te_fsdp.upstream import te as _te

if TYPE_CHECKING:
    from te_fsdp.upstream.te_formats import Block

#: A part of a tensor of the files: its key, where it begins, its shape.
Rectangle = tuple[str, tuple[int, ...], tuple[int, ...]]

#: Stored pieces up to which a loop is faster than arrays.
_FEW = 8
#: Bytes of neighbouring pieces that are read together.
_RUN = 1 << 20
#: Reading and summing up release the interpreter, so that threads help where there are cores for them.
_MOST_THREADS = 4
#: Ranks beyond which others read the same once more: to have it from ever more ranks costs messages.
_MOST_RANKS = 64
#: Tensors of the model and the optimizer; further ones may be a rank's own.
_COMMON = ("model.", "optimizer.", "delayed.")


def rectangle(key: str, piece: Piece) -> Rectangle:
    """What of a tensor of the files a piece holds."""
    return key, tuple(piece.offsets), tuple(piece.tensor.shape)


@dataclass
class Staged:
    """What was read for a load, on the host, until all has been copied to where it belongs."""

    #: By rectangle: where each part of it begins, and its values.
    parts: dict[Rectangle, list[tuple[tuple[int, ...], torch.Tensor]]] = field(default_factory=dict)

    def copy(self, place: Rectangle, into: torch.Tensor) -> None:
        """Copy what was read of a rectangle into memory of its shape. Local operation."""
        for offsets, values in self.parts.get(place, []):
            into[slices(offsets, values.shape)].copy_(values)

    def new(self, place: Rectangle, device: torch.device) -> torch.Tensor:
        """What was read of a rectangle that is not empty, as a new tensor. Local operation."""
        into = torch.empty(place[2], dtype=self.parts[place][0][1].dtype, device=device)
        self.copy(place, into)
        return into

    def fill(self, entries: dict[str, Entry]) -> None:
        """Copy what was read into the memory of entries. Local operation."""
        for key, entry in entries.items():
            for piece in entry.pieces:
                self.copy(rectangle(key, piece), piece.tensor)


# --- from the files of a DCP directory


class _PieceOverlap(NamedTuple):
    """What of a stored piece a rectangle takes: its shape, and where it begins in either."""

    place: Rectangle
    shape: tuple[int, ...]
    in_piece: tuple[int, ...]
    in_place: tuple[int, ...]


#: A stored piece, and what is wanted of it.
_Wanted = tuple[torch_files.Piece, list[_PieceOverlap]]


def read_stored(
    path: Path,
    manifest: Manifest,
    index: Index,
    wanted: list[Rectangle],
    into: Staged,
    names: Mapping[str, str] | None = None,
) -> None:
    """Read rectangles from the files of a directory into ``into``. Local operation; each byte is read once.

    The manifest says what the files must be, the index what lies where. A plain directory's files are not in its
    manifest: ``names`` are their keys by ours. CheckpointError for files that are not as saved, or lack something.
    """
    by_file = pieces_to_read(path, manifest, index, wanted, names)
    path, memory = manifest.at(path), HostMemory(background().spare())
    with ThreadPoolExecutor(threads_here(_MOST_THREADS), "te_fsdp load") as pool:
        for name, pieces in by_file.items():
            try:
                # Sizes of a plain directory's files were compared with its metadata when it was opened.
                listed = manifest.files.get(name) if names is None else [(path / name).stat().st_size]
                with open_checked(path / name, listed, manifest.save_id) as file:
                    reads = [pool.submit(_read, file, run, into, memory.take(n)) for run, n in _runs(pieces)]
                    try:
                        for read in reads:
                            read.result()
                    finally:
                        wait(read for read in reads if not read.cancel())
            except (OSError, DamagedFileError) as error:
                begin = getattr(error, "begin", None)
                keys = [f", of {piece.window.key}" for piece, _ in pieces if piece.window.offset == begin]
                damaged(path, [f"{name}: {error}{''.join(keys)}"])


def pieces_to_read(
    path: Path,
    manifest: Manifest,
    index: Index,
    wanted: list[Rectangle],
    names: Mapping[str, str] | None = None,
) -> dict[str, list[_Wanted]]:
    """What is read by :func:`read_stored`, by file, in its order there. Takes and raises the same. Local operation."""
    path, names = manifest.at(path), names or {}
    missing: dict[str, list[Rectangle]] = {}
    for place in wanted:
        missing.setdefault(names.get(place[0], place[0]), []).append(place)
    found: dict[str, dict[int, _Wanted]] = {}
    file_of = files_in(path)
    heads: torch_files.Heads = {}
    for key, rows in index.rows([*missing]):
        covered, (shape, dtype) = 0, index.tensors[key]
        for place in (place for place in missing[key] if len(place[1]) == len(shape)):
            for (number, begin, length), sizes, part in _overlapping(rows, place):
                in_file = found.setdefault(index.files[number], {})
                if begin not in in_file:
                    window = torch_files.Window(file_of(index.files[number]), key, begin, length)
                    in_file[begin] = torch_files.Piece(window, sizes, dtype, heads), []
                in_file[begin][1].append(part)
                covered += math.prod(part.shape)
        if covered == sum(math.prod(sizes) for _, _, sizes in missing[key]):
            del missing[key]
    if missing:
        said_by = INDEX if INDEX in manifest.files else DCP_METADATA
        damaged(path, [f"{said_by}: {next(iter(missing))} is not there, or not all of it"])
    return {name: [at[offset] for offset in sorted(at)] for name, at in found.items()}


def _overlapping(
    rows: Rows, place: Rectangle
) -> Iterator[tuple[tuple[int, int, int], tuple[int, ...], _PieceOverlap]]:
    """The stored pieces that a rectangle takes something of: where each lies, its shape, and what of it."""
    _, offsets, sizes = place
    dims = len(offsets)
    if len(rows) > _FEW:
        begins, ends = rows[:, FIXED : FIXED + dims], rows[:, FIXED : FIXED + dims] + rows[:, FIXED + dims :]
        rows = rows[((begins < np.add(offsets, sizes)) & (ends > offsets)).all(axis=1)]
    for number, first, length, *box in rows.tolist():
        begins, shape = box[:dims], tuple(box[dims:])
        low = tuple(map(max, begins, offsets))
        high = (min(a + n, b + m) for a, n, b, m in zip(begins, shape, offsets, sizes, strict=True))
        own = tuple(b - a for a, b in zip(low, high, strict=True))
        if all(count > 0 for count in own):
            in_piece = tuple(a - b for a, b in zip(low, begins, strict=True))
            in_place = tuple(a - b for a, b in zip(low, offsets, strict=True))
            yield (number, first, length), shape, _PieceOverlap(place, own, in_piece, in_place)


def _runs(pieces: list[_Wanted]) -> Iterator[tuple[list[_Wanted], int]]:
    """Pieces that lie side by side in a file, together up to :data:`_RUN` bytes, and their bytes; larger ones alone."""
    first = end = cut = 0
    for at, window in enumerate(piece.window for piece, _ in pieces):
        if at > cut and (window.offset != end or window.offset + window.length - first > _RUN):
            yield pieces[cut:at], end - first
            cut = at
        first, end = window.offset if at == cut else first, window.offset + window.length
    yield pieces[cut:], end - first


def _read(file: CheckedFile, run: list[_Wanted], into: Staged, data: torch.Tensor) -> None:
    """Read and check neighbouring pieces, in memory for all of them, and keep what is wanted of them."""
    lengths = [piece.window.length for piece, _ in run]
    file.read(run[0][0].window.offset, lengths, data)
    # Where there is no table, there may be checksums that torch.save wrote.
    check = file.pieces is None
    for (piece, parts), own in zip(run, data.split(lengths), strict=True):
        # Neighbours begin anywhere, where elements of several bytes cannot.
        own = own if len(run) == 1 else own.clone()
        tensor = None if check else elements_of(own, piece.dtype, piece.shape)
        if tensor is None:
            tensor = piece.within(own, check=check)
        is_kept = 2 * sum(math.prod(part.shape) for part in parts) >= math.prod(piece.shape)
        for part in parts:
            values = tensor[slices(part.in_piece, part.shape)]
            # A view keeps all of the piece in memory.
            into.parts[part.place].append((part.in_place, values if is_kept else values.clone()))


# --- from other ranks


@dataclass
class ReadShare:
    """What one rank reads of what it and others want, and what it gets from them, over our own gloo group."""

    ranks: RankMessenger  #: The world
    members: list[int]  #: Ranks that want the same, in ascending order
    parts: list[dict[Rectangle, torch.dtype]]  #: What each of them reads for all
    me: int  #: This rank's number among them
    own: list[Rectangle]  #: What this rank reads: its part, and what it alone wants

    @classmethod
    def of(
        cls, ranks: RankMessenger, wanted: list[Rectangle], dtypes: Mapping[str, torch.dtype]
    ) -> ReadShare:
        """Find who wants the same as this rank. Collective over the ranks: a round of small messages.

        The parts have about as many bytes, each in the order of the whole: neighbours lie side by side in the files.
        """
        common = {p: dtypes[p[0]] for p in wanted if p[0].startswith(_COMMON) and p[0] in dtypes}
        members = ranks.round(lambda: digest(repr([*common])), _ranks_with_same_reads)
        parts: list[dict[Rectangle, torch.dtype]] = [{} for _ in members]
        ends = [*accumulate(math.prod(place[2]) * dtype.itemsize for place, dtype in common.items())]
        for (place, dtype), end in zip(common.items(), ends, strict=True):
            parts[(end - 1) * len(members) // ends[-1]][place] = dtype
        me = members.index(ranks.rank)
        own = [place for place in wanted if place in parts[me] or place not in common]
        return cls(ranks, members, parts, me, own)

    def provide(self, staged: Staged) -> None:
        """Have memory for what others send. Local operation; may fail, so that all ranks must hear of it."""
        others = self.parts[: self.me] + self.parts[self.me + 1 :]
        for place, dtype in chain(*(part.items() for part in others)):
            values = torch.empty(place[2], dtype=dtype, device="cpu")
            staged.parts[place] = [((0,) * values.ndim, values)]

    def exchange(self, staged: Staged) -> None:
        """Send what this rank has read, and take what the others have; CheckpointError if one has died. Collective.

        In the k-th turn each sends to the k-th rank after it.
        """
        group, count = self.ranks.group, len(self.members)
        for places in zip_longest(*self.parts):
            mine = places[self.me]
            sent: list[torch.Tensor] = []
            if mine is not None and count > 1:
                sent.append(_bytes(staged.new(mine, torch.device("cpu"))))
            for turn in range(1, count):
                to, source = ((self.me + step) % count for step in (turn, -turn))
                works = []
                try:
                    if places[source] is not None:
                        received = _bytes(staged.parts[places[source]][0][1])
                        works.append(group.recv([received], self.members[source], 1))
                    if sent:
                        works.append(group.send(sent, self.members[to], 1))
                    for work in works:
                        work.wait()
                except RuntimeError as lost:  # gloo's
                    raise CheckpointError(f"rank {self.ranks.rank} lost another rank: {lost}") from lost


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return values.view(-1).view(torch.uint8)


def _ranks_with_same_reads(seen: list[int]) -> list[list[int]]:
    """For each rank those with its number, at most so many that each still reads much of it."""
    alike: dict[int, list[int]] = {}
    found = []
    for rank, number in enumerate(seen):
        if len(alike.setdefault(number, [])) == _MOST_RANKS:
            alike[number] = []
        alike[number].append(rank)
        found.append(alike[number])
    return found


# --- weights that do not go from file to model as they are


@dataclass
class Conversion:
    """One parameter on its way through high precision, then one rounding or quantization.

    Its values are, best first, the fp32 main weights of the checkpoint's optimizer, of which the saved weights are
    roundings; the saved values, where the weight was saved in high precision; the saved components of a quantized
    weight, dequantized. Of these a rank reads the blocks that cover its rectangles, which may cut through blocks.
    """

    owned: OwnedTensor
    source: str  #: Where the values come from, in words
    key: str  #: File key of the values, or what those of components begin with
    needed: dict[str, Block]  #: Components that give the values, with their blocks; "": the values themselves
    format: str = ""  #: Of the components

    @classmethod
    def of(cls, owned: OwnedTensor, saved: dict[str, Any], states: dict[str, Any]) -> Conversion:
        """Of a parameter, as saved with or without optimizer state; CheckpointError for components without values."""
        main = states.get(MAIN, {})
        has_main = main.get("dtype") == "float32" and main.get("shape") == saved["shape"]
        if has_main and per_expert(main, owned.expert) is not None:
            return cls(owned, "main weights", f"optimizer.state.{owned.key}.{MAIN}", {"": (1, 1)})
        if saved["format"] is None:
            return cls(owned, "saved values", f"model.{owned.key}", {"": (1, 1)})
        needed = needed_components(saved["format"], saved["components"], owned.fqn)
        return cls(owned, "dequantized values", f"model.{owned.key}:", needed, saved["format"])

    def reads(self) -> list[Rectangle]:
        """What of the files' tensors gives the values. Local operation."""
        return [place for _, _, places in self._boxes() for place in places.values()]

    def value(self, staged: Staged) -> torch.Tensor:
        """The values, float32 of the local shape, of what was read. Local operation."""
        value = torch.empty(self.owned.local.shape, dtype=torch.float32, device=self.owned.local.device)
        for part, box, places in self._boxes():
            read = {name: staged.new(place, value.device) for name, place in places.items()}
            if part.place is not None:
                read = {name: own[0] for name, own in read.items()}
            weight = value if part.index is None else value[part.index]
            if self.format:
                read[""] = dequantize_box(self.format, read, self.needed, box.original, box.sizes)
            weight[box.local_slices()] = read[""]
        return value

    def _boxes(self) -> Iterator[tuple[OwnedPart, Box, dict[str, Rectangle]]]:
        """What this rank holds, of one expert's weight each, and of each component the blocks that cover it."""
        for part in self.owned.parts():
            for box in part.boxes:
                places = {}
                for name, block in self.needed.items():
                    start, size = covering(box.original, box.sizes, block)
                    if part.place is not None:
                        start, size = (part.place.index, *start), (1, *size)
                    places[name] = self.key + name, start, size
                yield part, box, places

    def store(self, value: torch.Tensor, *, keep_delayed_scale: bool) -> None:
        """Give the parameter its value (float32, of the local shape): rounded to its dtype, or quantized once.

        A scale of the whole weight comes from the amax of the whole weight, unless delayed scaling's was loaded:
        collective over the ranks that hold pieces of one whose format has one scale per tensor.
        """
        module, local = self.owned.module, self.owned.local
        with torch.no_grad():
            if not _te.is_quantized(local):
                local.copy_(value)
                return
            quantize_with_shared_scale(
                module, self.owned.name, local, value, keep_delayed_scale=keep_delayed_scale
            )
        drop_derived_state(local)
        if _te.keeps_high_precision_value(module):
            _te.attach_high_precision_value(local, value.to(self.owned.parameter.dtype).cpu())
