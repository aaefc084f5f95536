"""Contents of a checkpoint as rectangles of the original tensors, in the layout of a single process.

An entry is one tensor of the files. A rank has pieces of it: views of its local tensor, each with its place in the
original. A save reads the views, a load writes into them.

The user's ``extra`` is stored as JSON, with its tensors as entries, including the state of random generators.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from te_fsdp.checkpoint import values
from te_fsdp.errors import CheckpointError
from te_fsdp.upstream import te as _te

if TYPE_CHECKING:
    from te_fsdp.layout import Box

#: Layout of a grouped tensor in the manifest.
GROUPED = "grouped"


@dataclass(frozen=True)
class Piece:
    """A rectangle of the original: its offsets there, and the view of the rank's local tensor with its elements."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the files, in the shape of the original, with this rank's pieces, perhaps none.

    Pieces of several ranks must be equal, which is checked before they are written once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether the original has no elements, so that nothing is stored."""
        return math.prod(self.shape) == 0


def cut_entry(local: torch.Tensor, shape: Sequence[int], boxes: Iterable[Box]) -> Entry:
    """Return the entry of a tensor of this shape, of which this rank has these boxes in a plain local tensor."""
    assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
    if local.shape == torch.Size(shape):
        return whole_entry(local)
    local, own = local.detach(), tuple(local.shape)
    # Most shards are one box and need no view.
    pieces = tuple(Piece(b.original, local if b.sizes == own else local[b.local_slices()]) for b in boxes)
    return Entry(tuple(shape), local.dtype, pieces)


def whole_entry(tensor: torch.Tensor) -> Entry:
    """Return the entry of a tensor that every rank has completely."""
    shape = tuple(tensor.shape)
    return Entry(shape, tensor.dtype, (Piece((0,) * len(shape), tensor.detach()),))


def add_entry(entries: dict[str, Entry], key: str, entry: Entry) -> None:
    """Add an entry under a key; add the pieces to those of an existing entry."""
    have = entries[key].pieces if key in entries else ()
    entries[key] = replace(entry, pieces=(*have, *entry.pieces))


def views_of(
    leaves: list[torch.Tensor], entries: list[Entry]
) -> list[tuple[int, tuple[Any, ...] | None]] | None:
    """Return the places of the entries' pieces in the tensors that they are views of; ``None`` for other pieces."""
    if len(leaves) != len(entries):
        return None
    views: list[tuple[int, tuple[Any, ...] | None]] = []
    for at, (leaf, entry) in enumerate(zip(leaves, entries, strict=True)):
        for part in () if entry.is_empty else (piece.tensor for piece in entry.pieces):
            if part.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
                return None
            whole = part.shape == leaf.shape and part.data_ptr() == leaf.data_ptr()
            views.append((at, None if whole else (part.shape, part.stride(), part.storage_offset())))
    return views


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


def as_grouped_entry(entry: Entry, place: ExpertPlace | None) -> Entry:
    """Return an expert's entry as one of the stacked tensor; entries without a place are unchanged."""
    if place is None:
        return entry
    pieces = tuple(Piece((place.index, *p.offsets), p.tensor.unsqueeze(0)) for p in entry.pieces)
    return Entry((place.total, *entry.shape), entry.dtype, pieces)


def stacked_name(name: str) -> str:
    """Return the name of the stacked tensor, such as ``"experts.weight"`` for ``"experts.weight3"``."""
    return name.rstrip("0123456789")


def per_expert(described: dict[str, Any], place: ExpertPlace | None) -> dict[str, Any] | None:
    """Return the description of a saved state for one parameter; ``None`` if this expert has no such state.

    ``experts`` in it lists the experts that have the state, if each has its own, and ``scalar`` whether it is one
    number for each. A parameter without a place has all experts, and takes the number of the first, or is not grouped.
    The result has the shape of the parameter's own state, and ``at``, its place in the files' tensor (``None``: it is
    that tensor).
    """
    experts, shape = described.get("experts"), described.get("shape", [])
    if place is not None and experts is not None and place.index not in experts:
        return None
    if "dtype" not in described:
        return described
    if place is None:
        at = ExpertPlace(experts[0], shape[0]) if described.get("scalar") and experts else None
    else:
        # A number saved by a module with one parameter belongs to all experts.
        at = place if experts is not None or len(shape) > 1 else None
    return {**described, "shape": shape if at is None else shape[1:], "at": at}


def of_all_experts(described: dict[str, Any], place: ExpertPlace, whole: Sequence[int]) -> dict[str, Any]:
    """Invert :func:`per_expert` for a state of one expert, whose own weight has the shape ``whole``."""
    found = {**described, "experts": [place.index]}
    if "dtype" in described:
        shape = described["shape"]
        found |= {"shape": [place.total, *shape], "scalar": shape in ([], [1]) and shape != [*whole]}
    return found


