"""Entries ``_extra_state`` of bound modules in plain state dicts."""

# [Note: entries] TE's entry is a tensor. It is empty for stateless recipes and contains a pickle under
# delayed scaling. ``torch.load`` with ``weights_only=True`` reads the pickle, but TE's modules only load it
# with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. te_fsdp's entry is a tensor that every te_fsdp module
# loads. Until version 0.1 it was a dict, which is still supported.
#
# High-precision values can always be loaded into quantized weights. They are quantized once with the scale of
# the unsharded weight. Contents and shapes of entries:
#
#     state of the module             entry (uint8)             shape
#     none                            TE's own, empty           (0,)
#     delayed scaling                 text, JSON, fp32 values   (n,)
#     delayed scaling, experts        the same for each expert  (experts, n)
#     before version 0.3:
#     rows stacked for tp=2           text                      (n, 2)
#     quantized, tp=2 and 4 shards    text                      (n, 2, 4)
#     delayed scaling                 text, JSON, fp32 values   one of these, or (n,)

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from te_fsdp.errors import CheckpointError
from te_fsdp.layout import ExpertRange
from te_fsdp.records import binding_of, name_of
from te_fsdp.shard_info import shard_info
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dcp, torch_dtensor as _torch

#: Prefix of entries. No pickle opcode starts with it, so TE never loads an entry as a pickle.
_MAGIC = b"#te_fsdp "
#: Number of digits of the length of the JSON.
_LENGTH = 8
_NUMBERS = re.compile(r"tp=(\d+)|(\d+) FSDP shard")


class DamagedEntryError(ValueError):
    """Raised if an entry's bytes were changed after packing."""


# [Note: load condition] Until version 0.3 plain DCP could not reshard quantized and stacked weights. Their entries
# encoded the mesh in their shapes, so that DCP raised with the entry's name on a different one.
def describe_load_condition(marks: tuple[int, ...]) -> str:
    """Return the text of a load condition: the mesh that plain DCP needs to load the weights.

    ``marks`` is the tp size of stacked rows, or the tp size and the number of FSDP shards of quantized weights.
    """
    if len(marks) == 1:
        return f"rows stacked for tp={marks[0]}, other tp sizes need te_fsdp.checkpoint"
    return f"quantized for tp={marks[0]} and {marks[1]} FSDP shard(s), other meshes need te_fsdp.checkpoint"


# Scripts may clone and cast entries. The shape is preserved, and floating dtypes of at least 16 bits represent
# integers up to 255. Stock TE rejects an entry as an unsupported pickle.
def pack(state: dict[str, Any]) -> torch.Tensor:
    """Return the entry of a state: uint8 on the CPU, 1-D. Local operation.

    ``state`` contains ``recipe``, plain values, and fp32 tensors by name.
    """
    # States of equal shapes under equal recipes have equal lengths.
    tensors = {k: v.detach().float().cpu().contiguous() for k, v in state.items() if k != "recipe"}
    values = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
    described = {"recipe": state["recipe"], "shapes": shapes, "crc": f"{zlib.crc32(values):08x}"}
    text = json.dumps(described).encode()
    data = _text(()) + f"{len(text):0{_LENGTH}d}".encode() + text + values
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pack_experts(state: dict[str, Any], first: int) -> torch.Tensor:
    """Return an entry with one row of equal length for each expert, from global index ``first`` on."""
    count = state["recipe"]["num_gemms"]
    rows = []
    for index in range(count):
        # The index has a fixed width, so that all rows have equal length.
        recipe = {**state["recipe"], "num_gemms": 1, _EXPERT: f"{first + index:08d}"}
        tensors = {key: value.chunk(count, -1)[index] for key, value in state.items() if key != "recipe"}
        rows.append(pack({"recipe": recipe, **tensors}))
    return torch.stack(rows)


