"""Weights that do not go from file to model as they are: through high precision, then one rounding or quantization.

Where the values come from, best first:

1. the fp32 main weights of the checkpoint's optimizer, of which the saved weights are roundings;
2. the saved values, where the weight was saved in high precision;
3. the saved components of a quantized weight, dequantized. A rank reads the blocks that cover its rectangles, so that
   these may cut through blocks.

A scale of the whole weight comes from the amax of the whole weight: the ranks that hold pieces of it reduce theirs.

Delayed scaling's state is plain tensors in a checkpoint, ``delayed.<module>:<tensor>``. TE keeps the scales and
histories of all tensors of a module side by side. A ``GroupedLinear`` has those of its experts one after the other;
in the files they are those of all experts, and a rank holds the stretch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te, _te_modules, _torch
from te_fsdp._te_formats import Block
from te_fsdp.agree import maximum, world_size
from te_fsdp.checkpoint.entries import Entry, ExpertPlace, Piece, cut_entry, per_expert
from te_fsdp.checkpoint.manifest import Manifest
from te_fsdp.checkpoint.model_state import Owned, clean_name, own_experts
from te_fsdp.checkpoint.reading import Rectangle, Staged, rectangle
from te_fsdp.quantized.components import covering, dequantize_box, finish_writing, needed_components
from te_fsdp.quantized.shards import quantize_whole
from te_fsdp.sharding.main_parameters import MAIN

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

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


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {clean_name("", prefix): module for prefix, module in model.named_modules()}


def _delayed(model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Modules with delayed-scaling state, by name."""
    found = {}
    for name, module in _modules(model).items():
        states = _te.delayed_states(module)
        if states is not None:
            found[name] = (module, states)
    return found


def delayed_state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Description and copies of delayed scaling's state. Local operation."""
    described: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for name, (module, states) in _delayed(model).items():
        described[name] = _describe(module)
        for key, state in states.items():
            entries[f"delayed.{name}:{key}.scale"] = _entry(module, state.scale.clone())
            entries[f"delayed.{name}:{key}.amax_history"] = _entry(module, state.amax_history.clone())
    return described, entries


def _describe(module: nn.Module) -> dict[str, Any]:
    """The recipe, with the GEMMs of all experts."""
    described, experts = _te_modules.describe_delayed_recipe(module), own_experts(module)
    return described if experts is None else {**described, "num_gemms": experts[2]}


def _entry(module: nn.Module, tensor: torch.Tensor) -> Entry:
    """Entry of a module's scales ``(tensors,)`` or history ``(steps, tensors)``, or of its experts' part of them."""
    first, count, total = own_experts(module) or (0, 1, 1)
    each = tensor.shape[-1] // count
    shape = (*tensor.shape[:-1], each * total)
    return Entry(shape, tensor.dtype, (Piece((0,) * (tensor.ndim - 1) + (each * first,), tensor.detach()),))


def share_newest_amax(entries: dict[str, Entry], mesh: DeviceMesh | None = None) -> None:
    """Give copied histories the maximum over ranks in their newest row. Collective over a mesh, or the world.

    Between a step and the next forward that row holds what each rank saw alone (the optimizer quantizes
    shards). TE takes the maximum over ranks before it reads the row, so that the maximum on all ranks is the
    same state.
    """
    histories = [e for key, e in entries.items() if key.endswith("amax_history") and not e.is_empty]
    if not histories or world_size() == 1:
        return
    rows = []
    for entry in histories:
        # Amaxes are not negative: zeros stand for the experts of other ranks.
        piece = entry.pieces[0]
        rows.append(piece.tensor.new_zeros(entry.shape[1]))
        rows[-1][_columns(piece)] = piece.tensor[0]
    newest = torch.cat(rows)
    maximum(newest, mesh)
    for entry, row in zip(histories, newest.split([e.shape[1] for e in histories]), strict=True):
        entry.pieces[0].tensor[0] = row[_columns(entry.pieces[0])]


def _columns(piece: Piece) -> slice:
    return slice(piece.offsets[1], piece.offsets[1] + piece.tensor.shape[1])


def compare_delayed(model: nn.Module, described: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Differences in delayed-scaling state: kind, module name, detail. Local operation.

    A recipe is known here once the module has run under it; margin and history may change in training, the number
    of GEMMs and the FP8 formats may not.
    """
    modules = _modules(model)
    live = _delayed(model)
    found = []
    for name, then in described.items():
        if not _te_modules.has_recipe_state(modules.get(name)):
            found.append(("with delayed-scaling state for a module that the model lacks", name, ""))
            continue
        now = _describe(live[name][0]) if name in live else then
        experts = own_experts(modules[name])
        if experts is not None:
            now = {**now, "num_gemms": experts[2]}
        for key in ("num_gemms", "fp8_format"):
            if then[key] != now[key]:
                found.append(("with another recipe", name, f"{key}: saved {then[key]}, model has {now[key]}"))
    return found


def other_format_modules(model: nn.Module, described: dict[str, Any]) -> list[str]:
    """Described modules whose weights are quantized here without delayed scaling, so that its state means nothing."""
    modules = _modules(model)
    found = []
    for name in described:
        own = [_torch.local_of(p) for p in modules[name]._parameters.values() if p is not None]
        quantized = [local for local in own if _te.is_quantized(local)]
        if quantized and not any(_te.has_delayed_scale(local) for local in quantized):
            found.append(name)
    return found


def make_delayed(model: nn.Module, described: dict[str, Any]) -> dict[str, Entry]:
    """Entries of the described modules' live delayed-scaling state, made where there is none."""
    modules = _modules(model)
    entries = {}
    for name, recipe in described.items():
        module = modules[name]
        experts = own_experts(module)
        own = recipe if experts is None else {**recipe, "num_gemms": experts[1]}
        for key, state in _te_modules.make_delayed_states(module, own).items():
            entries[f"delayed.{name}:{key}.scale"] = _entry(module, state.scale)
            entries[f"delayed.{name}:{key}.amax_history"] = _entry(module, state.amax_history)
    return entries


def reset_delayed(model: nn.Module, keep: set[str]) -> list[str]:
    """Make delayed-scaling state that the checkpoint lacks that of a fresh module. Local operation.

    Args:
        model: The model.
        keep: Modules whose state is left.

    Returns:
        The others that have such state.
    """
    found = []
    for name, (_, states) in _delayed(model).items():
        if name not in keep:
            found.append(name)
            for state in states.values():
                state.scale.fill_(1.0)
                state.amax_history.zero_()
    return found
