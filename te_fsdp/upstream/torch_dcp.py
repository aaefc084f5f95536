"""Private names of DCP: entries of its plans that are not tensors of the user. Checked with torch 2.11 to 2.15."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import planner_helpers, state_dict as _state_dict
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

#: The rectangles of this rank's part of a tensor (``_create_chunk_list``)
chunk_list = planner_helpers._create_chunk_list


def is_called_by(prefix: str) -> bool:
    """Return whether the function of torch that has called the caller, a replacement, has a name with this prefix."""
    return sys._getframe(2).f_code.co_name.startswith(prefix)


def loaded_entries(model: Any, optimizer: Any, state_dict: Any, info: Any) -> set[Any]:
    """Return (name, key) of the states in an optimizer's state dict, nested or flattened. Local operation.

    Raise the error of torch's load (``_split_optim_state_dict``) if it lacks parameters.
    """
    if "state" not in state_dict:
        return {tuple(key[len("state.") :].rsplit(".", 1)) for key in state_dict if key.startswith("state.")}
    states: Any = _state_dict._split_optim_state_dict(model, optimizer, state_dict, info)["state"]
    return {(name, key) for name, state in states.items() for key in state}


def nested_states(optimizer: Any, state_dict: Any, info: Any) -> Any:
    """Return a flattened state dict of optimizers as the nested one of an optimizer, with states; others unchanged."""
    if not state_dict or "state" in state_dict:
        return state_dict
    _state_dict._init_optim_state(optimizer)
    return _state_dict._unflatten_optim_state_dict(optimizer, state_dict, info)


def wrapper(cls: Any, sizes: Sequence[int], like: torch.Tensor) -> Any:
    """Return a tensor of a subclass without memory (``Tensor._make_wrapper_subclass``)."""
    return torch.Tensor._make_wrapper_subclass(cls, tuple(sizes), dtype=like.dtype, device=like.device)


class LoadTarget(torch.Tensor):
    """An entry of a load plan in the shape of the checkpoint's tensor. Its pieces are filled, by their offsets."""

    pieces: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls: Any, shape: Any, like: torch.Tensor) -> LoadTarget:
        """Create the entry without pieces."""
        entry = wrapper(cls, shape, like)
        entry.pieces = {}
        return entry

    def __init__(self, *unused: Any) -> None:
        """Do nothing, because :meth:`__new__` has set all attributes."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[bad-override]
        """Refuse all functions: DCP loads into the pieces, never into the entry."""
        return NotImplemented

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(o), torch.Size(t.shape)) for o, t in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.pieces[tuple(index.offset)]


def byte_item(fqn: str) -> list[WriteItem]:
    """Return the plan to write an object as bytes, which loads into an object of any size."""
    return [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)]


def tensor_item(fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
    """Return the plan to write an ordinary tensor."""
    full = ChunkStorageMetadata(torch.Size([0] * tensor.ndim), torch.Size(tensor.shape))
    return [shard_item(fqn, tensor, full, full.sizes, WriteItemType.TENSOR)]


def shard_item(
    fqn: str,
    shard: torch.Tensor,
    chunk: ChunkStorageMetadata,
    size: torch.Size,
    kind: WriteItemType = WriteItemType.SHARD,
    *,
    memory_format: torch.memory_format | None = None,
) -> WriteItem:
    """Return the plan to write the shard ``chunk`` of a tensor of a size."""
    properties = TensorProperties.create_from_tensor(shard)
    properties.memory_format = memory_format or properties.memory_format
    data = TensorWriteData(chunk=chunk, properties=properties, size=size)
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=kind, tensor_data=data)
