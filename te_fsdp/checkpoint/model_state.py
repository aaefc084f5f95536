"""A model's side of a checkpoint: its tensors as entries, and the manifest's description of them.

Keys in the files: ``model.<name>`` of a high-precision parameter or buffer, ``model.<name>:<component>`` of a
quantized weight, ``delayed.<module>:<tensor>`` of delayed scaling's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp.binding import binding_of
from te_fsdp.checkpoint.collective import world_size
from te_fsdp.checkpoint.entries import (
    Entry,
    Owned,
    clean_name,
    cut_entry,
    owned_buffers,
    owned_parameters,
    whole_entry,
)
from te_fsdp.errors import CheckpointError, PlacementError, message
from te_fsdp.layout.rules import PLAIN, Layout
from te_fsdp.modules.plan import original_layouts
from te_fsdp.quantized.components import Component, components_of, describe_format, finish_writing

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.layout.boxes import Box

__all__ = [
    "ModelState",
    "compare_delayed",
    "delayed_state",
    "dtype_name",
    "make_delayed",
    "model_state",
    "modules_with_extra_state",
    "other_format_modules",
    "reset_delayed",
    "share_newest_amax",
    "shorten",
    "tied_names",
]


@dataclass
class ModelState:
    """What a model contributes to a checkpoint, or takes from one.

    Attributes:
        owned: Parameters by name.
        described: The manifest's ``parameters``.
        buffers: The manifest's ``buffers``.
        entries: Tensors by key.
        keys: Keys of each parameter or buffer.
        cut_blocks: Quantized parameters whose rectangles on this rank cut through blocks, when that was allowed; they
            have no entries.
    """

    owned: dict[str, Owned]
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    cut_blocks: set[str] = field(default_factory=set)

    def finish_loading(self, names: set[str]) -> None:
        """Drop what quantized weights derived from the bytes that were replaced. Local operation."""
        for name in names & set(self.owned):
            if _te.is_quantized(self.owned[name].local):
                finish_writing(self.owned[name].local)


def model_state(model: nn.Module, *, may_cut_blocks: bool = False) -> ModelState:
    """Entries and description of a model's parameters and persistent buffers. Local operation.

    FSDP2 units are resharded: the entries are views of the sharded parameters.

    Args:
        model: The model.
        may_cut_blocks: Whether a rank's rectangles may cut through blocks of a quantized weight, which then gets no
            entries: it can be loaded through high precision, but not saved.

    Raises:
        CheckpointError: Parameters or buffers on meta.
        PlacementError: A shard whose place in the original is unknown.
    """
    state = ModelState({owned.fqn: owned for owned in owned_parameters(model)})
    buffers = dict(owned_buffers(model))
    absent = [n for n, o in state.owned.items() if o.local.is_meta] + [
        n for n, b in buffers.items() if b.is_meta
    ]
    if absent:
        raise CheckpointError(
            message(
                f"{len(absent)} tensor(s) on meta: {shorten(absent)}",
                expected="a model on its device",
                fix="call te_fsdp.materialize(model) first",
            )
        )
    layouts = original_layouts(model)
    for name, owned in state.owned.items():
        layout = layouts.get(id(owned.module), {}).get(owned.name)
        if layout is None and binding_of(owned.module) is not None:
            layout = PLAIN
        _add_parameter(state, name, owned, layout, may_cut_blocks)
    for name, buffer in buffers.items():
        state.buffers[name] = {"shape": list(buffer.shape), "dtype": dtype_name(buffer.dtype)}
        state.entries[f"model.{name}"] = whole_entry(buffer)
        state.keys[name] = [f"model.{name}"]
    return state


def _add_parameter(
    state: ModelState, name: str, owned: Owned, layout: Layout | None, may_cut_blocks: bool
) -> None:
    info, local = owned.info(), owned.local
    described: dict[str, Any] = {
        "shape": list(info.original_shape),
        "dtype": dtype_name(owned.parameter.dtype),
        "layout": str(layout) if layout is not None else None,
        "format": describe_format(local),
    }
    if described["format"] is None:
        whole = info.local_shape == info.original_shape and not hasattr(owned.parameter, "placements")
        entry = whole_entry(local) if whole else cut_entry(local, info.original_shape, info.boxes)
        state.entries[f"model.{name}"] = entry
        state.keys[name] = [f"model.{name}"]
    else:
        components = components_of(local, name)
        described["components"] = sorted(component.name for component in components)
        try:
            entries = _component_entries(components, info.original_shape, info.boxes, name)
        except PlacementError:
            if not may_cut_blocks:
                raise
            entries = {}
            state.cut_blocks.add(name)
        state.entries |= entries
        state.keys[name] = list(entries)
    state.described[name] = described


def _component_entries(
    components: list[Component], original: tuple[int, ...], boxes: tuple[Box, ...], name: str
) -> dict[str, Entry]:
    """Entries of a quantized weight's components."""
    entries = {}
    for component in components:
        key = f"model.{name}:{component.name}"
        if component.block is None:
            entries[key] = whole_entry(component.tensor)
        else:
            entries[key] = cut_entry(
                component.tensor, component.shape(original), component.boxes(boxes, name, original)
            )
    return entries


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def shorten(names: list[str], most: int = 5) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def modules_with_extra_state(model: nn.Module) -> list[str]:
    """Names of the modules whose state dict has an ``_extra_state`` entry, as all of TE's with parameters have."""
    stock = torch.nn.Module.get_extra_state
    modules = model.named_modules(remove_duplicate=False)
    return [clean_name("", prefix) for prefix, m in modules if type(m).get_extra_state is not stock]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters and buffers, each with the first name."""
    first: dict[int, str] = {}
    tied = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                tied[clean_name("", name)] = clean_name("", first[id(tensor)])
    return tied


# --- delayed scaling


def _delayed(model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Modules with delayed-scaling state, by name."""
    found = {}
    for prefix, module in model.named_modules():
        states = _te.delayed_states(module)
        if states is not None:
            found[clean_name("", prefix)] = (module, states)
    return found


