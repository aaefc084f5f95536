"""Models that ``fully_shard`` refuses: sharded already, containers without a forward, hooks that would never run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.sharded_model import sharded_model_of
from te_fsdp.upstream import fsdp2_units, torch_autograd as _torch_autograd

if TYPE_CHECKING:
    from torch import nn


def check_order(model: nn.Module) -> None:
    """Raise OrderError if FSDP2 or ``fully_shard`` was applied to a part of a model, or to one that contains it.

    Local.
    """
    for name, module in model.named_modules():
        # DDP has hooks on the parameters that FSDP2 would replace, and FSDP1 has flattened them.
        if isinstance(module, (DataParallel, DistributedDataParallel, FullyShardedDataParallel)):
            raise OrderError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="the model that it was made of",
                got="a wrapper that reduces gradients, or cuts parameters, itself",
                fix="te_fsdp.fully_shard in its place; strategy='no_shard' keeps whole weights on each rank",
            )
        if fsdp2_units.is_fsdp_module(module):
            raise OrderError(
                f"{name or type(model).__name__}: fully_shard on a module that is sharded already",
                expected="a model without FSDP2",
                got=type(module).__name__,
                why="The tensor-parallel placements must be set before FSDP2 shards the parameters",
                fix="call te_fsdp.fully_shard once, and not torch's fully_shard before it",
            )
    for name, parameter in model.named_parameters():
        # FSDP2 does not detect models without FSDP2 units, and modules inside of a sharded one.
        state = sharded_model_of(parameter)
        if state is not None:
            raise OrderError(
                f"{name}: fully_shard on a parameter that is sharded already",
                expected="a model that fully_shard was not called on",
                got=f"a parameter of a sharded {type(state.model).__name__}",
                why="Its gradients would be averaged twice",
                fix="call te_fsdp.fully_shard once, on the full model; select parts of it with units= and strategy=",
            )
        if isinstance(parameter, DTensor) and "dp_shard" in (parameter.device_mesh.mesh_dim_names or ()):
            raise OrderError(
                f"{name}: fully_shard on a parameter that is sharded already",
                expected="a plain parameter or a DTensor over ep, tp, or both",
                got=f"placements {tuple(parameter.placements)}",
                fix="build a new model",
            )


def check_accepted(model: nn.Module, units: Iterable[str], kept: Collection[int] = ()) -> None:
    """Check for parameters that FSDP2 would refuse after it has sharded some units.

    ``kept``: ids of unsharded parameters.
    """
    for name in units:
        module = model.get_submodule(name)
        if is_container(module):
            raise PlacementError(
                f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                expected="a module with a forward",
                got="a container without a forward",
                why="FSDP2 gathers weights in the hooks of forward, which a container never runs",
                fix=f'units="{name}.*" for each of its children'
                if name
                else "shard the module that calls it",
            )
    for name, parameter in model.named_parameters():
        # FSDP2 raises for a scalar when it reaches the unit, and has sharded other units by then.
        if parameter.ndim == 0 and id(parameter) not in kept:
            raise PlacementError(
                f"{name}: fully_shard of a scalar parameter",
                expected="at least one dim to cut",
                got="shape ()",
                fix="make it a tensor of shape (1,), or call te_fsdp.fsdp_no_shard(parameter)",
            )


def is_container(module: nn.Module) -> bool:
    """Return whether a module is only a container, without a forward."""
    listing = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
    return listing and type(module).forward is torch.nn.Module.forward


def refuse_hooks(named: Iterable[tuple[str, torch.Tensor]], *, sharded: bool = True) -> None:
    """Raise OrderError for gradient hooks that FSDP2 would never run, or would lose. Local operation.

    Before parameters are ``sharded``, post-accumulate hooks would be lost, too.
    """
    hooked = [
        name
        for name, p in named
        if _torch_autograd.has_gradient_hooks(p)
        or (not sharded and getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    if hooked:
        raise OrderError(
            f"{hooked[0]}: a gradient hook on a parameter that {'is' if sharded else 'is about to be'} sharded",
            expected="register_post_accumulate_grad_hook, after te_fsdp.fully_shard and te_fsdp.materialize",
            got=f"{len(hooked)} parameter(s) with hooks"
            + (" by register_hook" if sharded else " from before fully_shard"),
            why="FSDP2 puts a new parameter in each one's place, and autograd gives gradients to the gathered ones: "
            "the hook would never run",
            fix="parameter.register_post_accumulate_grad_hook(hook), which sees the reduced gradient in parameter.grad",
        )
