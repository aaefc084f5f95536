"""New main weights on their way into the units of FSDP2, while the next forward has begun.

    at once          parameters that FSDP2 does not manage; weights with delayed scaling, whose amaxes the step shares;
                     quantized weights that travel as fp32
    unit by unit     all others: the root's own first, then its units as they are registered

The holders begin all of it in the step, in one order, whatever they use afterwards.

This file and :class:`~te_fsdp.move.pending.PendingGathers` (``state.pending_gathers``, which all that reads or writes
parameters waits for) are the whole of the overlap: without them a step calls ``start_install(cut).wait()``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _fsdp2, _te, _torch
from te_fsdp.errors import OrderError
from te_fsdp.move.pending import UnitGather
from te_fsdp.sharding.outer_chunks import Chunk, copies_of
from te_fsdp.sharding.outer_gather import start_install, why_not_bytes
from te_fsdp.sharding.state import state_of

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from te_fsdp.sharding.outer_state import StandIns
    from te_fsdp.sharding.state import ShardingState

__all__ = ["check_overlap", "install_by_unit", "watch_state_dicts"]

#: Chunk, and this rank's rows of the main weight.
Cut = tuple[Chunk, torch.Tensor]


@torch.no_grad()
def install_by_unit(cut: Sequence[Cut]) -> None:
    """Begin to make parameters their new main weights, as :func:`~te_fsdp.sharding.outer_gather.start_install` does.

    Collective over the holders: as that, but for what travels together, which is of one unit. Nothing waits for it but
    :class:`~te_fsdp.move.pending.PendingGathers`.

    Args:
        cut: Chunk, and this rank's rows of the main weight, in the same order on all holders.
    """
    left = {id(chunk.parameter): (chunk, rows) for chunk, rows in cut}
    begins: list[tuple[ShardingState, list[UnitGather]]] = []
    for state in {id(s): s for chunk, _ in cut if (s := state_of(chunk.parameter)) is not None}.values():
        gathers = []
        for name, unit in reversed(state.modules.items()):  # outer before inner
            own = [id(parameter) for parameter in _fsdp2.sharded_parameters(unit)]
            members = [left.pop(key) for key in own if key in left and _may_travel_later(left[key][0])]
            if members:
                gathers.append(_gather_of(name, unit, members))
        begins.append((state, gathers))
    start_install([*left.values()]).wait()
    for state, gathers in begins:
        if gathers:
            state.pending_gathers.begin(gathers, state.meshes.device)


def check_overlap(optimizer: Optimizer, known: StandIns | None, held: Sequence[torch.Tensor]) -> None:
    """Raise where new weights cannot arrive after the step. Local operation.

    Args:
        optimizer: The optimizer.
        known: What stands in for its parameters, if it was sharded before.
        held: Its parameters.

    Raises:
        OrderError: It was sharded without it; or none of its parameters could arrive later.
    """
    if known is not None and not known.overlaps:
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}, overlap_gather=True)",
            expected="the first call for an optimizer",
            got="one that was sharded without it",
            fix="give overlap_gather=True to the first call, on all ranks",
        )
    chunks = [Chunk(p, copies) for p in held if known is None and (copies := copies_of(p)) is not None]
    # FSDP2 may not have looked at its parameters since they were initialised, so that it is not asked for them.
    if known is None and not any(not c.copies.reduced and _may_travel_later(c) for c in chunks):
        raise OrderError(
            f"shard_optimizer({type(optimizer).__name__}, overlap_gather=True)",
            expected='parameters of a model with outer_strategy="optim" and dp_replicate > 1',
            got=f"{len(held)} parameters, none of which has new weights that are gathered unit by unit",
            why="The option would have no effect",
            fix="leave it out, or shard the model with te_fsdp.fully_shard(..., outer_strategy='optim')",
        )


def watch_state_dicts(state: ShardingState) -> None:
    """Let state dicts of a model, and of parts of it, wait for its new weights. Local operation."""
    if not state.pending_gathers.watched:
        state.pending_gathers.watched = True
        for module in state.model.modules():
            module.register_state_dict_pre_hook(functools.partial(_wait, state))
            module.register_load_state_dict_pre_hook(functools.partial(_wait, state))


def _wait(state: ShardingState, *unused: Any) -> None:
    state.pending_gathers.wait()


def _may_travel_later(chunk: Chunk) -> bool:
    local = _torch.local_of(chunk.parameter)
    return not _te.is_quantized(local) or (not _te.has_delayed_scale(local) and why_not_bytes(chunk) is None)


def _gather_of(name: str, unit: nn.Module, members: Sequence[Cut]) -> UnitGather:
    touched = [rows for _, rows in members]
    begin = lambda async_op: start_install(members, async_op=async_op, written=touched)  # noqa: E731
    return UnitGather(name, unit, begin, touched)