def join_experts(states: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]], label: str) -> None:
    """Add descriptions of states of more experts to ``states``, by name of the state.

    Raise CheckpointError for the same state with another shape, dtype or value. ``label`` is the stacked tensor's name.
    """
    for key, described in more.items():
        both = states.setdefault(key, described), described
        (experts, kind), (others, other) = ((one["experts"], {**one, "experts": None}) for one in both)
        if kind != other:
            kinds = (", ".join(f"{k} {v}" for k, v in one.items() if k != "experts") for one in both)
            raise CheckpointError(
                f"optimizer.state.{label}.{key}: experts {experts} and {others}",
                expected="the same kind of state for all experts of a layer",
                got=" and ".join(kinds),
                fix="give all experts of a layer to one optimizer, with the same options",
            )
        states[key] = {**both[0], "experts": sorted({*experts, *others})}


# ----------------------------------------------------------------------------------------------------- the user's extra


# Single-key objects represent types that JSON lacks.
_TUPLE, _TENSOR, _PER_RANK = "te_fsdp.tuple", "te_fsdp.tensor", "te_fsdp.per_rank"
_RESERVED = (_TUPLE, _TENSOR, _PER_RANK, values.VALUE)


@dataclass(frozen=True)
class PerRank:
    """A value in ``extra`` that differs between ranks, of any kind, such as the state of random generators.

    On the mesh that saved it, each rank gets its own value back. On another mesh ``load`` warns and returns ``None``.
    """

    value: Any


def encode_extra(extra: object, rank: int) -> tuple[Any, dict[str, Any], dict[str, Entry]]:
    """Return ``extra`` as JSON, this rank's :class:`PerRank` values by place, and the tensors that it stores.

    Rank 0 stores the tensors of ``extra``, each rank those of its own values. Raise CheckpointError for values that
    cannot be stored.
    """
    if extra is not None and not isinstance(extra, Mapping):
        expected, fix = "a dict of plain values and tensors", 'extra={"step": step}'
        raise CheckpointError("save: extra", expected=expected, got=type(extra).__name__, fix=fix)
    own: dict[str, Any] = {}
    sharded: set[str] = set()
    encoded, entries = encode(dict(extra or {}), own=own, sharded=sharded)
    entries = {key: entry for key, entry in entries.items() if rank == 0 or key in sharded}
    for where, value in own.items():
        own[where], more = encode(value, f"{where}@{rank}")
        entries |= more
    return encoded, own, entries


def encode(
    value: Any,
    where: str = "extra",
    own: dict[str, Any] | None = None,
    sharded: set[str] | None = None,
) -> tuple[Any, dict[str, Entry]]:
    """Return the JSON form of a value, and the tensors that it refers to, whose keys begin with ``where``.

    ``own`` receives the values of :class:`PerRank` by place; the JSON form has the place only. ``sharded`` receives the
    keys of DTensors. Without these arguments they are refused, like all values that :data:`values.KNOWN` does not name:
    CheckpointError.
    """
    entries: dict[str, Entry] = {}

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, PerRank) and own is not None:
            own[where] = value.value
            return {_PER_RANK: where}
        if value is None or type(value) in (bool, int, float, str):
            return value
        is_local = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_local and value.layout == torch.strided and not (value.is_meta or _te.is_quantized(value)):
            entries[where] = whole_entry(value.resolve_conj().resolve_neg())
            return {_TENSOR: {"key": where, "shape": list(value.shape), "dtype": str(value.dtype)}}
        if isinstance(value, DTensor) and sharded is not None:
            sharded.add(where)
            pieces = tuple(Piece(*part) for part in values.shards_of(value, where))
            entries[where] = Entry(tuple(value.shape), value.dtype, pieces)
            return {_TENSOR: {"key": where, "shape": list(value.shape), "dtype": str(value.dtype)}}
        is_counter = type(value) is collections.Counter
        if (
            isinstance(value, dict)
            and not is_counter
            and all(type(k) is str and k not in _RESERVED for k in value)
        ):
            # Escaped as in a JSON pointer, so that different paths have different keys.
            escapes = str.maketrans({"~": "~0", "/": "~1", "@": "~2"})
            return {key: walk(item, f"{where}/{key.translate(escapes)}") for key, item in value.items()}
        if type(value) in (list, tuple):
            items = [walk(item, f"{where}/{index}") for index, item in enumerate(value)]
            return items if type(value) is list else {_TUPLE: items}
        found = values.encode_value(value, walk, where)
        if found is not None:
            return found
        raise CheckpointError(
            f"{where}: cannot be stored",
            expected=values.KNOWN,
            got=f"{type(value).__name__} {' '.join(repr(value).split()):.80}",
            fix="convert it, for example number.item() or str(path)",
        )

    return walk(value, where), entries