def has_expert_rows(entry: torch.Tensor) -> bool:
    """Return whether an entry has a row for each expert."""
    return entry.ndim == 2 and bytes_of(entry[:1]).startswith(_text(()))


def unpack(entry: torch.Tensor) -> tuple[tuple[int, ...], dict[str, Any] | None] | None:
    """Return marks and state of an entry, ``None`` for one of TE; raise DamagedEntryError for changed values. Local."""
    if has_expert_rows(entry):
        states = [state for row in entry if (state := (unpack(row) or ((), None))[1]) is not None]
        if len(states) != len(entry) or any(state.keys() != states[0].keys() for state in states):
            raise DamagedEntryError("rows of experts are missing, or have different tensors")
        recipe = {**states[0]["recipe"], "num_gemms": len(states)}
        recipe.pop(_EXPERT, None)
        keys = [key for key in states[0] if key != "recipe"]
        return (), {"recipe": recipe, **{key: torch.cat([s[key] for s in states], -1) for key in keys}}
    marks, data = tuple(entry.shape[1:]), bytes_of(entry)
    if not data.startswith(_MAGIC):
        if entry.ndim == 1:
            return None
        # Without state the shape contains all information, even if the text was changed.
        if entry.shape[0] > _rows(marks):
            raise DamagedEntryError("its first bytes have changed")
        return marks, None
    start = data.find(b"\n") + 1
    length = data[start : start + _LENGTH]
    if not length.strip(b"\0"):
        return marks, None
    try:
        end = start + _LENGTH + int(length)
        described = json.loads(data[start + _LENGTH : end])
        sizes = {key: math.prod(shape) * 4 for key, shape in described["shapes"].items()}
        values = data[end : end + sum(sizes.values())]
        if f"{zlib.crc32(values):08x}" != described["crc"]:
            raise DamagedEntryError("its values have changed (CRC-32)")
        state: dict[str, Any] = {"recipe": described["recipe"]}
        parts = torch.frombuffer(bytearray(values), dtype=torch.float32).split(
            [n // 4 for n in sizes.values()]
        )
        for (key, shape), part in zip(described["shapes"].items(), parts, strict=True):
            state[key] = part.view(shape).clone()
        return marks, state
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedEntryError(str(error)) from error


def bytes_of(entry: torch.Tensor) -> bytes:
    """Return the bytes of an entry in any dtype that represents integers up to 255. Local operation.

    Return no bytes if the values are not bytes but the shape has marks. Without marks, raise DamagedEntryError.
    """
    values = entry.detach().cpu().reshape(-1)
    # model.half() or a conversion of the state dict may have cast the entry with the weights.
    if values.dtype != torch.uint8:
        wide = values.double()
        integers = wide.round().clamp(0, 255)
        if not torch.equal(integers, wide):
            if entry.ndim == 1:
                raise DamagedEntryError(f"{values.dtype} values that are not bytes")
            return b""
        values = integers.to(torch.uint8)
    return values.numpy().tobytes()


def marks_of(condition: str) -> tuple[int, ...]:
    """Parse the text of :func:`describe_load_condition`. Older state dicts have it as a key."""
    return tuple(int(tp or shards) for tp, shards in _NUMBERS.findall(condition)) or (-1,)


def _rows(marks: tuple[int, ...]) -> int:
    """Return the first dimension of an entry without state."""
    return -(-len(_text(marks)) // math.prod(marks)) if max(marks, default=1) > 1 else 0


def _text(marks: tuple[int, ...]) -> bytes:
    return _MAGIC + (describe_load_condition(marks) if marks else "state of delayed scaling").encode() + b"\n"


#: Keys of delayed scaling's state in an entry, and of an expert's index in its row.
DELAYED = "delayed scaling"
_EXPERT = "expert"
#: Newest amaxes of all histories of a module, by key of the entry and index of the expert
Amaxes: TypeAlias = "dict[tuple[str, str | None], torch.Tensor]"


class _AnySize(Sequence[int]):
    """Size of an entry, which compares equal to every size. DCP compares sizes, but entries vary in length."""

    def __init__(self, size: torch.Size) -> None:
        self.real = size  #: Size for everything but comparisons

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[bad-override]

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: Any) -> Any:
        return self.real[index]

    def numel(self) -> int:
        """Return the number of elements, as ``torch.Size`` does."""
        return self.real.numel()


def _plain_size(size: Any) -> Any:
    return size.real if isinstance(size, _AnySize) else size


class _Entry(torch.Tensor):
    """A state dict tensor that DCP writes as bytes.

    Results of operations, including ``torch.save``, are plain tensors. DCP can read the bytes into an entry of any
    length. A model before its first forward has no state.
    """

    __torch_function__ = _torch.plain_results  # type: ignore[bad-override]

    def size(self, dim: int | None = None) -> Any:
        """Return the size, which DCP compares."""
        return _AnySize(super().size()) if dim is None else super().size(dim)

    # ``dcp.async_save`` copies a tensor by these two methods, and must write the copy as it writes this one.
    def new_empty(self, size: Any, **options: Any) -> Any:  # type: ignore[bad-override]
        """Return a new uninitialized entry, of which DCP writes bytes, too."""
        return super().new_empty(_plain_size(size), **options).as_subclass(type(self))

    def set_(self, source: Any, offset: int, size: Any, stride: Any) -> Any:  # type: ignore[bad-override]
        """Set the storage, also to the size that :meth:`size` returns."""
        super().set_(source, offset, _plain_size(size), stride)
        return self

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> list[Any]:
        return torch_dcp.byte_item(fqn) if self.numel() else torch_dcp.tensor_item(fqn, tensor)

    def __create_chunk_list__(self) -> list[Any]:
        return []  # entries of other models have no state

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone().as_subclass(type(self))


def newest_amaxes(entries: Mapping[str, Any]) -> Amaxes:
    """Return the newest amaxes that are not zero, of the entries among the values of a flat dict. Local operation."""
    found: Amaxes = {}
    for key, entry in entries.items():
        for state in _states_of(entry) if isinstance(entry, _Entry) and entry.numel() else ():
            newest = torch.cat([history[0] for history in _histories(state)])
            if bool(newest.any()):
                found[key, state["recipe"].get(_EXPERT)] = newest
    return found


def with_newest_amaxes(key: str, entry: torch.Tensor, amaxes: Amaxes) -> torch.Tensor:
    """Return a copy of an entry with the given newest amaxes, which has equal shape and class. Local operation."""
    states = _states_of(entry)
    for state in states:
        histories = _histories(state)
        newest = amaxes.get((key, state["recipe"].get(_EXPERT)))
        for history, part in zip(
            histories, () if newest is None else newest.split([h.shape[1] for h in histories]), strict=False
        ):
            history[0] = part
    result = torch.stack([pack(state) for state in states]).view(entry.shape).as_subclass(type(entry))
    if isinstance(entry, ExpertEntry) and isinstance(result, ExpertEntry):
        result.experts = entry.experts
    return result


def _states_of(entry: torch.Tensor) -> list[dict[str, Any]]:
    """Return the state of an entry, or of each row of experts."""
    rows = entry.as_subclass(torch.Tensor)
    return [contents[1] for row in rows.view(-1, rows.shape[-1]) if (contents := unpack(row)) and contents[1]]


def _histories(state: dict[str, Any]) -> list[torch.Tensor]:
    return [value for name, value in state.items() if name.endswith("amax_history")]


def plain_entry(value: Any) -> Any:
    """Return an entry as an ordinary tensor, and any other value unchanged."""
    return value.as_subclass(torch.Tensor) if isinstance(value, _Entry) else value


# [Note: rows of experts] The delayed-scaling state of experts has one row for each expert
# (:class:`ExpertEntry`). The ranks of an expert-parallel mesh have different experts under one name, and a
# load plan reads the rows of the local experts.
class ExpertEntry(_Entry):
    """Entry of experts. DCP writes and reads it by rows."""

    experts: ExpertRange | None = None  #: Experts of this rank; ``None`` in copies
    is_target: bool = False  #: Whether a load plan created it

    # Binds torch.Tensor's class method to this class. DCP refuses copies, because it would lose rows of them.
    __torch_function__ = classmethod(torch.Tensor.__torch_function__.__func__)  # type: ignore[bad-override]

    def target(self, width: int) -> ExpertEntry:
        """Return the entry that a load plan reads rows of this width into."""
        assert self.experts is not None
        entry = torch.zeros((self.experts.count, width), dtype=torch.uint8).as_subclass(ExpertEntry)
        entry.experts, entry.is_target = self.experts, True
        return entry

    def _chunk(self) -> ChunkStorageMetadata:
        assert self.experts is not None
        return ChunkStorageMetadata(torch.Size((self.experts.first, 0)), self.shape)

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> list[Any]:
        """Return the rows as a shard of the entry of all experts, when DCP plans to write the tensor."""
        if not self.numel():
            return super().__create_write_items__(fqn, tensor)
        if self.experts is None:
            raise CheckpointError(
                f"{fqn}: delayed scaling's state of experts in a copy of a state dict",
                expected="the entry that state_dict() returned",
                got="a copy",
                why="A copy does not record which experts its rows belong to",
                fix="save the state dict itself, or save with te_fsdp.checkpoint.save",
            )
        size = torch.Size((self.experts.total, self.shape[1]))
        return [torch_dcp.shard_item(fqn, self.as_subclass(torch.Tensor), self._chunk(), size)]

    def __create_chunk_list__(self) -> list[Any]:
        return [self._chunk()] if self.is_target else []


def encode_extra_state(module: nn.Module, stock: Any) -> Any:
    """Convert the result of TE's ``get_extra_state`` for a bound module to a CPU tensor. Local operation.

    Raises PrecisionError if a custom recipe contains delayed scaling, whose state then has no fixed shape.
    """
    if binding_of(module) is None or not isinstance(stock, torch.Tensor):
        return stock
    # Bytes without states are the pickle of a custom recipe. TE ignores it when it loads the entry.
    states = _te.delayed_states(module) if stock.numel() else None
    experts = local_experts(module)
    cls, entry = _Entry if experts is None else ExpertEntry, stock.new_empty(0)
    if states is not None:
        # Its tensors, and the recipe needed to create the state again.
        described: dict[str, Any] = {"recipe": _te_modules.describe_delayed_recipe(module)}
        for key, state in states.items():
            described |= {f"{key}.{name}": getattr(state, name) for name in ("scale", "amax_history")}
        entry = pack(described) if experts is None else pack_experts(described, experts.first)
    entry = entry.as_subclass(cls)
    if isinstance(entry, ExpertEntry):
        entry.experts = experts
    return entry


def local_experts(module: nn.Module) -> ExpertRange | None:
    """Return the experts of a ``GroupedLinear``; ``None`` for other modules."""
    if _te.kind_of(module) != "GroupedLinear":
        return None
    binding, count = binding_of(module), int(module.num_gemms)  # type: ignore[arg-type]
    experts = binding.experts if binding is not None else None
    return experts if experts is not None else ExpertRange(0, count, count)


def decode_extra_state(module: nn.Module, state: Any) -> Any:
    """Load delayed scaling's state and return the value for TE's own ``set_extra_state``. Local operation.

    Raises CheckpointError if the saved load condition differs from this module's or is missing, if the state belongs
    to a different module, or if bytes were changed.
    """
    saved, entry, stock = _read(module, None if _torch.is_absent_extra_state(state) else state)
    if saved is not None and set(saved) != {1}:
        # Versions until 0.1 wrote a condition of ones for modules that are not sharded. Without a condition the values
        # are in high precision, which quantized weights can load.
        binding, condition = binding_of(module), None
        params = {n: p for n, p in module._parameters.items() if p is not None}
        quantized = [n for n, p in params.items() if _te.is_quantized(_torch.local_of(p))]
        if binding is not None and quantized:
            tp_size = binding.tp_mesh.size() if binding.tp_mesh is not None else 1
            info = shard_info(module, quantized[0], params[quantized[0]], label=name_of(module))
            mesh_sizes = (tp_size, info.coordinates.fsdp_size)
            condition = mesh_sizes if max(mesh_sizes) > 1 else None
        if saved != condition:
            raise CheckpointError(
                f"{name_of(module)}: weights of a plain state dict",
                expected=describe_load_condition(condition) if condition else "no condition",
                got=describe_load_condition(saved),
                why="The rows or blocks are stored in a different order and would be permuted",
                fix="save and load with te_fsdp.checkpoint, which supports any mesh",
            )
    if entry is None:
        return stock
    present = _te.delayed_states(module)
    # All shapes are checked before the first tensor changes.
    for key, state in (present or {}).items():
        expected, got = tuple(state.scale.shape), tuple(entry[f"{key}.scale"].shape)
        if expected != got:
            raise CheckpointError(
                f"{name_of(module)}: delayed scaling's {key} of a state dict",
                expected=f"scales of shape {expected}",
                got=got,
                fix="load the state dict of a model with the same modules",
            )
    for key, state in _te_modules.make_delayed_states(module, entry["recipe"]).items():
        state.scale.copy_(entry[f"{key}.scale"])
        state.amax_history.copy_(entry[f"{key}.amax_history"])
    return stock


def _read(module: nn.Module, state: Any) -> tuple[tuple[int, ...] | None, dict[str, Any] | None, Any]:
    """Return an entry's load condition, delayed scaling's state, and the value for TE."""
    saved: tuple[int, ...] | None = None
    if isinstance(state, dict) and len(state) == 1 and DELAYED not in state:  # format until version 0.1
        ((mark_text, state),) = state.items()
        saved = marks_of(mark_text)
    if isinstance(state, dict) and DELAYED in state:
        return saved, state[DELAYED], None
    if not isinstance(state, torch.Tensor):
        return saved, None, state
    try:
        contents = unpack(_local_rows(module, state.as_subclass(torch.Tensor)))
    except DamagedEntryError as error:
        raise CheckpointError(
            f"{name_of(module)}._extra_state of a state dict",
            expected="the bytes returned by state_dict(), in a dtype that represents integers up to 255",
            got=f"changed bytes: {error}",
            why="The amax history of delayed scaling would be silently lost",
            fix="exclude uint8 entries from conversions, or use a dtype of at least 16 bits",
        ) from error
    return (saved, None, state) if contents is None else (contents[0] or None, contents[1], None)


def _local_rows(module: nn.Module, entry: torch.Tensor) -> torch.Tensor:
    """Return the rows of the module's local experts, if the entry has rows of experts."""
    experts = local_experts(module)
    if experts is None or not has_expert_rows(entry):
        return entry
    states = [(unpack(row) or ((), None))[1] or {"recipe": {}} for row in entry]
    # Each row records its expert, because DCP may read the rows of all experts, or of this rank's only.
    indices = [int(state["recipe"].get(_EXPERT, -1)) for state in states]
    expected = range(experts.first, experts.first + experts.count)
    if not set(expected) <= set(indices):
        raise CheckpointError(
            f"{name_of(module)}._extra_state of a state dict",
            expected=f"the state of experts {experts.first} to {expected[-1]}",
            got=f"the state of experts {indices}",
            fix="load the state dict of this rank, or load with torch.distributed.checkpoint",
        )
    return entry[[indices.index(index) for index in expected]]
