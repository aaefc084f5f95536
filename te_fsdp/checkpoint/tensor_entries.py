"""Contents of a checkpoint as rectangles of the original tensors, in the layout of a single process.

An entry is one tensor of the files. A rank has pieces of it: views of its local tensor, each with its place in the
original. A save reads the views, a load writes into them.

Each rank describes its pieces to the others (:data:`RankTensors`). :func:`holders_of` joins the descriptions of all
ranks and checks that they tile the tensors. Of the ranks with copies of one piece, :func:`lightest` chooses the one
that writes or sends it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch

from te_fsdp.errors import CheckpointError, shorten
from te_fsdp.layout import Box
from te_fsdp.upstream import te as _te

#: Layout of a grouped tensor in the manifest.
GROUPED = "grouped"
#: Shape of a tensor, or an offset in it.
Shape = tuple[int, ...]
#: A rectangle of a tensor, as offsets and sizes.
Chunk = tuple[Shape, Shape]
#: A rank's tensors: key, shape, dtype and chunks of its pieces. Pieces are numbered from 0 over all tensors.
RankTensors = list[tuple[str, Shape, torch.dtype, list[Chunk]]]
#: An array of int64 with a row for each piece.
Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Piece:
    """A rectangle of the original: its offsets there, and the view of the rank's local tensor with its elements."""

    offsets: Shape
    tensor: torch.Tensor

    @property
    def chunk(self) -> Chunk:
        """Return offsets and sizes of the rectangle in the original tensor."""
        return self.offsets, tuple(self.tensor.shape)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the files, in the shape of the original, with this rank's pieces, perhaps none.

    Pieces of several ranks must be equal, which is checked before they are written once.
    """

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether the original has no elements, so that nothing is stored."""
        return math.prod(self.shape) == 0

    @classmethod
    def replicated(cls, tensor: torch.Tensor) -> TensorEntry:
        """Return the entry of a tensor that is replicated on every rank."""
        shape = tuple(tensor.shape)
        return cls(shape, tensor.dtype, (Piece((0,) * len(shape), tensor.detach()),))

    @classmethod
    def cut(cls, local: torch.Tensor, shape: Sequence[int], boxes: Iterable[Box]) -> TensorEntry:
        """Return the entry of an unsharded tensor of a shape; a plain local tensor contains the given boxes of it."""
        assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
        if local.shape == torch.Size(shape):
            return cls.replicated(local)
        local, full = local.detach(), tuple(local.shape)
        # Most shards are one box and need no view.
        pieces = tuple(
            Piece(b.original, local if b.sizes == full else local[b.local_slices()]) for b in boxes
        )
        return cls(tuple(shape), local.dtype, pieces)

    def grouped(self, expert: ExpertPlace | None) -> TensorEntry:
        """Return the entry of an expert as an entry of the stacked tensor; unchanged for ``None``."""
        if expert is None:
            return self
        pieces = tuple(Piece((expert.index, *p.offsets), p.tensor.unsqueeze(0)) for p in self.pieces)
        return TensorEntry((expert.total, *self.shape), self.dtype, pieces)


def add_entry(entries: dict[str, TensorEntry], key: str, entry: TensorEntry) -> None:
    """Add an entry under a key, or its pieces to the entry that exists there."""
    present = entries[key].pieces if key in entries else ()
    entries[key] = replace(entry, pieces=(*present, *entry.pieces))


def views_of(
    leaves: list[torch.Tensor], entries: list[TensorEntry]
) -> list[tuple[int, tuple[Any, ...] | None]] | None:
    """Return each piece as a view of one of ``leaves`` (index and layout); ``None`` if a piece is not a view."""
    if len(leaves) != len(entries):
        return None
    views: list[tuple[int, tuple[Any, ...] | None]] = []
    for index, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
        for tensor in () if entry.is_empty else (piece.tensor for piece in entry.pieces):
            # A piece in other memory is a copy, which would be stale in the next save.
            if tensor.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
                return None
            is_leaf = tensor.shape == leaf.shape and tensor.data_ptr() == leaf.data_ptr()
            view = None if is_leaf else (tensor.shape, tensor.stride(), tensor.storage_offset())
            views.append((index, view))
    return views


# --- equal names