def _replaced(node: Any, marks: dict[str, Callable[[Any, str], Any]], where: str = "extra") -> Any:
    """Return a JSON form with the single-key objects of these marks replaced, given value and place."""
    if isinstance(node, list):
        return [_replaced(item, marks, f"{where}/{index}") for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    (mark,) = node if len(node) == 1 else (None,)
    if mark in marks:
        return marks[mark](node[mark], where)
    return {k: _replaced(v, marks, where if k == _TUPLE else f"{where}/{k}") for k, v in node.items()}


def join_ranks(encoded: Any, ranks: list[dict[str, Any]]) -> Any:
    """Insert the values of all ranks at the PerRank places, which must be the same, into rank 0's JSON form."""
    for rank, parts in enumerate(ranks):
        if parts.keys() != ranks[0].keys():
            raise CheckpointError(
                f"extra: PerRank values at different places on rank 0 and rank {rank}",
                expected=sorted(ranks[0]),
                got=sorted(parts),
                fix="give extra the same keys on all ranks",
            )
    return _replaced(encoded, {_PER_RANK: lambda place, _: {_PER_RANK: [parts[place] for parts in ranks]}})


def for_rank(encoded: Any, saved: dict[str, int], here: dict[str, int], rank: int) -> tuple[Any, list[str]]:
    """Return a rank's form of a saved ``extra``, and the places whose values have no rank on this mesh.

    The meshes are results of :func:`te_fsdp.checkpoint.model_state.mesh_sizes`: of the save, and of this job.
    """
    ranks = saved.get("ranks", 1)
    same = [a for a in saved.items() if a[1] != 1] == [a for a in here.items() if a[1] != 1]
    lost: list[str] = []

    def pick(values: list[Any], where: str) -> Any:
        if len(values) != ranks:
            raise CheckpointError(
                f"{where}: values of {len(values)} ranks",
                expected=f"of {ranks}, which saved the checkpoint",
                fix="load an earlier checkpoint: this one is damaged",
            )
        if not same:
            lost.append(where)
        return values[rank] if same else None

    return _replaced(encoded, {_PER_RANK: pick}), lost


def references(encoded: Any) -> list[dict[str, Any]]:
    """Return ``key``, ``shape`` and ``dtype`` of each tensor in an encoded value."""
    found: list[dict[str, Any]] = []
    _replaced(encoded, {_TENSOR: lambda described, _: found.append(described)})
    return found


def tensor_slots(encoded: Any) -> dict[str, Entry]:
    """Return new CPU tensors to load the tensors of an encoded value into, by key."""
    slots = {}
    for found in references(encoded):
        dtype = getattr(torch, found["dtype"].removeprefix("torch."))
        slots[found["key"]] = whole_entry(torch.empty(found["shape"], dtype=dtype, device="cpu"))
    return slots


def decode(encoded: Any, slots: dict[str, Entry]) -> Any:
    """Return the value that :func:`encode` was given, with its tensors from filled slots."""
    marks: dict[str, Callable[[Any, str], Any]] = {
        _TENSOR: lambda described, _: slots[described["key"]].pieces[0].tensor,
        _TUPLE: lambda items, where: tuple(_replaced(item, marks, where) for item in items),
        values.VALUE: lambda node, where: values.decode_value(
            node, lambda item: _replaced(item, marks, where)
        ),
    }
    return _replaced(encoded, marks)


def rng_state(tracker: Any = None) -> PerRank:
    """Return the state of this rank's random generators, for ``extra={"rng": ...}``. Local operation.

    Includes Python's ``random``, NumPy's global generator, torch's generators of the CPU and of the current GPU, and
    TransformerEngine's or Megatron's ``tracker`` of named states (``get_states``, tensors), if the model uses one. Save
    a generator that all ranks share (for example of the data order) as its ``get_state()`` tensor in ``extra``, which
    loads on any mesh.
    """
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": {"kind": kind, "words": torch.tensor([*map(int, keys)], device="cpu"), "rest": tuple(rest)},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if tracker is not None:
        state["tracker"] = dict(tracker.get_states())
    return PerRank(state)


def set_rng_state(state: Mapping[str, Any] | None, tracker: Any = None) -> None:
    """Restore the result of :func:`rng_state` on this rank, as ``load`` returned it. Local operation.

    Raises:
        CheckpointError: No state, because it was saved on another mesh, or none of a generator that is in use.
    """
    if state is None:
        raise CheckpointError(
            "set_rng_state: no state",
            why="States of ranks of another mesh do not belong to these ranks",
            fix="seed the ranks again, for example torch.manual_seed(seed + step) with a seed per rank",
        )
    if (tracker is None) != ("tracker" not in state):
        expected = "one here and at the save, or neither"
        raise CheckpointError("set_rng_state: tracker", expected=expected, fix="pass it to both")
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:  # early versions saved it only if it had been imported
        words = np.array(state["numpy"]["words"].tolist(), dtype=np.uint32)
        np.random.set_state((state["numpy"]["kind"], words, *state["numpy"]["rest"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if tracker is not None:
        tracker.set_states(dict(state["tracker"]))
