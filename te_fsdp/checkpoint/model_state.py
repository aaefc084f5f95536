"""A model's side of a checkpoint: its tensors as entries, and the manifest's description of them.

Keys in the files: ``model.<name>`` of a high-precision parameter or buffer, ``model.<name>:<component>`` of a
quantized weight. The parameters of a layer's experts are one tensor, see :mod:`te_fsdp.checkpoint.experts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te
from te_fsdp.binding import binding_of
from te_fsdp.checkpoint.collective import world_size
from te_fsdp.checkpoint.entries import Entry, add_entry, cut_entry, whole_entry
from te_fsdp.checkpoint.experts import GROUPED
from te_fsdp.checkpoint.owned import Owned, by_key, clean_name, owned_buffers, owned_parameters
from te_fsdp.checkpoint.quantized import describe_quantized, finish_quantized, quantized_entries
from te_fsdp.errors import CheckpointError, PlacementError, message
from te_fsdp.layout.rules import PLAIN, Layout
from te_fsdp.modules.plan import original_layouts
from te_fsdp.sharding.state import sharding_state

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.modules.shards import ShardInfo

__all__ = ["ModelState", "dtype_name", "model_state", "modules_with_extra_state", "shorten", "tied_names"]


@dataclass
class ModelState:
    """What a model contributes to a checkpoint, or takes from one.

    Attributes:
        owned: Parameters by name.
        members: Parameters by the files' tensor that they are, or are part of. What follows goes by these names.
        described: The manifest's ``parameters``.
        buffers: The manifest's ``buffers``.
        entries: Tensors by key.
        keys: Keys of each tensor.
        cut_blocks: Quantized parameters whose rectangles on this rank cut through blocks, when that was allowed; they
            have no entries.
    """

    owned: dict[str, Owned]
    members: dict[str, list[Owned]] = field(default_factory=dict)
    described: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers: dict[str, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    cut_blocks: set[str] = field(default_factory=set)

    def finish_loading(self, names: set[str]) -> None:
        """Drop what quantized weights derived from the bytes that were replaced. Local operation."""
        for owned in (one for name in names & self.members.keys() for one in self.members[name]):
            if _te.is_quantized(owned.local):
                finish_quantized(owned.local)


def _check_whole_job(model: nn.Module) -> None:
    """All ranks write one checkpoint, in which each name is one tensor: ranks must not hold other models."""
    states = (sharding_state(module) for module in model.modules())
    for ranks in (state.meshes.device_mesh.size() for state in states if state is not None):
        if ranks != world_size():
            raise CheckpointError(
                message(
                    f"checkpoint of {type(model).__name__}, a model on {ranks} of {world_size()} ranks",
                    expected="one model on all ranks",
                    got="meshes of one stage, cut out of a mesh with a further axis",
                    why="Stages are different models, and a checkpoint of te_fsdp holds one",
                    fix="plain torch.distributed.checkpoint with get_state_dict, and names that differ between stages",
                )
            )


def model_state(model: nn.Module, *, may_cut_blocks: bool = False) -> ModelState:
    """Entries and description of a model's parameters and persistent buffers. Local operation.

    FSDP2 units are resharded: the entries are views of the sharded parameters.

    Args:
        model: The model.
        may_cut_blocks: Whether a rank's rectangles may cut through blocks of a quantized weight, which then gets no
            entries: it can be loaded through high precision, but not saved.

    Raises:
        CheckpointError: Parameters or buffers on meta, or a stage of a pipeline.
        PlacementError: A shard whose place in the original is unknown.
    """
    _check_whole_job(model)
    state = ModelState({owned.fqn: owned for owned in owned_parameters(model)})
    state.members = by_key(state.owned.values())
    buffers = list(owned_buffers(model))
    absent = [o.fqn for o in (*state.owned.values(), *buffers) if o.local.is_meta]
    if absent:
        raise CheckpointError(
            message(
                f"{len(absent)} tensor(s) on meta: {shorten(absent)}",
                expected="a model on its device",
                fix="call te_fsdp.materialize(model) first",
            )
        )
    layouts = original_layouts(model)
    for owned in state.owned.values():
        layout = layouts.get(id(owned.module), {}).get(owned.name)
        if layout is None and binding_of(owned.module) is not None:
            layout = PLAIN
        _add_parameter(state, owned, layout, may_cut_blocks)
    for owned in buffers:
        shape, dtype = owned.parameter.shape, owned.parameter.dtype
        state.buffers[owned.fqn] = {"shape": list(shape), "dtype": dtype_name(dtype)}
        state.entries[f"model.{owned.fqn}"] = _plain_entry(owned, owned.info())
        state.keys[owned.fqn] = [f"model.{owned.fqn}"]
    return state


def _plain_entry(owned: Owned, info: ShardInfo) -> Entry:
    """Entry of a tensor in high precision: whole, or this rank's shard of a DTensor."""
    if info.local_shape == info.original_shape and not isinstance(owned.parameter, DTensor):
        return whole_entry(owned.local)
    return cut_entry(owned.local, info.original_shape, info.boxes)


def _add_parameter(state: ModelState, owned: Owned, layout: Layout | None, may_cut_blocks: bool) -> None:
    info, local, name = owned.info(), owned.local, owned.key
    is_grouped = owned.expert is not None or owned.is_grouped
    described: dict[str, Any] = {
        "shape": list(owned.entry(Entry(info.original_shape, local.dtype, ())).shape),
        "dtype": dtype_name(owned.parameter.dtype),
        "layout": GROUPED if is_grouped else str(layout) if layout is not None else None,
    }
    entries: dict[str, Entry] = {}
    if not _te.is_quantized(local):
        described["format"] = None
        entries[f"model.{name}"] = owned.entry(_plain_entry(owned, info))
    else:
        described |= describe_quantized(owned)
        try:
            entries = quantized_entries(owned, info)
        except PlacementError:
            if not may_cut_blocks:
                raise
            state.cut_blocks.add(name)
    for key, entry in entries.items():
        add_entry(state.entries, key, entry)
    state.keys[name] = list(entries)
    first = state.described.setdefault(name, described)
    if first != described:
        raise CheckpointError(_differing_experts(name, owned, first, described))


def _differing_experts(name: str, owned: Owned, first: dict[str, Any], other: dict[str, Any]) -> str:
    wrong = [key for key in first if first[key] != other.get(key)]
    return message(
        f"{name}: {owned.fqn} is no tensor like those of the other experts",
        expected=", ".join(f"{key} {first[key]}" for key in wrong),
        got=", ".join(f"{key} {other.get(key)}" for key in wrong),
        why="A checkpoint holds the weights of all experts of a layer as one tensor",
        fix="build the experts of one layer alike",
    )


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
