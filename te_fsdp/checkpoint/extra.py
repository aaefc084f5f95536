"""JSON form of values that users store: ``extra``, options of optimizers.

``extra`` takes the values that ``torch.load(weights_only=True)`` returns. Values without a JSON form become an object
with one key::

    {"te_fsdp.tuple": [1, 2]}
    {"te_fsdp.tensor": {"key": "extra/order", "shape": [8], "dtype": "torch.int64"}}
    {"te_fsdp.per_rank": [value of rank 0, value of rank 1]}
    {"te_fsdp.value": ["Counter", [[2, 1], [5, 1]]]}    dicts with keys of any kind, bytes, sets, numbers of NumPy
    {"te_fsdp.value": ["torch.save", {"te_fsdp.tensor": ...}]}    the bytes of a file: sparse tensors and others

A DTensor is stored in shards, each element once, and is loaded as a full tensor on the CPU, because the mesh of the
load may be different.
"""

from __future__ import annotations

import base64
import collections
import io
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from te_fsdp.checkpoint.shard_files import damaged_value
from te_fsdp.checkpoint.tensor_entries import Piece, TensorEntry
from te_fsdp.errors import CheckpointError
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

_TUPLE, _TENSOR, _PER_RANK, _VALUE = "te_fsdp.tuple", "te_fsdp.tensor", "te_fsdp.per_rank", "te_fsdp.value"
_MARKS = (_TUPLE, _TENSOR, _PER_RANK, _VALUE)
#: Accepted values, for error messages.
_KNOWN = (
    "a value that torch.load(weights_only=True) reads, a NumPy number, a tensor or DTensor in high precision, or a "
    "dict, Counter, list, tuple or set of these"
)
#: Types that JSON lacks -> their content, which is encoded like any value, and the inverse.
_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    bytearray: (
        lambda value: base64.b64encode(value).decode(),
        lambda text: bytearray(base64.b64decode(text)),
    ),
    set: (list, set),
    frozenset: (list, frozenset),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    torch.dtype: (lambda value: str(value).removeprefix("torch."), lambda name: getattr(torch, name)),
    torch.device: (str, torch.device),
    torch.Size: (list, torch.Size),
}
#: As in a JSON pointer, so that different paths have different keys.
_ESCAPES = {"/": "~1", "@": "~2", "~": "~0"}
_NAMED = (collections.Counter, collections.OrderedDict)
_MAPS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (dict, *_NAMED)}
#: Factories of a ``defaultdict`` by their names, which the files have.
_FACTORIES = {str(f and f.__name__): f for f in (None, bool, int, float, str, tuple, list, dict, set)}


@dataclass(frozen=True)
class PerRank:
    """A value in ``extra`` that differs between ranks, of any kind, such as the state of random generators.

    On the mesh that saved it, each rank gets its own value back. On other meshes ``load`` warns and returns ``None``.
    """

    value: Any


def encode_extra(
    extra: object, rank: int
) -> tuple[Any, tuple[dict[str, Any], dict[str, Any]], dict[str, TensorEntry]]:
    """Return ``extra`` as JSON, this rank's own values by place, and the tensors that it stores.

    The own values are those of :class:`PerRank`, and the JSON form of its DTensors. Rank 0 stores the tensors of
    ``extra``, each rank those of its own values. Raise CheckpointError for values that cannot be stored.
    """
    if extra is not None and not isinstance(extra, Mapping):
        expected, fix = "a dict of plain values and tensors", 'extra={"step": step}'
        raise CheckpointError("save: extra", expected=expected, got=type(extra).__name__, fix=fix)
    own: dict[str, Any] = {}
    sharded: dict[str, Any] = {}
    encoded, entries = encode(dict(extra or {}), own=own, sharded=sharded)
    # Plain tensors are those of rank 0, as all values of ``extra`` except PerRank ones.
    entries = {key: entry for key, entry in entries.items() if rank == 0 or key in sharded}
    for where, value in own.items():
        # The rank is part of the key, or the ranks would write one tensor with different values.
        own[where], value_entries = encode(value, f"{where}@{rank}")
        entries |= value_entries
    return encoded, (own, sharded), entries


