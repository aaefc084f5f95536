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
from te_fsdp._te_formats import Block
from te_fsdp.checkpoint.entries import ExpertPlace, Piece, cut_entry, per_expert
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import Owned
from te_fsdp.checkpoint.reading import Rectangle, Staged, rectangle
from te_fsdp.quantized.amax import quantize_whole
from te_fsdp.quantized.components import covering, dequantize_box, finish_writing, needed_components
from te_fsdp.sharding.outer_state import MAIN

__all__ = ["Conversion", "batches", "main_weight_of", "plan_conversion"]

#: Elements of the files' tensors that are converted at a time, which bounds the temporary memory.
_BATCH = 1 << 30


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

    def reads(self) -> list[Rectangle]:
        """What of the files' tensors gives the values. Local operation."""
        if self.key:
            value = torch.empty(self.owned.local.shape, device="meta")
            return [rectangle(self.key, piece) for piece in self._pieces(value)]
        return [self._covering(name, *box[:3]) for box in self._boxes() for name in self.needed]

    def value(self, staged: Staged) -> torch.Tensor:
        """The values, float32 of the local shape, of what was read. Local operation."""
        value = torch.empty(self.owned.local.shape, dtype=torch.float32, device=self.owned.local.device)
        if self.key:
            for piece in self._pieces(value):
                staged.copy(rectangle(self.key, piece), piece.tensor)
            return value
        for place, offsets, sizes, where in self._boxes():
            parts = {
                n: staged.new(self._covering(n, place, offsets, sizes), value.device) for n in self.needed
            }
            if place is not None:
                parts = {name: part[0] for name, part in parts.items()}
            value[where] = dequantize_box(self.described["format"], parts, self.needed, offsets, sizes)
        return value

    def _pieces(self, value: torch.Tensor) -> tuple[Piece, ...]:
        """Memory of the local shape as pieces of the files' tensor."""
        info = self.owned.info
        return self.owned.entry(cut_entry(value, info.original_shape, info.boxes)).pieces

    def _boxes(self) -> list[tuple[ExpertPlace | None, tuple[int, ...], tuple[int, ...], Any]]:
        """What this rank holds of one expert's weight each: offsets and sizes in it, and the place in local memory."""
        return [
            (part.place, box.original, box.sizes, part.where(box))
            for part in self.owned.parts()
            for box in part.boxes
        ]

    def _covering(
        self, name: str, place: ExpertPlace | None, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> Rectangle:
        """The blocks of a component that cover a box."""
        start, size = covering(offsets, sizes, self.needed[name])
        if place is not None:
            start, size = (place.index, *start), (1, *size)
        return f"model.{self.owned.key}:{name}", start, size

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
