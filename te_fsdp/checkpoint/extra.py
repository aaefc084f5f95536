"""The user's ``extra``: plain values and tensors to JSON and back; refuses what would not survive."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te
from te_fsdp.checkpoint.entries import Entry, whole_entry
from te_fsdp.errors import CheckpointError, message

__all__ = ["decode", "encode", "tensor_slots"]

# Single-key objects stand for what JSON lacks.
_TUPLE, _TENSOR = "te_fsdp.tuple", "te_fsdp.tensor"


def encode(value: Any, where: str = "extra") -> tuple[Any, dict[str, Entry]]:
    """JSON form of a value, and the tensors that it refers to.

    Args:
        value: Nested dicts (string keys), lists and tuples of None, bool, int, float, str and tensors.
        where: Name of the value, for messages and as the prefix of tensor keys.

    Raises:
        CheckpointError: Names the entry of another type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value, {}
    if _is_plain_tensor(value):
        described = {"key": where, "shape": list(value.shape), "dtype": str(value.dtype)}
        return {_TENSOR: described}, {where: whole_entry(value, same_everywhere=False)}
    entries: dict[str, Entry] = {}
    if isinstance(value, dict) and all(type(k) is str and k not in (_TUPLE, _TENSOR) for k in value):
        encoded: Any = {}
        for key, item in value.items():
            # Escaped as in a JSON pointer, so that no two paths give one key.
            encoded[key], more = encode(item, f"{where}/{key.replace('~', '~0').replace('/', '~1')}")
            entries |= more
        return encoded, entries
    if type(value) in (list, tuple):
        items = []
        for index, item in enumerate(value):
            json_item, more = encode(item, f"{where}/{index}")
            items.append(json_item)
            entries |= more
        return (items if type(value) is list else {_TUPLE: items}), entries
    got = type(value).__name__
    if isinstance(value, dict):
        got = (
            f"a dict with the key {next(k for k in value if type(k) is not str or k in (_TUPLE, _TENSOR))!r}"
        )
    raise CheckpointError(
        message(
            f"{where}: cannot be stored",
            expected="None, bool, int, float, str, a plain tensor, or a dict (string keys), list or tuple of these",
            got=got,
            fix="convert it, for example number.item() or str(path)",
        )
    )


def _is_plain_tensor(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return False
    return not value.is_meta and not _te.is_quantized(value)


def tensor_slots(encoded: Any) -> dict[str, Entry]:
    """New CPU tensors to load the tensors of an encoded value into, by key."""
    if isinstance(encoded, list):
        parts = [tensor_slots(item) for item in encoded]
    elif isinstance(encoded, dict) and set(encoded) == {_TENSOR}:
        described = encoded[_TENSOR]
        dtype = getattr(torch, described["dtype"].removeprefix("torch."))
        return {described["key"]: whole_entry(torch.empty(described["shape"], dtype=dtype))}
    elif isinstance(encoded, dict):
        parts = [tensor_slots(item) for item in encoded.values()]
    else:
        return {}
    return {key: entry for part in parts for key, entry in part.items()}


def decode(encoded: Any, slots: dict[str, Entry]) -> Any:
    """The value that :func:`encode` was given, its tensors taken from filled slots."""
    if isinstance(encoded, list):
        return [decode(item, slots) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if set(encoded) == {_TUPLE}:
        return tuple(decode(item, slots) for item in encoded[_TUPLE])
    if set(encoded) == {_TENSOR}:
        return slots[encoded[_TENSOR]["key"]].pieces[0].tensor
    return {key: decode(item, slots) for key, item in encoded.items()}
