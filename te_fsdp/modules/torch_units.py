"""Units of torch's own ``fully_shard`` in bound models, which are resharded after every optimizer step.

FSDP2 keeps the root unsharded after a forward, and any unit after ``set_reshard_after_backward(False)``. A step then
updates the shards, and the next forward reads the unsharded weights from before the step, without an error.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING

from te_fsdp.records import module_record
from te_fsdp.upstream import fsdp2_state as _fsdp2, fsdp2_units

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.lifecycle import Step


@functools.cache
def _bound_models() -> weakref.WeakSet[nn.Module]:
    """Return the models of ``set_device_mesh``, to search for units."""
    return weakref.WeakSet()


def reshard_after_steps(model: nn.Module) -> None:
    """Reshard the unsharded units of a bound model after every step of their optimizer. Local operation."""
    _bound_models().add(model)


def reshard_units(step: Step) -> None:
    """Reshard bound units that are unsharded and have parameters in the optimizer. Local operation."""
    stepped: set[int] | None = None
    for model in list(_bound_models()):
        # ``te_fsdp.fully_shard`` releases its own units.
        for unit in model.modules() if module_record(model).sharded is None else ():
            if not fsdp2_units.is_fsdp_module(unit) or not _fsdp2.is_unit_unsharded(unit):
                continue
            if stepped is None:
                stepped = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
            if not stepped.isdisjoint(map(id, _fsdp2.sharded_parameters(unit))):
                unit.reshard()  # type: ignore[operator]
