"""Weights that stay unsharded after a forward, under ``optim`` or ``optim_grads``.

After a forward without gradients, no backward reshards them. They are kept for the next forward, but
``model.parameters()`` returns the shards. Code that reads or writes parameters after an evaluation (averages, manual
clipping, a new optimizer) would otherwise use copies that the next step discards.

After other forwards ``model.parameters()`` returns the unsharded parameters. A step applies changes of their
``requires_grad`` to the shards, and raises for writes.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from te_fsdp.errors import OrderError
from te_fsdp.lifecycle import Step
from te_fsdp.modules.torch_units import register_shards, register_unsharded
from te_fsdp.sharded_model import ShardedModel, record_unsharded_params, versions_of
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch
from te_fsdp.upstream.torch_mixed_lists import foreach_writes


def expose_sharded_params(state: ShardedModel, only: str | None = None) -> None:
    """Make ``model.parameters()`` return sharded parameters while units stay unsharded. Local operation.

    No memory is freed. ``only`` is the name of one unsharded unit. The default is all units that keep their weights.
    """
    units = state.gathered() if only is None else [(only, state.modules[only])]
    for name, unit in units:
        if name in state.unsharded.exposed or (only is None and state.units[name].gather == "pass"):
            continue
        apply_frozen(state, name)
        register_shards(unit)
        state.unsharded.exposed[name] = _torch.versions_of(_fsdp2.sharded_parameters(unit))
        foreach_writes().count(state)


def expose_unsharded_params(state: ShardedModel, name: str, unit: nn.Module) -> None:
    """Undo :func:`expose_sharded_params` for a unit; free its weights if the shards changed. Local operation."""
    versions = state.unsharded.exposed.pop(name, None)
    if versions is not None and not state.unsharded.exposed:
        foreach_writes().ignore(state)
    if versions is None or not _fsdp2.is_unit_unsharded(unit):
        return
    if (
        not _torch.in_backward()
        and not (state.sync.waiting and name in state.unsharded.kept)  # between microbatches: a check raises
        and _torch.versions_of(_fsdp2.sharded_parameters(unit)) != versions
    ):
        # The user has written to the shards, so that the next forward must all-gather them.
        FSDPModule.reshard(unit)  # type: ignore[bad-argument-type]  # not a call of the user
        state.unsharded.versions.pop(name, None)
        return
    register_unsharded(unit)


def before_unshard(state: ShardedModel, name: str, unit: nn.Module) -> None:
    """Undo :func:`expose_sharded_params` before a manual all-gather, and record what it gathers. Local operation."""
    expose_unsharded_params(state, name, unit)
    if not _fsdp2.is_unit_unsharded(unit):
        # A later write to the shards makes the unsharded weights stale. The versions show it in the forward.
        state.unsharded.versions[name] = versions_of(unit)


def record_kept(state: ShardedModel, name: str, unit: nn.Module) -> None:
    """Record the unsharded parameters of a unit after the first forward of a step. Local operation."""
    parameters = [parameter for parameter, _ in _fsdp2.unsharded_parameters(unit)]
    flags = [parameter.requires_grad for parameter in parameters]
    state.unsharded.kept[name] = _torch.versions_of(parameters), flags


def apply_frozen(state: ShardedModel, name: str) -> None:
    """Copy ``requires_grad`` from a unit's unsharded parameters, where the user has set it, to the shards. Local."""
    _, flags = state.unsharded.kept.get(name, ((), ()))
    pairs = _fsdp2.unsharded_parameters(state.modules[name])
    for (parameter, record), flag in zip(pairs, flags, strict=False):
        if parameter.requires_grad != flag:
            _fsdp2.sharded_param_of(record).requires_grad_(not flag)


def settle_kept_weights(step: Step) -> None:
    """Apply ``requires_grad`` of unsharded parameters; raise OrderError if they were written to. Local operation."""
    for state, _ in step.models:
        kept = state.unsharded.kept
        if kept and _torch.in_backward():  # a step of one parameter: the unit's own reduction is in progress
            kept.clear()
        for name in list(kept):
            apply_frozen(state, name)
            pairs, versions = _fsdp2.unsharded_parameters(state.modules[name]), kept.pop(name)[0]
            now = _torch.versions_of(parameter for parameter, _ in pairs)
            if now == versions:
                continue
            written = next(index for index, version in enumerate(now) if version != versions[index])
            sharded = _fsdp2.sharded_param_of(pairs[written][1])
            raise OrderError(
                f"{step.where}: {state.names()[id(sharded)]} was written to after a forward",
                expected="writes to sharded parameters",
                got="a write to the unsharded weights, which are kept for the backwards of a step",
                why="The step starts from the shards, so the write would be lost",
                fix="call te_fsdp.release_params(model) before you write",
            )


def end_evaluation(state: ShardedModel) -> None:
    """Expose all sharded parameters; drop all-gathers that FSDP2 prefetched for units that did not run.

    Local operation. A write to the shards would otherwise come after such an all-gather and before its use.
    """
    expose_sharded_params(state)
    for name, unit in state.modules.items():
        if name not in state.unsharded.gathers:  # the user has not called unshard()
            _fsdp2.drop_gather(unit)


def expose_after_evaluation(state: ShardedModel, name: str, unit: nn.Module) -> None:
    """Expose the sharded parameters of a unit that ran alone without gradients. Local operation."""
    if unit is state.model or _torch.backward_id() != -1 or _fsdp2.is_in_root_forward(unit):
        return
    if _fsdp2.is_unit_unsharded(unit):
        record_unsharded_params(unit)
        state.unsharded.recorded.add(name)
        expose_sharded_params(state, name)


def expose_after_exception(state: ShardedModel) -> bool:
    """Expose the sharded parameters of all units if a forward has raised; return whether it has.

    Local operation. It must not wait for the device: a collective that other ranks have not started would hide the
    exception. The next forward frees the unsharded weights.
    """
    if _torch.backward_id() != -1 or not any(map(_fsdp2.interrupted_phase, state.roots())):
        return False
    for name, unit in state.gathered():
        record_unsharded_params(unit)
        expose_sharded_params(state, name)
    return True