def encode(
    value: Any,
    where: str = "extra",
    own: dict[str, Any] | None = None,
    sharded: dict[str, Any] | None = None,
) -> tuple[Any, dict[str, TensorEntry]]:
    """Return the JSON form of a value, and the tensors that it refers to, whose keys begin with ``where``.

    ``own`` receives the values of :class:`PerRank` by place; the JSON form has the place only. ``sharded`` receives the
    JSON form of DTensors by place. Without these arguments they are refused, like all values that :data:`_KNOWN` does
    not name: CheckpointError.
    """
    entries: dict[str, TensorEntry] = {}

    def walk(value: Any, where: str) -> Any:
        if isinstance(value, PerRank) and own is not None:
            own[where] = value.value
            return {_PER_RANK: where}
        # By exact type: a subclass, such as an IntEnum, would lose its class without an error.
        if value is None or type(value) in (bool, int, float, str):
            return value
        entry: TensorEntry | None = None
        if isinstance(value, DTensor) and sharded is not None:
            entry = _sharded_entry(value, where)
        elif (
            isinstance(value, torch.Tensor)
            and not (isinstance(value, DTensor) or value.is_meta or _te.is_quantized(value))
            and value.layout == torch.strided
            and not (value.is_nested or value.is_quantized)  # torch's own quantization
        ):
            entry = TensorEntry.replicated(value.resolve_conj().resolve_neg())
        if entry is not None:
            entries[where] = entry
            mark = {_TENSOR: {"key": where, "shape": list(entry.shape), "dtype": str(entry.dtype)}}
            if isinstance(value, DTensor) and sharded is not None:
                sharded[where] = mark
            return mark
        # A Counter is a dict, too. It is written with its class name. Other subclasses load as dicts.
        is_plain_dict = isinstance(value, dict) and type(value) not in _NAMED
        is_plain_dict = is_plain_dict and not isinstance(value, collections.defaultdict)
        # A key that is one of the marks would be read as a mark, so such a dict is written as pairs.
        if is_plain_dict and all(type(k) is str and k not in _MARKS for k in value):
            escapes = str.maketrans(_ESCAPES)
            return {key: walk(item, f"{where}/{key.translate(escapes)}") for key, item in value.items()}
        if type(value) in (list, tuple):
            items = [walk(item, f"{where}/{index}") for index, item in enumerate(value)]
            return items if type(value) is list else {_TUPLE: items}
        return _encode_other(value, walk, where)

    try:
        return walk(value, where), entries
    except RecursionError as error:
        raise CheckpointError(
            f"{where}: nested containers",
            expected="a finite number of levels",
            got="a value that contains itself, or too many levels for Python",
            fix="store its parts under separate names",
        ) from error


def encode_numbers(value: Any, where: str) -> Any:
    """Return the JSON form of a value, with tensors of one element as numbers; CheckpointError for larger ones."""
    encoded, entries = encode(value, where)

    def number(described: dict[str, Any], _: str) -> Any:
        tensor = entries[described["key"]].pieces[0].tensor
        if tensor.numel() != 1:
            raise CheckpointError(
                f"{described['key']}: a tensor of shape {described['shape']}",
                expected="a plain value, or a tensor of one element",
                fix="keep it out of the optimizer, or save it in extra",
            )
        return tensor.item()

    return _replaced(encoded, {_TENSOR: number})


