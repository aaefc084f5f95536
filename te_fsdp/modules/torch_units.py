"""Resharding of bound units of torch's own ``fully_shard``, after a step or an evaluation.

FSDP2 keeps the root unsharded after a forward, and any unit after ``set_reshard_after_backward(False)``. A step then
updates the shards, and the next forward reads the unsharded weights from before the step, without an error. After an
evaluation ``model.parameters()`` returns unsharded parameters, whose changes the next reshard drops.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from te_fsdp.lifecycle import Step
from te_fsdp.records import get_record, module_record
from te_fsdp.upstream import fsdp2_state as _fsdp2, fsdp2_units, torch_dtensor as _torch

#: The models of ``set_device_mesh``, whose unsharded units are resharded after every step of their optimizer.
bound_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def unsharded_params() -> Iterator[torch.Tensor]:
    """Yield the unsharded parameters of bound units that FSDP2 has all-gathered at least once. Local operation."""
    for model in list(bound_models):
        for unit in model.modules() if module_record(model).sharded is None else ():
            if fsdp2_units.is_fsdp_module(unit):
                for parameter, managed in _fsdp2.unsharded_parameters(unit):
                    if parameter is not _fsdp2.sharded_param_of(managed):
                        yield parameter


def reshard_units(step: Step) -> None:
    """Reshard bound units that are unsharded and have parameters in the optimizer. Local operation."""
    stepped: set[int] | None = None
    for model in list(bound_models):
        # ``te_fsdp.fully_shard`` releases its own units.
        for unit in model.modules() if module_record(model).sharded is None else ():
            if not fsdp2_units.is_fsdp_module(unit) or not _fsdp2.is_unit_unsharded(unit):
                continue
            if stepped is None:
                stepped = {id(p) for group in step.optimizer.param_groups for p in group["params"]}
            if not stepped.isdisjoint(map(id, _fsdp2.sharded_parameters(unit))):
                unit.reshard()  # type: ignore[operator]


def reshard_after_evaluations(module: nn.Module, shard: torch.Tensor | None) -> None:
    """Reshard the FSDP2 root around a bound module after its forwards without gradients. Local operation.

    ``shard`` is a parameter of the module that FSDP2 unshards for the first time.
    """
    record = None if shard is None else get_record(shard)
    if record is not None and record.state is not None:
        return  # te_fsdp.fully_shard keeps its units
    for root in fsdp2_units.roots_in_forward() or fsdp2_units.units_around(module):
        hooks = module_record(root).hooks
        if _reshard_root not in hooks:
            hooks.add(_reshard_root)
            root.register_forward_hook(_torch.disable_compile(_reshard_root))


def _reshard_root(unit: nn.Module, args: Any, output: Any) -> None:
    # No backward follows, for which FSDP2 keeps the root. With an explicit ``reshard_after_forward`` it stays.
    if not torch.is_grad_enabled() and _torch.backward_id() == -1 and fsdp2_units.is_kept_root(unit):
        unit.reshard()  # type: ignore[operator]
