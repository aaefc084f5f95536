"""What goes into a checkpoint, as rectangles of the original tensors: the unit that DCP plans with.

An entry is one tensor of the files, in the layout that a single process would have. A rank holds pieces of
it: views of its own local tensor, each with the place in the original where it belongs. Writing reads the
views, loading writes into them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fsdp import _te, _torch
from te_fsdp.modules.shards import ShardInfo, shard_info

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.layout.boxes import Box

__all__ = ["Entry", "Owned", "Piece", "cut_entry", "owned_buffers", "owned_parameters", "whole_entry"]

#: What wrappers add to module names; the names in the files are those of the bare model.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Piece:
    """A rectangle of the original and the view of local memory that holds it.

    Attributes:
        offsets: Where it lies in the original.
        tensor: View of the rank's own tensor; its shape is the rectangle's.
    """

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the files.

    Attributes:
        shape: Shape of the original.
        dtype: Element type.
        pieces: What this rank holds of it; none on a rank that holds nothing. What several ranks hold must be
            equal, which is checked before it is written once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Bytes of this rank's pieces."""
        return sum(p.tensor.numel() * p.tensor.element_size() for p in self.pieces)

    @property
    def is_empty(self) -> bool:
        """Whether the original has no element, so that there is nothing to store."""
        return math.prod(self.shape) == 0


@dataclass(frozen=True)
class Owned:
    """A parameter with its owner.

    Attributes:
        fqn: Name in the model, without what wrappers add.
        module: Owner.
        name: Name in the owner.
        parameter: The parameter.
    """

    fqn: str
    module: nn.Module
    name: str
    parameter: torch.nn.Parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's local tensor."""
        return _torch.local_of(self.parameter)

    def info(self) -> ShardInfo:
        """Where the local tensor lies in the original."""
        return shard_info(self.module, self.name, self.parameter, label=self.fqn)


def owned_parameters(model: nn.Module) -> list[Owned]:
    """Every parameter once, under its first name; FSDP2 units are resharded first. Local operation."""
    for module in model.modules():
        if _torch.is_fsdp_module(module):
            module.reshard()  # type: ignore[operator]
    found: dict[int, Owned] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in found:
                found[id(parameter)] = Owned(clean_name(prefix, name), module, name, parameter)
    return list(found.values())


def owned_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every persistent buffer, once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen and _torch.is_persistent(module, name):
                seen.add(id(buffer))
                yield clean_name(prefix, name), buffer


def clean_name(prefix: str, name: str) -> str:
    """Full name without the parts that wrappers add."""
    full = ".".join(part for part in (prefix, name) if part) + "."
    for wrapper in _WRAPPERS:
        full = full.replace(wrapper, "")
    return full[:-1]


def cut_entry(local: torch.Tensor, shape: Iterable[int], boxes: Iterable[Box]) -> Entry:
    """Entry of a tensor of which this rank holds boxes.

    Args:
        local: Plain local tensor.
        shape: Shape of the original.
        boxes: From :func:`te_fsdp.modules.shards.shard_info`.
    """
    assert not _te.is_quantized(local), "slices of quantized tensors are temporaries"
    local = local.detach()
    pieces = tuple(Piece(box.original, local[box.local_slices()]) for box in boxes)
    return Entry(tuple(shape), local.dtype, pieces)


def whole_entry(tensor: torch.Tensor) -> Entry:
    """Entry of a tensor that every rank holds whole."""
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    return Entry(shape, tensor.dtype, (Piece((0,) * len(shape), tensor),))
