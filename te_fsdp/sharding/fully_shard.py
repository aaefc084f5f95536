"""``fully_shard``: set_device_mesh, then FSDP2 unit by unit, then what FSDP2 leaves undone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.distributed.tensor import DTensor, Shard

from te_fsdp import _te, _torch
from te_fsdp.binding import binding_of
from te_fsdp.errors import OrderError, PlacementError, message
from te_fsdp.modules.apply import check_device_mesh, set_device_mesh
from te_fsdp.modules.plan import quantizable
from te_fsdp.quantized.alignment import Grid
from te_fsdp.quantized.shards import Key, plan_cuts, restore_quantized, stash_quantized
from te_fsdp.sharding.agree import check_replicas, check_same_model, raised_on_all_ranks

if TYPE_CHECKING:
    from torch import nn

    from te_fsdp.mesh import Meshes

__all__ = ["fully_shard"]

_log = logging.getLogger("te_fsdp")


def fully_shard(
    model: nn.Module,
    meshes: Meshes,
    *,
    units: Iterable[type | str] | type | str | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Shard a TE model over its meshes (ZeRO-3 on FSDP2; HSDP when ``dp_replicate`` > 1), with or without tp.

    Binds the model (:func:`te_fsdp.set_device_mesh`), applies FSDP2 to every unit and to the rest of the
    model, keeps quantized weights quantized with one scale per weight, and keeps the parameters' Python
    attributes. Build the optimizer afterwards.

    Collective over the world: call on all ranks. Communicates checksums of parameters that live on the
    device, and the amax of quantized ones.

    Args:
        model: A tree of TE modules and others; parameters on meta or on the device. Changed in place.
        meshes: The job's meshes.
        units: What is gathered and released as one: module classes, or names in the tree (``"layers.0"``; a
            trailing ``.*`` means every child). By default every ``te.TransformerLayer``.
        mp_policy: FSDP2's mixed precision policy. ``None``: compute in the parameters' own dtype.
        reshard_after_forward: Free gathered weights between forward and backward (ZeRO-3), or keep them.

    Returns:
        ``model``.

    Raises:
        MeshError, PlacementError, OrderError: see :func:`te_fsdp.set_device_mesh`; also a unit that matches
            nothing or has no forward, a scalar parameter, a model that is sharded already, and quantized
            weights whose shards would not fit their format.
        InitError: Ranks that must hold equal values do not.
    """
    weight_mesh = meshes.weight
    with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
        _check_order(model)
        chosen = _find_units(model, units)
        _check_accepted(model, chosen)
        planned = check_device_mesh(model, meshes.tp, weight_mesh)
        cuts = plan_cuts(quantizable(planned), Grid(*map(meshes.size, ("dp_replicate", "dp_shard", "tp"))))
    check_same_model(model, meshes.device_mesh)
    check_replicas(model, planned, meshes)
    set_device_mesh(model, tp_mesh=meshes.tp, weight_mesh=weight_mesh)
    for binding in filter(None, map(binding_of, model.modules())):
        binding.weight_mesh_agreed = True  # one object gives both meshes
    options: dict[str, Any] = {
        "mesh": meshes.fsdp_with_size_one,
        "mp_policy": mp_policy or MixedPrecisionPolicy(),
        "reshard_after_forward": reshard_after_forward,
    }
    stash, options["shard_placement_fn"] = stash_quantized(model), _placements(model, cuts)
    # Inner units first: a parent's FSDP group takes what its units have left.
    for unit in [*reversed(chosen), model]:
        if not _torch.is_fsdp_module(unit):
            fsdp2_fully_shard(unit, **options)
    restore_quantized(model, stash)
    _finish(model, cuts)
    _log.debug("fully_shard: %d units over %s", len(chosen) + (model not in chosen), meshes)
    return model


def _placements(model: nn.Module, cuts: dict[Key, int]) -> Callable[[nn.Parameter], Shard | None] | None:
    """FSDP2's ``shard_placement_fn`` for weights that it shall cut along another dim than the first."""
    dims = {
        id(parameter): cuts[id(module), name]
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if cuts.get((id(module), name))
    }
    return (lambda parameter: Shard(dims[id(parameter)]) if id(parameter) in dims else None) if dims else None