def delayed_state(model: nn.Module) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Description and copies of delayed scaling's state. Local operation."""
    described: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    for name, (module, states) in _delayed(model).items():
        described[name] = _te.describe_delayed_recipe(module)
        for key, state in states.items():
            entries[f"delayed.{name}:{key}.scale"] = whole_entry(state.scale.clone())
            entries[f"delayed.{name}:{key}.amax_history"] = whole_entry(state.amax_history.clone())
    return described, entries


def share_newest_amax(entries: dict[str, Entry]) -> None:
    """Give copied histories the maximum over ranks in their newest row. Collective over the world.

    Between a step and the next forward that row holds what each rank saw alone (the optimizer quantizes
    shards). TE takes the maximum over ranks before it reads the row, so that the maximum on all ranks is the
    same state.
    """
    histories = [
        e.pieces[0].tensor for key, e in entries.items() if key.endswith("amax_history") and not e.is_empty
    ]
    if not histories or world_size() == 1:
        return
    newest = torch.cat([history[0] for history in histories])
    dist.all_reduce(newest, op=dist.ReduceOp.MAX)
    for history, row in zip(histories, newest.split([h.shape[1] for h in histories]), strict=True):
        history[0] = row


def compare_delayed(model: nn.Module, described: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Differences in delayed-scaling state: kind, module name, detail. Local operation.

    A recipe is known here once the module has run under it; margin and history may change in training, the number
    of GEMMs and the FP8 formats may not.
    """
    modules = {clean_name("", prefix): module for prefix, module in model.named_modules()}
    live = _delayed(model)
    found = []
    for name, then in described.items():
        if not hasattr(modules.get(name), "fp8_meta"):
            found.append(("with delayed-scaling state for a module that the model lacks", name, ""))
            continue
        now = _te.describe_delayed_recipe(live[name][0]) if name in live else then
        for key in ("num_gemms", "fp8_format"):
            if then[key] != now[key]:
                found.append(("with another recipe", name, f"{key}: saved {then[key]}, model has {now[key]}"))
    return found


def other_format_modules(model: nn.Module, described: dict[str, Any]) -> list[str]:
    """Described modules whose weights are quantized here without delayed scaling, so that its state means nothing."""
    modules = {clean_name("", prefix): module for prefix, module in model.named_modules()}
    found = []
    for name in described:
        own = [_torch.local_of(p) for p in modules[name]._parameters.values() if p is not None]
        quantized = [local for local in own if _te.is_quantized(local)]
        if quantized and not any(_te.has_delayed_scale(local) for local in quantized):
            found.append(name)
    return found


def make_delayed(model: nn.Module, described: dict[str, Any]) -> dict[str, Entry]:
    """Entries of the described modules' live delayed-scaling state, made where there is none."""
    modules = {clean_name("", prefix): module for prefix, module in model.named_modules()}
    entries = {}
    for name, recipe in described.items():
        for key, state in _te.make_delayed_states(modules[name], recipe).items():
            entries[f"delayed.{name}:{key}.scale"] = whole_entry(state.scale)
            entries[f"delayed.{name}:{key}.amax_history"] = whole_entry(state.amax_history)
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
