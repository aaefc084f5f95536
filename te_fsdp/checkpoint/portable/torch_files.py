"""``torch.save`` files, written by blocks.

torch writes the file with gaps where the data belongs (``torch.serialization.skip_data``), and the gaps are filled
afterwards. ``torch.load`` reads the result weights-only, also with ``mmap=True``. The checksums that the zip format
has for its members are zero, which torch does not look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import serialization

from te_fsdp import _torch
from te_fsdp.checkpoint.manifest import Tick
from te_fsdp.checkpoint.portable.lazy import Lazy
from te_fsdp.checkpoint.portable.pickled import read_objects
from te_fsdp.checkpoint.portable.safetensors import as_bytes

__all__ = ["write_torch"]


def write_torch(path: Path, objects: Any, tick: Tick) -> None:
    """Write nested dicts, lists and plain values with lazy tensors in them. Local operation.

    Neither atomic nor synced: see :mod:`te_fsdp.checkpoint.portable.atomic`.

    Args:
        path: The file; overwritten.
        objects: What ``torch.load`` shall give.
        tick: Told the bytes of each block.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    gaps: dict[int, torch.Tensor] = {}  # a tensor under several names is stored once

    def gap_of(tensor: Lazy) -> torch.Tensor:
        return gaps.setdefault(id(tensor), _torch.without_data(tensor.shape, tensor.dtype))

    with serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_map(objects, gap_of), path)
    with path.open("rb") as stream:
        written = read_objects(stream, str(path))
    with path.open("r+b") as file:
        for tensor, gap in zip(_leaves(objects), _leaves(written), strict=True):
            if gaps.pop(id(tensor), None) is None:
                continue
            file.seek(_torch.storage_offset(gap))
            for block in as_bytes(tensor):
                file.write(block)
                tick(len(block))


def _map(value: Any, change: Callable[[Lazy], Any]) -> Any:
    if isinstance(value, Lazy):
        return change(value)
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map(item, change) for item in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    """Tensors, lazy or not, in the order of :func:`_map`."""
    if isinstance(value, Lazy | torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
