"""Delayed scaling's state in a checkpoint: plain tensors, ``delayed.<module>:<tensor>``.

TE keeps the scales and histories of all tensors of a module side by side. A ``GroupedLinear`` has those of its experts
one after the other; in the files they are those of all experts, and a rank holds the stretch of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp import _te, _te_delayed, _torch
from te_fsdp.agree import world_size
from te_fsdp.checkpoint.entries import Entry, Piece
from te_fsdp.checkpoint.model_state import clean_name, own_experts

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "compare_delayed",
    "delayed_state",
    "make_delayed",
    "other_format_modules",
    "reset_delayed",
    "share_newest_amax",
]


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return {clean_name("", prefix): module for prefix, module in model.named_modules()}


def _delayed(model: nn.Module) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Modules with delayed-scaling state, by name."""
    found = {}
    for name, module in _modules(model).items():
        states = _te_delayed.delayed_states(module)
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
    described, experts = _te_delayed.describe_delayed_recipe(module), own_experts(module)
    return described if experts is None else {**described, "num_gemms": experts[2]}


def _entry(module: nn.Module, tensor: torch.Tensor) -> Entry:
    """Entry of a module's scales ``(tensors,)`` or history ``(steps, tensors)``, or of its experts' part of them."""
    first, count, total = own_experts(module) or (0, 1, 1)
    each = tensor.shape[-1] // count
    shape = (*tensor.shape[:-1], each * total)
    return Entry(shape, tensor.dtype, (Piece((0,) * (tensor.ndim - 1) + (each * first,), tensor.detach()),))


def share_newest_amax(entries: dict[str, Entry]) -> None:
    """Give copied histories the maximum over ranks in their newest row. Collective over the world.

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
    dist.all_reduce(newest, op=dist.ReduceOp.MAX)
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
        if not _te_delayed.has_recipe_state(modules.get(name)):
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
        for key, state in _te_delayed.make_delayed_states(module, own).items():
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