def refuse_equal_names(names: Iterable[str], shared: Iterable[str], stages: str | None) -> None:
    """Raise CheckpointError for several tensors of one name. Local operation.

    ``shared`` are patterns of allowed names. ``stages`` describes the stages in the error; ``None``: one model.
    """
    patterns, counts = tuple(shared), Counter(names)
    repeated = [name for name, count in counts.items() if count > 1]
    repeated = [name for name in repeated if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not repeated:
        return
    why = "The files store one tensor per name, so that all others would be lost"
    if stages is None:
        raise CheckpointError(
            f"checkpoint: {len(repeated)} name(s) shared by several tensors of the model: {shorten(repeated)}",
            expected="a separate name for each, without the parts that torch.compile and activation checkpointing "
            "insert",
            why=why,
            fix="rename a module: omit dots, _orig_mod and _checkpoint_wrapped_module",
        )
    raise CheckpointError(
        f"save: {len(repeated)} tensor name(s) are repeated in {stages}: {shorten(repeated)}",
        expected="every name in one stage",
        got="layers that each stage numbers from 0, or tensors that stages share",
        why=why,
        fix="give a stage the names of the unsplit model: omit the other layers from an nn.ModuleDict, or set them to "
        'None in a copy of the model; save(..., shared=["embedding.weight"]) names what stages share, which must be '
        "equal and is stored once",
    )


def merge_copies(entries: dict[str, TensorEntry]) -> bool:
    """Remove the pieces that a rank has twice, because of ``shared`` names; return whether there were any. Local.

    Raise CheckpointError for copies that differ.
    """
    has_copies = False
    for key, entry in entries.items():
        by_chunk = {piece.chunk: piece for piece in reversed(entry.pieces)}
        if len(by_chunk) == len(entry.pieces):
            continue
        has_copies = True
        for piece in entry.pieces:
            copies = [piece.tensor, by_chunk[piece.chunk].tensor]
            first, second = (tensor.contiguous().flatten().view(torch.uint8) for tensor in copies)
            if not torch.equal(first, second):
                raise CheckpointError(
                    f"save: {key} differs between stages of one rank",
                    expected="equal values of a tensor that stages share, because it is stored once",
                    fix="synchronize it after each step",
                )
        entries[key] = replace(entry, pieces=tuple(by_chunk.values()))
    return has_copies


# --- ranks with a piece


def pieces_held_by_rank(entries: Mapping[str, TensorEntry]) -> RankTensors:
    """Return the description of a rank's entries for rank 0. Local operation."""
    return [(key, e.shape, e.dtype, [piece.chunk for piece in e.pieces]) for key, e in entries.items()]


class Holders(NamedTuple):
    """An unsharded tensor and the ranks that have its pieces."""

    shape: Shape
    dtype: torch.dtype
    pieces: dict[Chunk, list[tuple[int, int]]]  #: Ranks with each, in order, and the piece's number there
    boxes: Rows  #: The chunks in the same order: (pieces, 2, dims)


def holders_of(call: str, ranks: Iterable[RankTensors]) -> dict[str, Holders]:
    """Return every tensor of the ranks with its holders. Local operation.

    Raise CheckpointError, which names ``call``, if the pieces do not cover a tensor, each element once.
    """
    described: dict[str, tuple[Shape, torch.dtype]] = {}
    pieces: dict[str, dict[Chunk, list[tuple[int, int]]]] = {}
    for rank, rank_pieces in enumerate(ranks):
        number = 0
        for key, shape, dtype, chunks in rank_pieces:
            described.setdefault(key, (shape, dtype))
            holders = pieces.setdefault(key, {})
            for chunk in chunks:
                # Ranks with the same chunk have replicas of one piece.
                holders.setdefault(chunk, []).append((rank, number))
                number += 1
    results, problems = dict[str, Holders](), list[str]()
    for key, holders in pieces.items():
        shape, dtype = described[key]
        boxes = boxes_of(holders, shape)
        results[key] = Holders(shape, dtype, holders, boxes)
        if not is_tiling(shape, boxes):
            problems.append(
                f"{key} ({boxes[:, 1].prod(axis=1).sum()} of {np.prod(shape, dtype=np.int64)} elements)"
            )
    if problems:
        raise CheckpointError(
            f"{call}: the pieces of {shorten(problems)}",
            expected="pieces that together cover each tensor, each element once",
            got="gaps or overlaps",
            fix="shard the model with te_fsdp.fully_shard; all ranks must make the call with the same model",
        )
    return results


def lightest(
    holders: Sequence[tuple[int, int]], load: MutableMapping[int, int], count: int
) -> tuple[int, int]:
    """Return the rank with the fewest bytes so far, with its number of the piece; add the piece's bytes to its load.

    Replicas are spread over their ranks in this way, so that no rank writes or sends all of them.
    """
    chosen = min(holders, key=lambda holder: load[holder[0]])
    load[chosen[0]] += count
    return chosen


def boxes_of(chunks: Iterable[Chunk], shape: Sequence[int]) -> Rows:
    """Return the offsets and sizes of pieces as an int64 array of shape (pieces, 2, dims)."""
    rows = list(chunks)
    return np.array(rows, dtype=np.int64).reshape(len(rows), 2, len(shape))


def is_tiling(shape: Sequence[int], boxes: Rows) -> bool:
    """Return whether boxes cover a shape, each element once, by counting cells of the grid of all edges.

    ``boxes`` are those of :func:`boxes_of`; empty ones do not count.
    """
    if len(boxes) == 1 and boxes[0].tolist() == [[0] * len(shape), [*shape]]:
        return True  # most tensors
    boxes = boxes[boxes[:, 1].all(axis=1)]
    if 0 in shape or not len(shape) or not len(boxes):
        return 0 in shape and not len(boxes)
    starts, ends = boxes[:, 0], boxes.sum(axis=1)
    # A grid of all edges, because the pieces of a tensor are few and its elements are many.
    edges = [np.unique(np.concatenate([starts[:, d], ends[:, d]])) for d in range(len(shape))]
    # The grid must begin and end with the tensor, or parts of it have no cell.
    if any(e[0] != 0 or e[-1] != size for e, size in zip(edges, shape, strict=True)):
        return False
    first = [np.searchsorted(e, starts[:, d]) for d, e in enumerate(edges)]
    last = [np.searchsorted(e, ends[:, d]) for d, e in enumerate(edges)]
    covered = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    if all((b - a == 1).all() for a, b in zip(first, last, strict=True)):  # a cell for each, as a rule
        np.add.at(covered, tuple(first), 1)
    else:
        for low, high in zip(zip(*first, strict=True), zip(*last, strict=True), strict=True):
            covered[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] += 1
    return bool((covered == 1).all())


# --- experts


# [Note: one tensor for all experts] The weights of a layer's experts are one tensor of the files, with a
# leading expert dim under global indices. TE's ``GroupedLinear`` has a parameter per expert, or a single one
# for all::
#
#     weight0 (out, in), weight1, ...    or    weight (experts, out, in)    ->    weight (experts, out, in)
#
# State of one expert (a scale, an optimizer's step) has the same leading dim.
@dataclass(frozen=True)
class ExpertPlace:
    """Place of one expert's parameter in the stacked tensor: its global index, and the number of experts."""

    index: int
    total: int

    def of_all_experts(self, described: dict[str, Any], weight: Sequence[int]) -> dict[str, Any]:
        """Invert :func:`per_expert` for a state of this expert; ``weight`` is the shape of its weight."""
        result = {**described, "experts": [self.index]}
        if "dtype" in described:
            shape = described["shape"]
            result |= {"shape": [self.total, *shape], "scalar": shape in ([], [1]) and shape != [*weight]}
        return result


def stacked_name(name: str) -> str:
    """Return the name of the stacked tensor, such as ``"experts.weight"`` for ``"experts.weight3"``."""
    return name.rstrip("0123456789")


def per_expert(described: dict[str, Any], expert: ExpertPlace | None) -> dict[str, Any] | None:
    """Return the description of a saved state for one parameter; ``None`` if this expert has no such state.

    ``experts`` in it lists the experts that have the state, if each has its own, and ``scalar`` whether it is one
    number for each. A parameter without an expert (``None``) has all experts, and takes the number of the first, or is
    not grouped. The result has the shape of the parameter's own state, and ``expert``, its place in the files' tensor
    (``None``: it is that tensor).
    """
    experts, shape = described.get("experts"), described.get("shape", [])
    if expert is not None and experts is not None and expert.index not in experts:
        return None
    if "dtype" not in described:
        return described
    if expert is None:
        state_expert = ExpertPlace(experts[0], shape[0]) if described.get("scalar") and experts else None
    else:
        # A number saved by a module with one parameter belongs to all experts.
        state_expert = expert if experts is not None or len(shape) > 1 else None
    return {**described, "shape": shape if state_expert is None else shape[1:], "expert": state_expert}


def join_experts(states: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]], label: str) -> None:
    """Add the descriptions of further experts' states to ``states``, by name of the state.

    Raise CheckpointError for a state that differs in shape, dtype or value. ``label`` is the stacked tensor's name.
    """
    for key, described in new.items():
        present = states.setdefault(key, described)
        experts = present["experts"], described["experts"]
        # Everything except the list of experts must be equal: the files have one description for all.
        kinds = [{**description, "experts": None} for description in (present, described)]
        if kinds[0] != kinds[1]:
            formatted = (", ".join(f"{k} {v}" for k, v in kind.items() if k != "experts") for kind in kinds)
            raise CheckpointError(
                f"optimizer.state.{label}.{key}: experts {experts[0]} and {experts[1]}",
                expected="the same kind of state for all experts of a layer",
                got=" and ".join(formatted),
                fix="pass all experts of a layer to one optimizer, with the same options",
            )
        states[key] = {**present, "experts": sorted({*experts[0], *experts[1]})}
