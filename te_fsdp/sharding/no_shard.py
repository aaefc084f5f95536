"""``fsdp_no_shard``: parameters that stay whole on every data-parallel rank, inside a sharded model.

    sharded       cut over data parallel, gathered for each use, gradients reduce-scattered, by FSDP2
    exempt        whole, never gathered, unknown to FSDP2, gradients reduced by ``no_shard_reduce``

The mark is kept by the owner: parameters are replaced all the time (meta init, ``to_empty``, ``deepcopy``,
``load_state_dict(assign=True)``, TE's ``reset_parameters``) and lose what hangs on them. Strategy ``no_shard`` is the
same thing for all parameters of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from te_fsdp import _torch
from te_fsdp.errors import OrderError, message
from te_fsdp.parameters import NO_SHARD, binding_of, noted
from te_fsdp.step_hooks import registered_at

if TYPE_CHECKING:
    from te_fsdp.layout.storage import ParameterPlan

__all__ = ["Exempt", "fsdp_no_shard"]


def fsdp_no_shard(what: nn.Module | nn.Parameter | Iterable[nn.Module | nn.Parameter]) -> None:
    """Keep parameters whole on every data-parallel rank when the model is sharded.

    They are never gathered, and FSDP2 does not see them: no hooks on modules that are exempt as a whole, and no unit
    of them. What tensor parallelism cuts stays cut. Gradients of those that are trained are summed up over data
    parallel at the end of each backward, in one all-reduce per dtype; the ranks must hold equal values, which
    :func:`te_fsdp.fully_shard` checks. Frozen ones cost no communication at all.

    Call it before :func:`te_fsdp.fully_shard`, on all ranks alike. Local operation. The mark stays on the modules that
    own the parameters, through deep copies, initialisation from meta and loading; that of a parameter which no module
    owns yet stays on the parameter.

    Args:
        what: A module (all parameters in it and in its children), a parameter, or several of these.

    Raises:
        TypeError: Something else.
        OrderError: The module or parameter is sharded already.
    """
    several = [what] if isinstance(what, (nn.Module, nn.Parameter)) else what
    if not isinstance(several, Iterable) or isinstance(several, (str, torch.Tensor)):
        raise TypeError(
            message("fsdp_no_shard", expected="a module, a parameter or several", got=type(what).__name__)
        )
    items = list(several)
    for item in items:
        if not isinstance(item, (nn.Module, nn.Parameter)):
            raise TypeError(
                message("fsdp_no_shard", expected="modules and parameters", got=type(item).__name__)
            )
    modules = [item for item in items if isinstance(item, nn.Module)]
    parameters = [item for item in items if not isinstance(item, nn.Module)]
    owned = list(registered_at({id(parameter) for parameter in parameters})) if parameters else []
    for module in [*(sub for top in modules for sub in top.modules()), *(owner for owner, _ in owned)]:
        _check_unsharded(module)
    for module in modules:
        for sub in module.modules():
            sub.__dict__[NO_SHARD] = True
    for parameter in parameters:
        noted(parameter).no_shard = True
    for module, name in owned:
        known = module.__dict__.get(NO_SHARD, frozenset())
        if known is not True:
            module.__dict__[NO_SHARD] = known | {name}


def _check_unsharded(module: nn.Module) -> None:
    binding = binding_of(module)
    if _torch.is_fsdp_module(module) or (binding is not None and binding.under_fsdp):
        label = (binding.name if binding is not None else "") or type(module).__name__
        raise OrderError(
            f"{label}: fsdp_no_shard on a module that is sharded already",
            why="Its parameters are cut, or their gradients are reduced by FSDP2",
            fix="call te_fsdp.fsdp_no_shard before te_fsdp.fully_shard",
        )


@dataclass(frozen=True)
class Exempt:
    """A parameter that stays whole, by its owner: initialisation and loading replace the parameter itself.

    Attributes:
        plan: What is settled about it; of its first place if it is tied.
        module: The owner.
    """

    plan: ParameterPlan
    module: nn.Module

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that is there now."""
        return self.module._parameters[self.plan.name]  # type: ignore[return-value]
