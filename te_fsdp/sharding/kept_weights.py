"""Gathered weights that a forward without gradients leaves: kept for the next one, while the model shows its shards.

Of ``optim`` and ``optim_grads`` no backward releases them. Who reads or writes ``model.parameters()`` after an
evaluation (averages, clipping by hand, a new optimizer) would else work on copies that the next step throws away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fsdp import _fsdp2, _torch
from te_fsdp.parameters import binding_of

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.parameters import Installed
    from te_fsdp.sharding.state import ShardingState


def show_shards(state: ShardingState) -> None:
    """Let a model's parameters be its shards, where units stay gathered. Local operation; nothing is freed."""
    for name, unit in state.gathered():
        if name in state.aside or state.units[name].gather == "pass":
            continue
        for parameter, record in _fsdp2.gathered_parameters(unit):
            for module, own in _torch.owners_of(record):
                if module._parameters.get(own) is parameter:
                    pair = _installed(module, own)
                    if pair is not None:
                        pair.is_aside = True
                    # Not by an assignment, after which a quantized weight would free what it holds.
                    module._parameters[own] = _fsdp2.sharded_of(record)
        state.aside[name] = _torch.versions_of(_fsdp2.sharded_parameters(unit))


def show_gathered(state: ShardingState, name: str, unit: nn.Module) -> None:
    """Undo :func:`show_shards` for a unit; release its weights if the shards were written to. Local operation."""
    versions = state.aside.pop(name, None)
    if versions is None or not _fsdp2.is_gathered(unit):
        return
    if (
        not _torch.in_backward()
        and not state.waiting
        and _torch.versions_of(_fsdp2.sharded_parameters(unit)) != versions
    ):
        unit.reshard()  # type: ignore[operator]
        state.versions.pop(name, None)
        return
    for parameter, record in _fsdp2.gathered_parameters(unit):
        shard = _fsdp2.sharded_of(record)
        if parameter.requires_grad != shard.requires_grad:
            parameter.requires_grad_(shard.requires_grad)
        for module, own in _torch.owners_of(record):
            pair = _installed(module, own)
            if pair is not None:
                pair.is_aside = False
            setattr(module, own, parameter)


def _installed(module: nn.Module, name: str) -> Installed | None:
    binding = binding_of(module)
    return None if binding is None else binding.installed.get(name)
