"""What goes into a checkpoint, as rectangles of the original tensors, in the layout of a single process.

An entry is one tensor of the files. A rank holds pieces of it: views of its own local tensor, each with its place in
the original. Writing reads the views, loading writes into them.

The weights of a layer's experts are one tensor of the files, with a leading expert dim under global indices, however
a module holds them: TE's ``GroupedLinear`` has a parameter per expert, or a single one for all.

    weight0 (out, in), weight1, ...    or    weight (experts, out, in)    ->    weight (experts, out, in)

What belongs to one expert (a scale, an optimizer's step) gets the same leading dim.

The user's ``extra`` goes to JSON, its tensors become entries; so does the state of random generators, for ``extra``.
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
    """A rectangle of the original: where it begins there, and the view of the rank's own tensor that holds it."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the files, in the shape of the original, with what this rank holds of it, perhaps nothing.

    What several ranks hold must be equal, which is checked before it is written once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the original has no element, so that there is nothing to store."""
        return math.prod(self.shape) == 0


def cut_entry(local: torch.Tensor, shape: Sequence[int], boxes: Iterable[Box]) -> Entry:
    """Entry of a tensor of this shape, of which this rank holds these boxes in a plain local tensor."""
    assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
    if local.shape == torch.Size(shape):
        return whole_entry(local)
    local, own = local.detach(), tuple(local.shape)
    # Most shards are one box: no view of all of them is made for it.
    pieces = tuple(Piece(b.original, local if b.sizes == own else local[b.local_slices()]) for b in boxes)
    return Entry(tuple(shape), local.dtype, pieces)


def whole_entry(tensor: torch.Tensor) -> Entry:
    """Entry of a tensor that every rank holds whole."""
    shape = tuple(tensor.shape)
    return Entry(shape, tensor.dtype, (Piece((0,) * len(shape), tensor.detach()),))


def add_entry(entries: dict[str, Entry], key: str, entry: Entry) -> None:
    """Add an entry under a key; of one that is there already, the pieces are kept beside the new ones."""
    have = entries[key].pieces if key in entries else ()
    entries[key] = replace(entry, pieces=(*have, *entry.pieces))


def views_of(
    leaves: list[torch.Tensor], entries: list[Entry]
) -> list[tuple[int, tuple[Any, ...] | None]] | None:
    """Where the pieces of entries lie in the tensors that they are of; ``None`` if they lie elsewhere."""
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


@dataclass(frozen=True)
class ExpertPlace:
    """Where one expert's own parameter lies in the tensor of all: its global index, and the number of experts."""

    index: int
    total: int


def as_grouped_entry(entry: Entry, place: ExpertPlace | None) -> Entry:
    """An entry of an expert's own tensor as one of the tensor of all; of other tensors, without a place, as it is."""
    if place is None:
        return entry
    pieces = tuple(Piece((place.index, *p.offsets), p.tensor.unsqueeze(0)) for p in entry.pieces)
    return Entry((place.total, *entry.shape), entry.dtype, pieces)


def stacked_name(name: str) -> str:
    """``"experts.weight"`` of ``"experts.weight3"``."""
    return name.rstrip("0123456789")


def per_expert(described: dict[str, Any], place: ExpertPlace | None) -> dict[str, Any] | None:
    """The manifest's description of a saved state, for one parameter; ``None`` if this expert has no such state.

    ``experts`` in it lists those that have the state, where each expert has its own, and ``scalar`` tells whether it is
    one number for each. A parameter without a place holds all experts, and takes the number of the first, or the tensor
    is no grouped one. Returned with the shape of the parameter's own state, and ``at``, its place in the files' tensor
    (``None``: it is that tensor).
    """
    experts, shape = described.get("experts"), described.get("shape", [])
    if place is not None and experts is not None and place.index not in experts:
        return None
    if "dtype" not in described:
        return described
    if place is None:
        at = ExpertPlace(experts[0], shape[0]) if described.get("scalar") and experts else None
    else:
        # Saved by a module with one parameter, a number is one for all.
        at = place if experts is not None or len(shape) > 1 else None
    return {**described, "shape": shape if at is None else shape[1:], "at": at}


def of_all_experts(described: dict[str, Any], place: ExpertPlace, whole: Sequence[int]) -> dict[str, Any]:
    """The inverse of :func:`per_expert`, for a state of one expert, whose own weight has the shape ``whole``."""
    found = {**described, "experts": [place.index]}
    if "dtype" in described:
        shape = described["shape"]
        found |= {"shape": [place.total, *shape], "scalar": shape in ([], [1]) and shape != [*whole]}
    return found