def _encode_other(value: Any, walk: Callable[[Any, str], Any], where: str) -> Any:
    """Return the JSON form of a value of a type that JSON lacks; CheckpointError for any other.

    ``walk`` encodes the contents; its arguments are a value and its place.
    """
    kind = type(value)
    if isinstance(value, dict):
        if any(isinstance(key, torch.Tensor) for key in value):
            raise CheckpointError(f"{where}: a tensor as a key", fix="use its name as the key")
        items = enumerate(value.items())
        pairs = [[walk(k, f"{where}/{index}/key"), walk(v, f"{where}/{index}")] for index, (k, v) in items]
        if isinstance(value, collections.defaultdict):
            name = next((name for name, f in _FACTORIES.items() if f is value.default_factory), None)
            if name is None:
                raise CheckpointError(
                    f"{where}: a defaultdict",
                    expected=f"one of the factories {', '.join(_FACTORIES)}",
                    got=repr(value.default_factory),
                    fix="store dict(value), and convert it to a defaultdict after the load",
                )
            return {_VALUE: ["defaultdict", [name, pairs]]}
        return {_VALUE: [kind.__name__ if kind in _NAMED else "dict", pairs]}
    if kind in _FORMS:
        content = walk(_FORMS[kind][0](value), where)
        # Sets are sorted: the same on all ranks.
        return {_VALUE: [kind.__name__, sorted(content, key=repr) if kind in (set, frozenset) else content]}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {_VALUE: ["numpy", [value.dtype.name, value.item()]]}
    try:
        # Refused before: a tensor on meta has no values, and these classes lose their place or their scales.
        if isinstance(value, DTensor) or (kind is torch.Tensor and value.is_meta) or _te.is_quantized(value):
            raise TypeError
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # of any class: pickling runs methods of the value
        raise CheckpointError(
            f"{where}: cannot be stored",
            expected=_KNOWN,
            got=f"{kind.__name__} {' '.join(repr(value).split()):.80}",
            fix="convert it, for example number.item() or str(path)",
        ) from error
    return {
        _VALUE: ["torch.save", walk(torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8), where)]
    }


def _sharded_entry(value: DTensor, where: str) -> TensorEntry:
    """Return the entry of a DTensor in ``extra``, with this rank's shards. Local operation.

    CheckpointError for quantized and partial ones, and for shards whose place its placements do not determine.
    """
    local = _torch.local_of(value)
    # DTensor has no chunks of a partial value.
    is_partial = any(placement.is_partial() for placement in value.placements)
    chunks = [] if is_partial else value.__create_chunk_list__()
    parts = [value.__get_tensor_shard__(MetadataIndex(where, chunk.offsets)) for chunk in chunks]
    fits = [tuple(part.shape) for part in parts] == [tuple(chunk.sizes) for chunk in chunks]
    if _te.is_quantized(local) or local.is_meta or not fits or is_partial:
        raise CheckpointError(
            f"{where}: a DTensor that cannot be stored",
            expected="a sharded or replicated DTensor in high precision, sharded evenly",
            got=f"placements {tuple(value.placements)}, local {type(local).__name__} of shape {tuple(local.shape)}",
            fix="store value.full_tensor(), or value.dequantize() of a quantized one",
        )
    pieces = (
        Piece(tuple(chunk.offsets), part.detach().resolve_conj().resolve_neg())
        for chunk, part in zip(chunks, parts, strict=True)
        if part.numel()
    )
    return TensorEntry(tuple(value.shape), value.dtype, tuple(pieces))


