"""What a bound module's ``_extra_state`` says in a plain state dict: right, or a refusal, under plain DCP too.

TE's entry is a tensor: empty for stateless recipes, and a pickle under delayed scaling, which ``torch.load`` with
``weights_only=True`` reads but TE's modules take only with ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``. Here it is a
tensor too, that any of our modules takes back. Until version 0.1 it was a dict, which is still read.

Plain ``torch.distributed.checkpoint`` refuses to write delayed scaling's state: it keeps one rank's copy, whose
newest amaxes are not those of the others, and a fresh model, which has no such state before its first forward, could
not take it.

Quantized tensors cannot be resharded by plain DCP: a slice of them may be a temporary, the write to it lost. The entry
of a module with such weights has a shape that tells the condition. On another mesh DCP stops at it, by name and before
it reads anything. Versions before 0.3 wrote entries for stacked rows, too, in the order of the ranks of tp.

High-precision values may always be loaded into quantized weights: each becomes one quantization, with the
scale of the whole weight. Entries are bytes that say what they are, in a shape that says where they fit:

    state of the module             entry (uint8)             shape
    nothing to say                  TE's own, empty           (0,)
    rows stacked for tp=2           text                      (n, 2)
    quantized, tp=2 and 4 shards    text                      (n, 2, 4)
    delayed scaling                 text, JSON, fp32 values   (n,), or one of the above

Where nothing is cut (dims of 1), text without further state is left out: ``n`` is 0, and stock TE takes the entry as
its own. Elsewhere stock TE refuses it as a pickle that it does not read. Scripts may clone and cast entries: the shape
survives anything, and integers up to 255 every floating dtype of 16 bits or more.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from te_fsdp import boxed_dtensor
from te_fsdp.errors import CheckpointError
from te_fsdp.records import binding_of, name_of, shard_info
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn

#: What entries begin with. No operation of pickle does, so that TE cannot take one for a pickle.
_MAGIC = b"#te_fsdp "
#: Digits of the length of the JSON, always as many.
_LENGTH = 8
_NUMBERS = re.compile(r"tp=(\d+)|(\d+) FSDP shard")


class DamagedEntryError(ValueError):
    """An entry whose bytes are not as they were packed."""


def describe_load_condition(marks: tuple[int, ...]) -> str:
    """The words of marks: on what mesh weights can be loaded that plain DCP cannot reshard."""
    if len(marks) == 1:
        return f"rows stacked for tp={marks[0]}, other tp sizes need te_fsdp.checkpoint"
    return f"quantized for tp={marks[0]} and {marks[1]} FSDP shard(s), other meshes need te_fsdp.checkpoint"


def pack(marks: tuple[int, ...], state: dict[str, Any] | None) -> torch.Tensor:
    """The entry of a module: uint8 on the CPU, ``(n, *marks)``. Local operation.

    Equally long for states of equal shapes under equal recipes. ``marks`` are nothing, or tp size of stacked rows, or
    tp size and FSDP shards of quantized weights; ``state`` has ``recipe``, plain values, and fp32 tensors by name.
    """
    data = b"" if state is None and max(marks, default=1) == 1 else _text(marks)
    if state is not None:
        tensors = {k: v.detach().float().cpu().contiguous() for k, v in state.items() if k != "recipe"}
        values = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
        shapes = {key: list(tensor.shape) for key, tensor in tensors.items()}
        text = json.dumps(
            {"recipe": state["recipe"], "shapes": shapes, "crc": f"{zlib.crc32(values):08x}"}
        ).encode()
        data += f"{len(text):0{_LENGTH}d}".encode() + text + values
    each = math.prod(marks)
    # At least one row more than without state, so that the shape tells that there is one.
    data = data.ljust((_rows(marks) + 1) * each if state is not None else 0, b"\0")
    data += b"\0" * (-len(data) % each)
    if not data:
        return torch.empty((0, *marks), dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, *marks)


def unpack(entry: torch.Tensor) -> tuple[tuple[int, ...], dict[str, Any] | None] | None:
    """The marks and the state of an entry; ``None`` for TE's own. ``DamagedEntryError``: values were changed. Local."""
    marks, data = tuple(entry.shape[1:]), bytes_of(entry)
    if not data.startswith(_MAGIC):
        if entry.ndim == 1:
            return None
        # Without further state the shape says all there is to say, whatever became of the text.
        if entry.shape[0] > _rows(marks):
            raise DamagedEntryError("what it begins with")
        return marks, None
    at = data.find(b"\n") + 1
    length = data[at : at + _LENGTH]
    if not length.strip(b"\0"):
        return marks, None
    try:
        end = at + _LENGTH + int(length)
        described = json.loads(data[at + _LENGTH : end])
        sizes = {key: math.prod(shape) * 4 for key, shape in described["shapes"].items()}
        values = data[end : end + sum(sizes.values())]
        if f"{zlib.crc32(values):08x}" != described["crc"]:
            raise DamagedEntryError("the checksum of its values")
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
    """The bytes of an entry, in any dtype that holds whole numbers up to 255. Local operation.

    None of them if its values are no bytes and its shape has marks; ``DamagedEntryError`` where only they say what it
    holds.
    """
    values = entry.detach().cpu().reshape(-1)
    if values.dtype != torch.uint8:
        wide = values.double()
        whole = wide.round().clamp(0, 255)
        if not torch.equal(whole, wide):
            if entry.ndim == 1:
                raise DamagedEntryError(f"{values.dtype} values that are no bytes")
            return b""
        values = whole.to(torch.uint8)
    return values.numpy().tobytes()


