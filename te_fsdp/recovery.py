"""Recovery of a sharded model from an exception in a forward, a backward or a step."""

from __future__ import annotations

import logging

from te_fsdp.records import KEEPS_MAIN_WEIGHTS
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.upstream import fsdp2_gradients as _fsdp2_gradients, fsdp2_state as _fsdp2
from te_fsdp.upstream.fsdp2_containers import restore_after_exception

_log = logging.getLogger("te_fsdp")


def recover_from_exception(state: ShardedModel) -> None:
    """Restore a consistent state after an exception in a forward, a backward or a step.

    Local operation, except after a backward in which reductions of ``no_shard`` units may have started. Then it is
    collective over data parallel: ranks that have started different reductions complete all of them.

    After a forward nothing is lost, and the microbatch can be repeated. After a backward, some units have added the
    microbatch's gradients and others have not. So the gradients are invalid, and unreduced gradients are dropped.
    """
    optimizer = state.step.optimizer() if state.step.optimizer is not None else None
    for prepare in state.components.before_recovery:
        prepare()
    undo_step(state)
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None and (main_parameters.pairs or main_parameters.locals):
        # ``zero_grad`` of the optimizer has not cleared the gradients of the parameters that they replaced.
        main_parameters.remove_main_params(optimizer)
        state.sync.failed = any(p.grad is not None for p in state.parameters().values())
    lost = False
    for root in state.roots():
        phase = _fsdp2.interrupted_phase(root)
        lost |= phase == "backward"
        if phase:
            _log.warning("an exception interrupted a %s; FSDP2 is reset for the next forward", phase)
            for unit in state.modules.values():
                restore_after_exception(unit)  # after a KeyboardInterrupt no hook of forward runs
            _fsdp2.reset_iteration(root)
            state.unsharded.gathers.clear()
    for recover in state.components.recover:
        lost |= recover()
    if lost:
        # Unreduced gradients of earlier microbatches are dropped as well. No ``.grad`` shows that they are missing.
        waiting = state.sync.waiting and bool(state.pending())
        for unit in state.modules.values():
            _fsdp2_gradients.drop_unreduced_gradients(unit)
        state.sync.dropped = state.sync.dropped or waiting
        state.sync.failed = waiting or any(p.grad is not None for p in state.parameters().values())


def undo_step(state: ShardedModel) -> None:
    """Undo the changes to a model for a step that has ended or failed. Local operation."""
    state.step.optimizer = None
    state.step.mixing.close()
    for undo in state.components.undo_step:
        undo()