def _replaced(node: Any, marks: dict[str, Callable[[Any, str], Any]], where: str = "extra") -> Any:
    """Return a JSON form in which each object ``{mark: value}`` is replaced by ``marks[mark](value, place)``."""
    if isinstance(node, list):
        return [_replaced(item, marks, f"{where}/{index}") for index, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    (mark,) = node if len(node) == 1 else (None,)
    if mark in marks:
        return marks[mark](node[mark], where)
    return {k: _replaced(v, marks, where if k == _TUPLE else f"{where}/{k}") for k, v in node.items()}


def join_ranks(encoded: Any, ranks: list[tuple[dict[str, Any], dict[str, Any]]]) -> Any:
    """Insert the values of all ranks, as :func:`encode_extra` returns them, into rank 0's JSON form.

    All ranks must have the same ``PerRank`` keys. DTensors that rank 0 lacks, such as averages of the experts of other
    ranks, are inserted into its dicts.
    """
    of_first = ranks[0][1]
    for rank, (parts, sharded) in enumerate(ranks):
        if parts.keys() != ranks[0][0].keys():
            raise CheckpointError(
                f"extra: PerRank values at different places on rank 0 and rank {rank}",
                expected=sorted(ranks[0][0]),
                got=sorted(parts),
                fix="give extra the same keys on all ranks",
            )
        for where, mark in sharded.items():
            if where not in of_first:
                _insert(encoded, where, mark, rank)
            if mark != of_first.setdefault(where, mark):
                raise CheckpointError(
                    f"{where}: different DTensors",
                    expected=f"{of_first[where][_TENSOR]}, as on the previous ranks",
                    got=f"{mark[_TENSOR]} on rank {rank}",
                    fix="give different tensors different names in extra",
                )
    return _replaced(encoded, {_PER_RANK: lambda path, _: {_PER_RANK: [parts[path] for parts, _ in ranks]}})


def _insert(encoded: Any, where: str, mark: dict[str, Any], rank: int) -> None:
    """Insert a rank's DTensor into the dicts of rank 0's JSON form; CheckpointError if it has another value there."""
    found, keys = encoded, where.split("/")[1:]
    for index, key in enumerate(keys):
        for character, escape in _ESCAPES.items():
            key = key.replace(escape, character)
        if not isinstance(found, dict) or found.keys() & {*_MARKS}:
            break
        found = found.setdefault(key, mark if index == len(keys) - 1 else {})
    if found is not mark:
        raise CheckpointError(
            f"{where}: a DTensor that rank {rank} has and rank 0 does not have",
            expected="the same dicts around it on rank 0, or none, and no other value at its place",
            fix="give extra the same containers on all ranks",
        )


def for_rank(encoded: Any, saved: dict[str, int], mesh: dict[str, int], rank: int) -> tuple[Any, list[str]]:
    """Return a rank's form of a saved ``extra``, and the places whose values have no rank on this mesh.

    The meshes are results of :func:`te_fsdp.checkpoint.model_state.mesh_sizes`: of the save, and of this job.
    """
    ranks = saved.get("ranks", 1)
    # An axis of size 1 has no effect on ranks, so a mesh with and one without it are the same.
    is_same = [a for a in saved.items() if a[1] != 1] == [a for a in mesh.items() if a[1] != 1]
    unavailable: list[str] = []

    def pick(values: list[Any], where: str) -> Any:
        if len(values) != ranks:
            label = f"{where}: values of {len(values)} ranks"
            raise damaged_value(label, f"values of the {ranks} ranks that saved the checkpoint")
        if not is_same:
            unavailable.append(where)
        return values[rank] if is_same else None

    return _replaced(encoded, {_PER_RANK: pick}), unavailable


def references(encoded: Any) -> list[dict[str, Any]]:
    """Return ``key``, ``shape`` and ``dtype`` of each tensor in an encoded value."""
    described_tensors: list[dict[str, Any]] = []
    _replaced(encoded, {_TENSOR: lambda described, _: described_tensors.append(described)})
    return described_tensors


def tensor_slots(encoded: Any) -> dict[str, TensorEntry]:
    """Return new CPU tensors to load the tensors of an encoded value into, by key."""
    slots = {}
    for described in references(encoded):
        # On the CPU, wherever the tensor was at the save: the load may have fewer or different devices.
        dtype = getattr(torch, described["dtype"].removeprefix("torch."))
        slots[described["key"]] = TensorEntry.replicated(
            torch.empty(described["shape"], dtype=dtype, device="cpu")
        )
    return slots


def decode(encoded: Any, slots: dict[str, TensorEntry]) -> Any:
    """Return the value that :func:`encode` was given, with its tensors from filled slots."""
    marks: dict[str, Callable[[Any, str], Any]] = {
        _TENSOR: lambda described, _: slots[described["key"]].pieces[0].tensor,
        _TUPLE: lambda items, where: tuple(_replaced(item, marks, where) for item in items),
        _VALUE: lambda node, where: _decode_other(node, lambda item: _replaced(item, marks, where)),
    }
    return _replaced(encoded, marks)


def _decode_other(node: list[Any], inner: Callable[[Any], Any]) -> Any:
    """Return the value of a JSON form; raise CheckpointError for an unknown kind. ``inner`` decodes the contents."""
    kind, content = node[0], inner(node[1])
    if kind in _MAPS:
        return _MAPS[kind](dict(content))
    if kind == "defaultdict" and content[0] in _FACTORIES:
        return collections.defaultdict(_FACTORIES[content[0]], dict(content[1]))
    if kind == "torch.save":
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True, map_location="cpu")
    if kind == "numpy" and np.dtype(content[0]).kind in "biuf":
        return np.dtype(content[0]).type(content[1])
    # The text comes from a file: only dtypes are taken from torch, not its functions.
    is_name = kind != "dtype" or isinstance(getattr(torch, content, None), torch.dtype)
    for form, (_, value_of) in _FORMS.items():
        if form.__name__ == kind and is_name:
            return value_of(content)
    raise CheckpointError(
        f"extra: a value of kind {kind!r}",
        expected="a kind that this version of te_fsdp supports",
        fix="load it with the version of te_fsdp that saved it, or a newer one",
    )