def join_experts(states: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]], label: str) -> None:
    """Add descriptions of states of some experts to ``states``, those of others; by name of the state.

    CheckpointError for the same state of another shape, dtype or value. ``label`` names the tensor of all.
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


# Single-key objects stand for what JSON lacks.
_TUPLE, _TENSOR, _PER_RANK = "te_fsdp.tuple", "te_fsdp.tensor", "te_fsdp.per_rank"
_RESERVED = (_TUPLE, _TENSOR, _PER_RANK, values.VALUE)


@dataclass(frozen=True)
class PerRank:
    """A value in ``extra`` of which every rank has its own, of any kind, such as the state of its random generators.

    On the mesh that saved it, each rank gets its own back. On another mesh nobody can say whose it would be: ``load``
    warns, and gives ``None`` in its place.
    """

    value: Any


def encode_extra(extra: object, rank: int) -> tuple[Any, dict[str, Any], dict[str, Entry]]:
    """A user's ``extra``: JSON form, the forms of this rank's values by their PerRank places, tensors that it stores.

    Rank 0 stores those of ``extra``, each rank those of its own values. CheckpointError for what cannot be stored.
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
    """JSON form of a value, and the tensors that it refers to, whose keys begin with ``where``.

    ``own`` takes what :class:`PerRank` values hold, by place; the JSON form names the place alone. ``sharded`` takes
    the keys of DTensors. Without these arguments they are refused, as all is that :data:`values.KNOWN` does not name:
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
            # Escaped as in a JSON pointer, so that no two paths give one key.
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
    """A JSON form in which other things stand for the single-key objects with these marks, given value and place."""
    if isinstance(node, list):
        return [_replaced(item, marks, f"{where}/{index}") for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    (mark,) = node if len(node) == 1 else (None,)
    if mark in marks:
        return marks[mark](node[mark], where)
    return {k: _replaced(v, marks, where if k == _TUPLE else f"{where}/{k}") for k, v in node.items()}


def join_ranks(encoded: Any, ranks: list[dict[str, Any]]) -> Any:
    """Put what each rank holds at the PerRank places, which must be the same, into rank 0's JSON form."""
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
    """A rank's own form of a saved ``extra``, and the places whose values have no home on this mesh (:class:`PerRank`).

    Meshes are as :func:`te_fsdp.checkpoint.model_state.mesh_sizes` gives them: the one that saved, and this one.
    """
    ranks = saved.get("ranks", 1)
    same = [a for a in saved.items() if a[1] != 1] == [a for a in here.items() if a[1] != 1]
    lost: list[str] = []

    def pick(values: list[Any], where: str) -> Any:
        if len(values) != ranks:
            raise CheckpointError(
                f"{where}: values of {len(values)} ranks",
                expected=f"of {ranks}, which saved the checkpoint",
                fix="the checkpoint is damaged, load an earlier one",
            )
        if not same:
            lost.append(where)
        return values[rank] if same else None

    return _replaced(encoded, {_PER_RANK: pick}), lost


def references(encoded: Any) -> list[dict[str, Any]]:
    """What an encoded value says of each tensor in it: ``key``, ``shape``, ``dtype``."""
    found: list[dict[str, Any]] = []
    _replaced(encoded, {_TENSOR: lambda described, _: found.append(described)})
    return found


def tensor_slots(encoded: Any) -> dict[str, Entry]:
    """New CPU tensors to load the tensors of an encoded value into, by key."""
    slots = {}
    for found in references(encoded):
        dtype = getattr(torch, found["dtype"].removeprefix("torch."))
        slots[found["key"]] = whole_entry(torch.empty(found["shape"], dtype=dtype, device="cpu"))
    return slots


def decode(encoded: Any, slots: dict[str, Entry]) -> Any:
    """The value that :func:`encode` was given, its tensors taken from filled slots."""
    marks: dict[str, Callable[[Any, str], Any]] = {
        _TENSOR: lambda described, _: slots[described["key"]].pieces[0].tensor,
        _TUPLE: lambda items, where: tuple(_replaced(item, marks, where) for item in items),
        values.VALUE: lambda node, where: values.decode_value(
            node, lambda item: _replaced(item, marks, where)
        ),
    }
    return _replaced(encoded, marks)


def rng_state(tracker: Any = None) -> PerRank:
    """State of this rank's random generators, to be saved in ``extra={"rng": ...}``. Local operation.

    Covers Python's ``random``, NumPy's global generator, torch's of the CPU and of the current
    GPU, and TransformerEngine's or Megatron's ``tracker`` of named states (``get_states``, tensors), if the model uses
    one. A generator that all ranks share (the order of the data, say) does not belong here: its ``get_state()`` is a
    tensor that ``extra`` takes as it is, and that loads on any mesh.
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
    """Put back what :func:`rng_state` found on this rank, as ``load`` returned it. Local operation.

    Raises:
        CheckpointError: No state, since it was saved on another mesh, or none of a generator that is in use.
    """
    if state is None:
        raise CheckpointError(
            "set_rng_state: no state",
            why="States of single ranks, saved on another mesh, belong to none of these ranks",
            fix="seed the ranks anew, for example torch.manual_seed(seed + step) with a seed per rank",
        )
    if (tracker is None) != ("tracker" not in state):
        expected = "one here and at the save, or neither"
        raise CheckpointError("set_rng_state: tracker", expected=expected, fix="pass it to both")
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:  # not where it had not been imported
        words = np.array(state["numpy"]["words"].tolist(), dtype=np.uint32)
        np.random.set_state((state["numpy"]["kind"], words, *state["numpy"]["rest"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if tracker is not None:
        tracker.set_states(dict(state["tracker"]))