def marks_of(condition: str) -> tuple[int, ...]:
    """The marks that :func:`describe_load_condition` puts into words; older state dicts have the words as a key."""
    return tuple(int(tp or shards) for tp, shards in _NUMBERS.findall(condition)) or (-1,)


def _rows(marks: tuple[int, ...]) -> int:
    """First dim of an entry without state."""
    return -(-len(_text(marks)) // math.prod(marks)) if max(marks, default=1) > 1 else 0


def _text(marks: tuple[int, ...]) -> bytes:
    return _MAGIC + (describe_load_condition(marks) if marks else "state of delayed scaling").encode() + b"\n"


#: Key of delayed scaling's state in an entry.
DELAYED = "delayed scaling"


class _AnySize(Sequence[int]):
    """The size of an entry, equal to every other one: DCP compares sizes, but bytes may have any number."""

    def __init__(self, size: torch.Size) -> None:
        self._size = size

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[bad-override]

    def __len__(self) -> int:
        return len(self._size)

    def __getitem__(self, index: Any) -> Any:
        return self._size[index]

    def numel(self) -> int:
        """As ``torch.Size`` has it."""
        return self._size.numel()


class _Entry(torch.Tensor):
    """A tensor for state dicts; what is made of it, ``torch.save`` included, is an ordinary one.

    DCP writes it as bytes, which may be read into an entry of any length: a model that has not run yet has no state.
    """

    __torch_function__ = _torch.plain_results  # type: ignore[bad-override]

    def size(self, dim: int | None = None) -> Any:
        """The shape, which DCP compares."""
        return _AnySize(super().size()) if dim is None else super().size(dim)

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> list[Any]:
        return boxed_dtensor.byte_item(fqn) if self.numel() else boxed_dtensor.tensor_item(fqn, tensor)

    def __create_chunk_list__(self) -> list[Any]:
        return []  # tensors of other entries have no state

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(proto)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone().as_subclass(type(self))


class _NotForDcp(_Entry):
    """An entry that plain DCP cannot write; nor can it write copies and casts, which are of this class too."""

    # A class method of torch.Tensor, here of this class.
    __torch_function__ = classmethod(torch.Tensor.__torch_function__.__func__)  # type: ignore[bad-override]

    def __create_write_items__(self, fqn: str, tensor: torch.Tensor) -> NoReturn:
        """DCP asks for this when it plans to write the tensor."""
        raise CheckpointError(
            f"{fqn}: delayed scaling's state in a plain state dict",
            expected="a state dict for torch.save or load_state_dict",
            got="torch.distributed.checkpoint",
            why="A model that has not run yet could not take it back, and would lose the amax history in silence",
            fix="save with te_fsdp.checkpoint.save (dropping the _extra_state keys loses the amax history)",
        )


def encode_extra_state(module: nn.Module, stock: Any) -> Any:
    """What a bound module's ``get_extra_state`` returns, of what TE's own has returned: a tensor on the CPU. Local.

    Raises ``PrecisionError`` for delayed scaling inside a custom recipe, whose state has no fixed shape.
    """
    if binding_of(module) is None or not isinstance(stock, torch.Tensor):
        return stock
    # Bytes without states are the pickle of a custom recipe, which TE ignores when it loads it.
    states = _te.delayed_states(module) if stock.numel() else None
    if states is None:
        return stock.new_empty(0).as_subclass(_Entry)
    # Its tensors, and what it takes to make such state anew.
    described: dict[str, Any] = {"recipe": _te_modules.describe_delayed_recipe(module)}
    for key, state in states.items():
        described |= {f"{key}.{name}": getattr(state, name) for name in ("scale", "amax_history")}
    # Experts of other ranks have states of their own under the same name.
    kind = _NotForDcp if (binding_of(module).ep.mesh is not None) else _Entry  # type: ignore[missing-attribute]
    return pack((), described).as_subclass(kind)


def decode_extra_state(module: nn.Module, state: Any) -> Any:
    """What of a loaded value TE's own ``set_extra_state`` gets; delayed scaling's state is taken back here. Local.

    Raises ``CheckpointError`` for a value that was saved under a condition that does not hold here, or under none where
    one is due; for another module's state; and for changed bytes.
    """
    saved, own, stock = _read(module, None if _torch.is_absent_extra_state(state) else state)
    if binding_of(module) is not None or saved is not None:
        _check_condition(module, saved)
    if own is not None:
        _restore(module, own)
    return stock


def _read(module: nn.Module, state: Any) -> tuple[tuple[int, ...] | None, dict[str, Any] | None, Any]:
    """Of an entry: under which condition it was saved, delayed scaling's state, and what is TE's."""
    saved: tuple[int, ...] | None = None
    if isinstance(state, dict) and len(state) == 1 and DELAYED not in state:  # as it was until version 0.1
        ((words, state),) = state.items()
        saved = marks_of(words)
    if isinstance(state, dict) and DELAYED in state:
        return saved, state[DELAYED], None
    if not isinstance(state, torch.Tensor):
        return saved, None, state
    try:
        found = unpack(state.as_subclass(torch.Tensor))
    except DamagedEntryError as error:
        raise CheckpointError(
            f"{name_of(module)}._extra_state of a state dict",
            expected="the bytes that state_dict() gave, in any dtype that holds whole numbers up to 255",
            got=f"other ones: {error}",
            why="The amax history of delayed scaling would be lost in silence",
            fix="leave entries of uint8 out when values are changed, or keep them in 16 bits or more",
        ) from error
    return (saved, None, state) if found is None else (found[0] or None, found[1], None)


def _check_condition(module: nn.Module, saved: tuple[int, ...] | None) -> None:
    condition = _condition(module)
    if saved is not None and set(saved) == {1}:  # until version 0.1 uncut modules said so
        saved = None
    if saved in (condition, None):  # high-precision values fit quantized weights
        return
    raise CheckpointError(
        f"{name_of(module)}: weights of a plain state dict",
        expected=describe_load_condition(condition) if condition else "no condition",
        got=describe_load_condition(saved) if saved else "no condition (an unsharded module)",
        why="Its rows or blocks lie otherwise than here, and would be scrambled",
        fix="save and load with te_fsdp.checkpoint, which fits any mesh",
    )


def _restore(module: nn.Module, saved: dict[str, Any]) -> None:
    """Write delayed scaling's state into the module's live tensors, made where there are none."""
    present = _te.delayed_states(module)
    for key, state in (present or {}).items():
        have, got = tuple(state.scale.shape), tuple(saved[f"{key}.scale"].shape)
        if have != got:
            raise CheckpointError(
                f"{name_of(module)}: delayed scaling's {key} of a state dict",
                expected=f"scales of shape {have}",
                got=got,
                fix="load the state dict of a model of the same modules",
            )
    for key, state in _te_modules.make_delayed_states(module, saved["recipe"]).items():
        state.scale.copy_(saved[f"{key}.scale"])
        state.amax_history.copy_(saved[f"{key}.amax_history"])


def _condition(module: nn.Module) -> tuple[int, ...] | None:
    """Return the marks of the condition on which plain DCP can load this module's quantized weights."""
    binding = binding_of(module)
    own = {n: p for n, p in module._parameters.items() if p is not None}
    if binding is None or not own:
        return None
    tp_size = binding.tp_mesh.size() if binding.tp_mesh is not None else 1
    quantized = [n for n, p in own.items() if _te.is_quantized(_torch.local_of(p))]
    if not quantized:
        return None
    at = shard_info(module, quantized[0], own[quantized[0]], label=name_of(module)).at
    pieces = (tp_size, at.fsdp_size)
    return pieces if max(pieces) > 1 else None
