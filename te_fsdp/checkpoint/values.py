"""Values of ``extra`` that JSON has no form for: dicts with keys of any kind, bytes, sets, numbers of NumPy, DTensors.

``extra`` takes what ``torch.load(weights_only=True)`` returns. In JSON, each value below is an object with one key::

    {"te_fsdp.value": ["Counter", [[2, 1], [5, 1]]]}

Tensors within are entries as everywhere in ``extra``. A DTensor is stored in shards, each element once, and is loaded
as a whole tensor on the CPU: the mesh of the load may be another one.
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from te_fsdp.errors import CheckpointError
from te_fsdp.upstream import te as _te, torch_dtensor as _torch

#: Key of the single-key object.
VALUE = "te_fsdp.value"
#: In words, for the error that names what is refused.
KNOWN = (
    "None, bool, int, float, complex, str, bytes, a number of NumPy, a dtype, a device, a tensor or DTensor in high "
    "precision, or a dict, Counter, list, tuple or set of these"
)
_SETS = {"set": set, "frozenset": frozenset}
_MAPS = {"dict": dict, "Counter": collections.Counter}


def encode_value(value: Any, walk: Callable[[Any, str], Any], where: str) -> Any:
    """Return the JSON form of a value, or ``None`` for a kind that is not known here.

    ``walk`` encodes what is inside, given a value and its place.
    """

    def each(items: Iterable[Any]) -> list[Any]:
        return [walk(item, f"{where}/{index}") for index, item in enumerate(items)]

    kind = type(value)
    if kind in (bytes, bytearray):
        content: Any = base64.b64encode(value).decode()
    elif kind in (set, frozenset):
        content = sorted(each(value), key=repr)  # the same on all ranks
    elif isinstance(value, dict):
        name = "Counter" if kind is collections.Counter else "dict"
        for key in value:
            if isinstance(key, torch.Tensor):
                raise CheckpointError(f"{where}: a tensor as a key", fix="use its name as the key")
        places = [f"{where}/{number}" for number in range(len(value))]
        pairs = [
            [walk(k, f"{at}/key"), walk(v, at)] for at, (k, v) in zip(places, value.items(), strict=True)
        ]
        return {VALUE: [name, pairs]}
    elif kind is complex:
        content = [value.real, value.imag]
    elif kind in (torch.dtype, torch.device):
        return {VALUE: [kind.__name__, str(value).removeprefix("torch.")]}
    elif kind is torch.Size:
        content = [*value]
    elif isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {VALUE: ["numpy", [value.dtype.name, value.item()]]}
    else:
        return None
    return {VALUE: [kind.__name__, content]}


def decode_value(node: list[Any], inner: Callable[[Any], Any]) -> Any:
    """Return the value of a JSON form; ``inner`` decodes what is inside. CheckpointError for an unknown kind."""
    kind, content = node
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(content)
        return data if kind == "bytes" else bytearray(data)
    if kind in _SETS:
        return _SETS[kind](map(inner, content))
    if kind in _MAPS:
        return _MAPS[kind]({inner(key): inner(item) for key, item in content})
    if kind == "complex":
        return complex(*content)
    if kind == "dtype" and isinstance(getattr(torch, content, None), torch.dtype):
        return getattr(torch, content)
    if kind == "device":
        return torch.device(content)
    if kind == "Size":
        return torch.Size(content)
    if kind == "numpy" and np.dtype(content[0]).kind in "biuf":
        return np.dtype(content[0]).type(content[1])
    raise CheckpointError(
        f"extra: a value of the kind {kind!r}",
        expected="a kind that this te_fsdp knows",
        fix="load it with the version of te_fsdp that saved it, or a newer one",
    )


def shards_of(value: DTensor, where: str) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return this rank's parts of a DTensor in ``extra``, each with its offsets. Local operation.

    CheckpointError for quantized and partial ones, and for shards whose place its placements do not say.
    """
    local = _torch.local_of(value)
    partial = any(
        placement.is_partial() for placement in value.placements
    )  # of which DTensor knows no chunks
    chunks = [] if partial else value.__create_chunk_list__()
    held = [value.__get_tensor_shard__(MetadataIndex(where, chunk.offsets)) for chunk in chunks]
    fits = [tuple(part.shape) for part in held] == [tuple(chunk.sizes) for chunk in chunks]
    if _te.is_quantized(local) or local.is_meta or not fits or partial:
        raise CheckpointError(
            f"{where}: a DTensor that cannot be stored",
            expected="a sharded or replicated DTensor in high precision, cut evenly",
            got=f"placements {tuple(value.placements)}, local {type(local).__name__} of shape {tuple(local.shape)}",
            fix="store value.full_tensor(), or value.dequantize() of a quantized one",
        )
    return [
        (tuple(chunk.offsets), part.detach().resolve_conj().resolve_neg())
        for chunk, part in zip(chunks, held, strict=True)
        if part.numel()
    ]