def _drop_flat_shards(model: nn.Module, cuts: dict[Key, int]) -> None:
    """No high-precision copies of quantized shards in FSDP2, neither now nor when a shard is quantized later."""
    for unit in model.modules():
        for managed in _torch.managed_by(unit) if _torch.is_fsdp_module(unit) else ():
            if any((id(owner), name) in cuts for owner, name in _torch.owners_of(managed)):
                _torch.keep_no_flat_shard(managed)


def _check_order(model: nn.Module) -> None:
    """FSDP2 must not have been applied to any part before."""
    for name, module in model.named_modules():
        if _torch.is_fsdp_module(module):
            raise OrderError(
                message(
                    f"{name or type(model).__name__}: fully_shard on a module that is sharded already",
                    expected="a model without FSDP2",
                    got=type(module).__name__,
                    why="The tensor-parallel placements must be set before FSDP2 cuts the parameters",
                    fix="call te_fsdp.fully_shard once, and not torch's fully_shard before it",
                )
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            raise OrderError(
                message(
                    f"{name}: fully_shard on a parameter that is sharded already",
                    expected="a plain parameter or a DTensor on the tp mesh",
                    got=f"placements {tuple(parameter.placements)}",
                    fix="build the model anew",
                )
            )


def _check_accepted(model: nn.Module, chosen: list[nn.Module]) -> None:
    """What FSDP2 would refuse half way, when some units are cut already."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in [*chosen, model]:
        container = isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict))
        if container and type(module).forward is torch.nn.Module.forward:
            name = names[id(module)]
            raise PlacementError(
                message(
                    f"{name or 'model'}: fully_shard of a {type(module).__name__}",
                    expected="a module with a forward",
                    got="a container without",
                    why="FSDP2 gathers weights in the hooks of forward, which a container never runs",
                    fix=f'units="{name}.*" for each of its children'
                    if name
                    else "shard the module that calls it",
                )
            )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise PlacementError(
                message(
                    f"{name}: fully_shard of a scalar parameter",
                    expected="at least one dim to cut",
                    got="shape ()",
                    fix="make it a tensor of shape (1,)",
                )
            )


def _find_units(model: nn.Module, units: Iterable[type | str] | type | str | None) -> list[nn.Module]:
    """Modules that become FSDP2 units, outer before inner, each once."""
    if units is None:
        layer = _te.module_class("TransformerLayer") if _te.is_loaded() else ()
        return [m for m in model.modules() if isinstance(m, layer) and m is not model]
    wanted = [units] if isinstance(units, type | str) else list(units)
    names = dict(model.named_modules())
    chosen: dict[int, nn.Module] = {}
    for want in wanted:
        if isinstance(want, type):
            found = [m for m in names.values() if isinstance(m, want)]
        elif want.endswith(".*"):
            prefix = want[:-1]
            found = [m for n, m in names.items() if n.startswith(prefix) and "." not in n[len(prefix) :]]
        else:
            found = [names[want]] if want in names else []
        if not found:
            raise PlacementError(
                message(
                    f"fully_shard: unit {want if isinstance(want, str) else want.__name__!r} matches no module",
                    expected=f"a class or a name out of {_sample(names)}",
                    fix="name modules as model.named_modules() does",
                )
            )
        chosen.update((id(m), m) for m in found if m is not model)
    order = {id(m): i for i, m in enumerate(names.values())}
    return sorted(chosen.values(), key=lambda m: order[id(m)])


def _sample(names: dict[str, nn.Module], most: int = 8) -> str:
    """The first few names of the tree, for a message."""
    named = [n for n in names if n]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def _finish(model: nn.Module, cuts: dict[Key, int]) -> None:
    """What FSDP2 drops when it replaces parameters: Python attributes, also where it bypasses ``__setattr__``.

    And what it shall not keep: flat copies of quantized shards.
    """
    _drop_flat_shards(model, cuts)
    for module in model.modules():
        binding = binding_of(module)
        if binding is None:
            continue
        binding.under_fsdp = True
        for name, parameter in module._parameters.items():
            if parameter is not None:
                binding.carry(name, parameter)
