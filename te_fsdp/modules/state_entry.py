"""``_extra_state`` entries as one tensor, as TE's are: bytes that say what they are, a shape that says where they fit.

    state of the module             entry (uint8)             shape
    nothing to say                  TE's own, empty           (0,)
    rows stacked for tp=2           text                      (n, 2)
    quantized, tp=2 and 4 shards    text                      (n, 2, 4)
    delayed scaling                 text, JSON, fp32 values   (n,), or one of the above

Where nothing is cut (dims of 1), text without further state is left out: ``n`` is 0, and stock TE takes the entry as
its own. Elsewhere stock TE refuses it as a pickle that it does not read, and plain DCP, which compares shapes before it
reads anything, stops at the entry on another mesh. Scripts may clone and cast entries: the shape survives anything, and
integers up to 255 every floating dtype of 16 bits or more.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import Any

import torch

__all__ = ["DamagedEntryError", "bytes_of", "condition_of", "marks_of", "pack", "unpack"]

#: What entries begin with. No operation of pickle does, so that TE cannot take one for a pickle.
_MAGIC = b"#te_fsdp "
#: Digits of the length of the JSON, always as many.
_LENGTH = 8
_NUMBERS = re.compile(r"tp=(\d+)|(\d+) FSDP shard")


class DamagedEntryError(ValueError):
    """An entry whose bytes are not as they were packed."""


def condition_of(marks: tuple[int, ...]) -> str:
    """The words of marks: on what mesh weights can be loaded that plain DCP cannot reshard."""
    if len(marks) == 1:
        return f"rows stacked for tp={marks[0]}, other tp sizes need te_fsdp.checkpoint"
    return f"quantized for tp={marks[0]} and {marks[1]} FSDP shard(s), other meshes need te_fsdp.checkpoint"


def pack(marks: tuple[int, ...], state: dict[str, Any] | None) -> torch.Tensor:
    """The entry of a module. Local operation.

    Args:
        marks: Nothing, or tp size of stacked rows, or tp size and FSDP shards of quantized weights.
        state: ``recipe``, plain values, and fp32 tensors by name; ``None`` for no state.

    Returns:
        uint8 on the CPU, ``(n, *marks)``; equally long for states of equal shapes under equal recipes.
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
    entry = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    )
    return entry.view(-1, *marks) if data else entry.view(0, *marks)


def unpack(entry: torch.Tensor) -> tuple[tuple[int, ...], dict[str, Any] | None] | None:
    """The marks and the state of an entry; ``None`` for one that is TE's own. Local operation.

    Args:
        entry: On any device, in any dtype that holds whole numbers up to 255.

    Raises:
        DamagedEntryError: Its values were changed.
    """
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
        flat = torch.frombuffer(bytearray(values), dtype=torch.float32)
        for (key, shape), part in zip(
            described["shapes"].items(), flat.split([size // 4 for size in sizes.values()]), strict=True
        ):
            state[key] = part.view(shape).clone()
        return marks, state
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedEntryError(str(error)) from error


def bytes_of(entry: torch.Tensor) -> bytes:
    """The bytes of an entry, in whatever dtype. Local operation.

    Returns:
        None of them if its values are no bytes and its shape has marks.

    Raises:
        DamagedEntryError: Its values are no bytes, and nothing but them says what it holds.
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
    """The marks that :func:`condition_of` puts into words; older state dicts have the words as a key."""
    return tuple(int(tp or shards) for tp, shards in _NUMBERS.findall(condition)) or (-1,)


def _rows(marks: tuple[int, ...]) -> int:
    """First dim of an entry without state."""
    return -(-len(_text(marks)) // math.prod(marks)) if max(marks, default=1) > 1 else 0


def _text(marks: tuple[int, ...]) -> bytes:
    return _MAGIC + (condition_of(marks) if marks else "state of delayed scaling").encode() + b"\n"
