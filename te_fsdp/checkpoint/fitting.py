"""Fit the names in a checkpoint to a model: tied tensors, and the weights of experts.

State dicts and safetensors do not record which names a model ties, nor whether ``weight0`` belongs to an expert. Only
the model does. Every load of files that :func:`te_fsdp.checkpoint.save` did not write therefore uses this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from te_fsdp.checkpoint.model_state import owned_parameters, tied_names
from te_fsdp.checkpoint.reader import Contents, key_ends, stack_experts
from te_fsdp.checkpoint.tensor_entries import stacked_name

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.checkpoint.manifest import Manifest


class Change(NamedTuple):
    """One name of a checkpoint that has to change."""

    name: str  #: A further name of a tied tensor, or the name of the tensor of all experts
    first: str | None  #: The tied tensor's first name in the model; ``None``: stack experts under ``name``


def changes_for(manifest: Manifest, model: nn.Module) -> list[Change]:
    """Return the names in a manifest that differ from a model's by ties or experts. Local operation."""
    have = manifest.parameters.keys() | manifest.buffers.keys()
    grouped = {o.key for o in owned_parameters(model) if o.expert is not None or o.is_grouped}
    ties = tied_names(model)
    for name, first in list(ties.items()):
        if stacked_name(first) in grouped and stacked_name(name) != stacked_name(first):
            grouped.add(stacked_name(name))
            ties[stacked_name(name)] = stacked_name(first)
    experts = [name for name in sorted(grouped) if name not in have and f"{name}0" in have]
    tied = [Change(name, first) for name, first in ties.items() if name in have | {*experts}]
    return [*(Change(name, None) for name in experts), *tied]


def stack(contents: Contents, changes: Iterable[Change]) -> None:
    """Put the weights of the experts in ``changes`` together; changes ``contents``. Local operation."""
    if experts := {change.name for change in changes if change.first is None}:
        stack_experts(contents, experts)


def equal_ties(contents: Contents, changes: Iterable[Change]) -> list[tuple[Change, bool]]:
    """Return the ties in ``changes``, each with whether the stored values agree. Reads them. Local operation."""
    found: list[tuple[Change, bool]] = []
    # Where the value of a first name is stored: files may have only further names of a tied tensor.
    source: dict[str, str] = {}
    have = {*contents.names}
    for change in changes:
        if change.first is None or change.name not in have:
            continue
        first = source.setdefault(change.first, change.first if change.first in have else change.name)
        found.append((change, first == change.name or _is_equal(contents, change.name, first)))
    return found


def _is_equal(contents: Contents, name: str, other: str) -> bool:
    """Return whether two tensors have one description and one value, bit for bit."""
    described = {**contents.manifest.parameters, **contents.manifest.buffers}
    # Before any data are read. Different formats mean different values for the model.
    if described[name] != described[other]:
        return False
    for end in key_ends(described[name]):
        a, b = (contents.tensors[f"model.{n}{end}"] for n in (name, other))
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        # In blocks, because an embedding may be larger than the memory that is free on this host.
        for block in a.blocks():
            # As bytes, because NaN differs from itself.
            one, two = (t.rows(*block).contiguous().view(-1).view(torch.uint8) for t in (a, b))
            if not torch.equal(one, two):
                return False
    return True


def tie(contents: Contents, ties: Iterable[tuple[Change, bool]]) -> None:
    """Keep each tied tensor once, under the model's first name; changes ``contents``. Local operation.

    Values that differ stay. The load then names them as tensors that only the checkpoint has.
    """
    manifest = contents.manifest
    for (name, first), is_equal in ties:
        assert first is not None
        if not is_equal:
            contents.notes.append(f"{name}: tied to {first} in this model, but its stored values differ")
            continue
        # Before the name is removed from the tables that list the components of a weight.
        ends = key_ends(manifest.tensor(name))
        is_absent = first not in contents.names
        for table in (manifest.parameters, manifest.buffers):
            if (described := table.pop(name, None)) is not None and is_absent:
                table[first] = described
        for end in ends:
            tensor = contents.tensors.pop(f"model.{name}{end}")
            if is_absent:
                contents.tensors[f"model.{first}{end}"] = tensor
        optimizer = contents.manifest.optimizer
        if optimizer is not None:
            states = dict(optimizer["state"])
            own = states.pop(name, None)
            keys = [key for key in contents.tensors if key.startswith(f"optimizer.state.{name}.")]
            tensors = {key: contents.tensors.pop(key) for key in keys}
            if own is not None and first not in states:
                states[first] = own
                prefix = f"optimizer.state.{name}."
                contents.tensors |= {
                    f"optimizer.state.{first}.{key.removeprefix(prefix)}": t for key, t in tensors.items()
                }
            groups, seen = [], set[str]()
            # A parameter may be in one group only: the first one that has either name keeps it.
            for group in optimizer["groups"]:
                names = dict.fromkeys(first if n == name else n for n in group["parameters"])
                groups.append({**group, "parameters": [n for n in names if n not in seen]})
                seen |= names.keys()
            contents.manifest.optimizer = {**optimizer, "state": states, "groups": groups}
        manifest.tied.pop(first, None)
        manifest.tied |= {n: first for n, other in manifest.tied.items() if other == name} | {name: first}
        how = "stored under this name alone" if is_absent else "and equal to it"
        contents.notes.append(f"{name}: tied to {first} here, {how}")
