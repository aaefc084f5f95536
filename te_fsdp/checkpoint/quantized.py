"""Quantized weights as entries: their components, each in the layout of the original; one expert's at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.checkpoint.entries import Entry, add_entry, cut_entry, whole_entry
from te_fsdp.checkpoint.experts import ExpertPlace
from te_fsdp.layout.boxes import Box
from te_fsdp.quantized.components import components_of, describe_format, finish_writing
from te_fsdp.quantized.dequantize import needed_components
from te_fsdp.quantized.grouped_gather import derive_transposes
from te_fsdp.quantized.grouped_weight import empty_experts

if TYPE_CHECKING:
    from te_fsdp.checkpoint.owned import Owned
    from te_fsdp.modules.shards import ShardInfo

__all__ = ["describe_quantized", "finish_quantized", "quantized_entries"]

#: A quantized tensor, its rectangles, the shape of its original, and its place among the experts.
_Part = tuple[torch.Tensor, tuple[Box, ...], tuple[int, ...], "ExpertPlace | None"]


def describe_quantized(owned: Owned) -> dict[str, Any]:
    """The manifest's ``format`` and ``components`` of a quantized parameter. Local operation.

    Raises:
        CheckpointError: Its components do not give its values.
    """
    experts = _experts(owned.local)
    one = owned.local if experts is None else experts[0] if experts else _like_one(owned)
    names = sorted(component.name for component in components_of(one, owned.fqn))
    described = describe_format(one)
    assert described is not None
    needed_components(
        described, names, owned.fqn
    )  # raises: a weight whose bytes are elsewhere must not be saved
    return {"format": described, "components": names}


def quantized_entries(owned: Owned, info: ShardInfo) -> dict[str, Entry]:
    """Entries of a quantized parameter's components, by file key: views of its buffers. Local operation.

    Raises:
        PlacementError: A rank's rectangle cuts through blocks.
    """
    entries: dict[str, Entry] = {}
    for local, boxes, original, place in _parts(owned, info):
        for component in components_of(local, owned.fqn):
            entry = whole_entry(component.tensor)
            if component.block is not None:
                rectangles = component.boxes(boxes, owned.fqn, original)
                entry = cut_entry(component.tensor, component.shape(original), rectangles)
            key = f"model.{owned.key}:{component.name}"
            add_entry(entries, key, entry if place is None else place.lift(entry))
    return entries


def finish_quantized(local: torch.Tensor) -> None:
    """Forget, or make anew, what a quantized tensor derived from bytes that have been overwritten. Local operation."""
    experts = _experts(local)
    if experts is None:
        finish_writing(local)
    else:
        derive_transposes(local)


def _experts(local: torch.Tensor) -> list[Any] | None:
    """Each expert's quantized tensor, where one tensor holds several."""
    return getattr(local, "experts", None)


def _like_one(owned: Owned) -> Any:
    """An expert's tensor for a rank that holds none."""
    local = owned.local
    shape = (1, *owned.info().original_shape[1:])
    return empty_experts(shape, _te.quantizer_of(local), local.dtype, local.device).experts[0]


def _parts(owned: Owned, info: ShardInfo) -> list[_Part]:
    experts = _experts(owned.local)
    if experts is None:
        return [(owned.local, info.boxes, info.original_shape, owned.expert)]
    total, found = info.original_shape[0], []
    for box in info.boxes:
        one = Box(box.original[1:], box.local[1:], box.sizes[1:])
        for index in range(box.sizes[0]):
            place = ExpertPlace(box.original[0] + index, total)
            found.append((experts[box.local[0] + index], (one,), info.original_shape[1:], place))
    return found
