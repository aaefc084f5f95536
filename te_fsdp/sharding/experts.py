"""Expert modules under FSDP2: units of their own, on meshes without ``ep``, with gradients as in one process.

    one process       gradient of the mean loss over all tokens
    dense parameter   every rank has a mean over its own tokens    -> mean over all data-parallel ranks
    expert            its tokens come from all ranks of ``ep``,    -> sum over the ranks that hold the expert,
                      its gradient is a sum over those ranks          divided by the number of all data-parallel ranks

FSDP2 would divide by the number of ranks that hold the expert. It is told the other number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp import _fsdp2
from te_fsdp.binding import binding_of
from te_fsdp.modules.experts import find_experts
from te_fsdp.sharding.units import nearest_strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from te_fsdp.layout.storage import Storage
    from te_fsdp.mesh import Meshes
    from te_fsdp.modules.experts import Selection
    from te_fsdp.sharding.state import ShardingState

__all__ = ["divide_gradients", "fsdp_mesh", "is_expert", "with_expert_units"]


def with_expert_units(
    model: nn.Module, meshes: Meshes, units: dict[str, str], selection: Selection = None
) -> dict[str, str]:
    """``units`` and the expert modules, which cannot share a unit with parameters on other meshes. Local operation.

    Returns:
        Name -> strategy, outer before inner; an expert module has that of the unit around it.
    """
    if meshes.ep is None:
        return units
    chosen = {**units, **dict.fromkeys(find_experts(model, selection) - units.keys())}
    names = [name for name, _ in model.named_modules() if name in chosen]
    return {name: units.get(name) or nearest_strategy(name, units) for name in names}


def is_expert(module: nn.Module) -> bool:
    """Whether a bound module's parameters are dealt out over ``ep``."""
    binding = binding_of(module)
    return binding is not None and binding.experts is not None


def fsdp_mesh(meshes: Meshes, unit: nn.Module, storage: Storage) -> DeviceMesh:
    """What FSDP2 shards a unit over. What is added up over ``dp_replicate`` later, it shall not reduce over that."""
    experts = is_expert(unit)
    if storage.gradient[0] == "P":
        root = meshes.expert_mesh if experts and meshes.expert_mesh is not None else meshes.device_mesh
        return root["dp_shard"]
    return meshes.expert_fsdp_with_size_one if experts else meshes.fsdp_with_size_one


def divide_gradients(state: ShardingState, policy: MixedPrecisionPolicy) -> None:
    """Tell FSDP2 by what to divide gradients, where it would not know; and TE over whom experts reduce their amax.

    Local operation but for the process group of that; call after ``fully_shard``. Gradients of experts are divided by
    as many ranks as FSDP2 divides those of dense parameters by; what is averaged outside of FSDP2 is so for both. All
    gradients are divided by one if the user wants sums.

    Args:
        state: The model's.
        policy: FSDP2's, of models without a precision policy.
    """
    average = state.average_gradients
    amax = state.meshes.expert_amax
    for binding in filter(None, map(binding_of, state.model.modules())):
        if binding.experts is not None:
            binding.divided, binding.amax_group = True, amax.get_group() if amax is not None else None
    for name, unit in state.modules.items():
        experts = is_expert(unit)
        if average and not experts:
            continue
        storage, ranks = state.units[name], 1
        mesh = fsdp_mesh(state.meshes, unit, storage)
        if average:
            ranks = state.meshes.size("dp_shard")
            ranks *= state.meshes.size("dp_replicate") if storage.gradient[0] != "P" else 1
        shards = mesh["dp_shard"] if mesh.ndim == 2 else mesh
        # Over one rank FSDP2 divides fp16 gradients twice, by the factor each time (torch 2.11 to 2.13 foreach_reduce).
        own = policy if state.precision_plan is None else state.precision_plan.fsdp2_policy(name)
        twice = shards.size() == 1 and _fsdp2.reduced_dtype(unit, own) == torch.float16
        factor = math.sqrt(ranks) if twice else float(ranks)
        unit.set_gradient_divide_factor(factor)  # type: ignore[not-callable]
        if shards.size() > 1 and (not average or dist.get_backend(shards.get_group()) == "gloo"):
            # gloo has no operation that multiplies first. On one rank FSDP2 divides without it, and with it twice.
            unit.set_force_sum_reduction_for_comms(True)  # type: ignore[not-callable]
