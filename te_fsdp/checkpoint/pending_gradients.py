"""Refusal of a save between the microbatches of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fsdp.errors import OrderError
from te_fsdp.layout import SyncMode
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.upstream import fsdp2_gradients as _fsdp2_gradients, fsdp2_state as _fsdp2, fsdp2_units

if TYPE_CHECKING:
    from torch import nn


def refuse_pending_gradients(model: nn.Module) -> None:
    """Raise OrderError between two microbatches of a step, because a save would omit their gradients.

    Local operation. Unreduced gradients are found, also in units of torch's own ``fully_shard``. Strategies that
    reduce in each microbatch have them in ``.grad``.
    """
    pending: dict[int, str] = {}
    units: set[nn.Module] = set()
    for state in filter(None, map(get_sharded_model, model.modules())):
        pending |= state.pending()
        # In other modes a step may have used the values of .grad already.
        if state.sync.waiting and state.sync.mode is SyncMode.LAST:
            pending |= {id(p): name for name, p in state.parameters().items() if p.grad is not None}
        units.update(state.modules.values())
    plain = [
        module for module in model.modules() if fsdp2_units.is_fsdp_module(module) and module not in units
    ]
    records = [
        _fsdp2.sharded_param_of(record)
        for unit in plain
        for record in _fsdp2_gradients.params_with_unreduced_gradients(unit)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()} if records else {}
    pending |= {id(p): names.get(id(p)) or f"one of shape {tuple(p.shape)}" for p in records}
    if not pending:
        return
    raise OrderError(
        f"checkpoint.save: {len(pending)} parameter(s) have gradients of a step that is not complete, such as "
        f"{next(iter(pending.values()))}",
        expected="a call between two steps",
        got="a call after a microbatch that was not the last one, before optimizer.step()",
        why="A checkpoint holds no gradients: a resumed run would lack these microbatches",
        fix="save after optimizer.step(), or discard the microbatches first (te_fsdp.zero_grad(model))",
    )