# --- the state of random generators, for ``extra``


def rng_state(tracker: Any = None) -> PerRank:
    """Return the state of this rank's random generators, for ``extra={"rng": ...}``. Local operation.

    Includes Python's ``random``, NumPy's global generator, torch's generators of the CPU and of the current GPU, and
    TransformerEngine's or Megatron's ``tracker`` of named states (``get_states``, tensors), if the model uses one. Save
    a generator that all ranks share (for example of the data order) as its ``get_state()`` tensor in ``extra``, which
    loads on any mesh.
    """
    version, words, gauss = random.getstate()
    kind, keys, *tail = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, device="cpu"), "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": {"kind": kind, "words": torch.tensor([*map(int, keys)], device="cpu"), "rest": tuple(tail)},
    }
    # Reading the state would initialize CUDA on a process that uses the CPU only.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if tracker is not None:
        if not callable(getattr(tracker, "get_states", None)):
            raise CheckpointError(
                "rng_state: tracker",
                expected="an object with get_states()",
                got=type(tracker).__name__,
                fix="pass the tracker itself, such as get_cuda_rng_tracker()",
            )
        state["tracker"] = dict(tracker.get_states())
    return PerRank(state)


def set_rng_state(state: Mapping[str, Any] | None, tracker: Any = None) -> None:
    """Restore the result of :func:`rng_state` on this rank, as ``load`` returned it. Local operation.

    Raises:
        CheckpointError: ``state`` is ``None``, because it was saved on a different mesh, or only one of ``tracker``
            and the tracker's state is given.
    """
    if state is None:
        raise CheckpointError(
            "set_rng_state: no state",
            why="The states of a different mesh's ranks do not belong to these ranks",
            fix="seed the ranks again, for example torch.manual_seed(seed + step) with a seed per rank",
        )
    if not isinstance(state, Mapping) or "python" not in state:
        raise CheckpointError(
            "set_rng_state: state",
            expected="the value that load returned for a saved rng_state()",
            got=f"{state!r:.80}",
            fix='save extra={"rng": rng_state()}, and pass loaded["rng"]',
        )
    if (tracker is None) != ("tracker" not in state):
        raise CheckpointError(
            "set_rng_state: tracker",
            expected="a tracker if rng_state got one at the save, else None",
            got="None" if tracker is None else "a tracker",
            fix="pass the same tracker to rng_state and to set_rng_state, or to neither",
        )
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
