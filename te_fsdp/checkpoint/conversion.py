"""Weights that do not go from file to model as they are: through high precision, then one rounding or quantization.

Where the values come from, best first:

1. the fp32 main weights of the checkpoint's optimizer, of which the saved weights are roundings;
2. the saved values, where the weight was saved in high precision;
3. the saved components of a quantized weight, dequantized. A rank reads the blocks that cover its rectangles, so that
   these may cut through blocks.

A scale of the whole weight comes from the amax of the whole weight: the ranks that hold pieces of it reduce theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from te_fsdp import _te
from te_fsdp._te_formats import FORMATS, Block
from te_fsdp.checkpoint.entries import Entry, ExpertPlace, Piece, add_entry, cut_entry, per_expert
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import Owned
from te_fsdp.quantized.amax import quantize_whole
from te_fsdp.quantized.components import finish_writing
from te_fsdp.quantized.dequantize import covering, dequantize_box, needed_components
from te_fsdp.sharding.outer_state import MAIN

__all__ = ["Conversion", "batches", "main_weight_of", "plan_conversion"]

#: Elements of the files' tensors that are converted at a time, which bounds the temporary memory.
_BATCH = 1 << 30

#: A component, the expert, if any, and where a piece of it begins.
_Start = tuple[str, ExpertPlace | None, tuple[int, ...]]


@dataclass
class Conversion:
    """One parameter on its way through high precision.

    Attributes:
        owned: The parameter.
        source: Where its values come from, in words.
        described: The manifest's description of the saved parameter.
        key: File key of the values; empty for components.
        needed: Components that give the values, with their blocks.
    """

    owned: Owned
    source: str
    described: dict[str, Any]
    key: str = ""
    needed: dict[str, Block] = field(default_factory=dict)
    _value: torch.Tensor | None = None
    _parts: dict[_Start, torch.Tensor] = field(default_factory=dict)

    def entries(self, device: torch.device | str | None = None) -> dict[str, Entry]:
        """New memory for what must be read, as entries; on the weight's device, or another. Local operation."""
        local = self.owned.local
        device = device or local.device
        if self.key:
            self._value = torch.empty(local.shape, dtype=torch.float32, device=device)
            info = self.owned.info()
            return {self.key: self.owned.entry(cut_entry(self._value, info.original_shape, info.boxes))}
        sizes: dict[_Start, tuple[int, ...]] = {}
        for name, block in self.needed.items():
            for place, offsets, extents, _ in self._rectangles():
                # Two rectangles may begin in one block: one piece serves both.
                start, size = covering(offsets, extents, block)
                sizes[name, place, start] = tuple(map(max, sizes.get((name, place, start), size), size))
        entries: dict[str, Entry] = {}
        for (name, place, start), size in sizes.items():
            dtype = _component_dtype(self.described["format"], name)
            part = self._parts[name, place, start] = torch.empty(size, dtype=dtype, device=device)
            entry = Entry((), dtype, (Piece(start, part),))
            key = f"model.{self.owned.key}:{name}"
            add_entry(entries, key, entry if place is None else place.lift(entry))
        return entries

    def _rectangles(self) -> list[tuple[ExpertPlace | None, tuple[int, ...], tuple[int, ...], Any]]:
        """What this rank holds of one expert's weight each: offsets and sizes in it, and the place in local memory."""
        return [
            (part.place, box.original, box.sizes, part.where(box))
            for part in self.owned.parts()
            for box in part.boxes
        ]

    def value(self) -> torch.Tensor:
        """What was read, float32 of the local shape. Local operation; frees what it came from."""
        local = self.owned.local
        if self._value is None:
            self._value = torch.empty(local.shape, dtype=torch.float32, device=local.device)
            for place, offsets, extents, where in self._rectangles():
                parts = {}
                for name, block in self.needed.items():
                    start, size = covering(offsets, extents, block)
                    parts[name] = self._parts[name, place, start][tuple(slice(0, n) for n in size)]
                format_ = self.described["format"]
                self._value[where] = dequantize_box(format_, parts, self.needed, offsets, extents)
        value, self._value, self._parts = self._value, None, {}
        return value

    def store(self, value: torch.Tensor, *, keep_delayed_scale: bool) -> None:
        """Give the parameter its value: rounded to its dtype, or quantized once.

        Collective over the ranks that hold pieces of the weight where its format has one scale per tensor.

        Args:
            value: float32, of the local shape.
            keep_delayed_scale: Whether the scale of delayed scaling was loaded and shall be used.
        """
        local = self.owned.local
        with torch.no_grad():
            if not _te.is_quantized(local):
                local.copy_(value)
                return
            module, name = self.owned.module, self.owned.name
            quantize_whole(module, name, local, value, keep_delayed_scale=keep_delayed_scale)
        finish_writing(local)
        if _te.keeps_high_precision_value(self.owned.module):
            _te.attach_high_precision_value(local, value.to(self.owned.parameter.dtype).cpu())


def _component_dtype(described: str, name: str) -> torch.dtype:
    """Element type of a component: bytes, or float32 where the values are numbers."""
    return next(buffer.dtype for buffer in FORMATS[described.split()[0]].buffers if buffer.name == name)


def plan_conversion(owned: Owned, saved: dict[str, Any], states: dict[str, Any]) -> Conversion:
    """Where the values of a parameter come from. Local operation.

    Args:
        owned: The parameter.
        saved: The manifest's description of it.
        states: The manifest's description of its optimizer state; empty without.

    Raises:
        CheckpointError: Saved components that give no values.
    """
    main = states.get(MAIN, {})
    has_main = main.get("dtype") == "float32" and main.get("shape") == saved["shape"]
    if has_main and per_expert(main, owned.expert) is not None:
        return Conversion(owned, "main weights", saved, key=main_weight_of(owned.key))
    if saved["format"] is None:
        return Conversion(owned, "saved values", saved, key=f"model.{owned.key}")
    needed = needed_components(saved["format"], saved["components"], owned.fqn)
    return Conversion(owned, "dequantized values", saved, needed=needed)


def main_weight_of(name: str) -> str:
    """File key of a parameter's main weight."""
    return f"optimizer.state.{name}.{MAIN}"


def batches(named: dict[str, list[Conversion]], manifest: Manifest) -> Iterator[list[Conversion]]:
    """Stretches of bounded size, as many on all ranks, also where these hold different experts.

    Args:
        named: By name of the files' tensor; the same names in the same order on all ranks.
        manifest: Tells the sizes of these.
    """
    batch: list[Conversion] = []
    names = size = 0
    for name, conversions in named.items():
        elements = math.prod(manifest.tensor(name)["shape"])
        if names and size + elements > _BATCH:
            yield batch
            batch, names, size = [], 0, 0
        batch += conversions
        names, size = names + 1, size + elements
    if names:
        yield batch
