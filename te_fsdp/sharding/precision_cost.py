"""What a precision policy costs in memory, parameter by parameter: the closed form behind the table in the docs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.parameters import places_of
from te_fsdp.sharding.precision_plan import gradient_dtype
from te_fsdp.sharding.state import sharding_state

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Cost", "cost_of", "costs_of"]

#: Axes over which FSDP2 cuts parameters, and gradients once they are reduced.
_CUT_BY_FSDP2 = "dp_shard"


@dataclass(frozen=True)
class Cost:
    """Bytes on this rank that come on top of a parameter's own while it is trained; 0 for a frozen one.

    Attributes:
        gradient: Of its gradient when it is reduced, between the last backward of a step and ``zero_grad``.
        unreduced: Of its gradient while it adds up unreduced: whole, as far as tp and ep do not cut it.
        main: Of its main weight in the optimizer's state, if it is quantized.
        dtype: Of the gradient; ``None`` for a frozen parameter.
    """

    gradient: int = 0
    unreduced: int = 0
    main: int = 0
    dtype: torch.dtype | None = None


def costs_of(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """What a model's policy costs on this rank, in words and bytes; empty without a policy. Local operation."""
    state = sharding_state(model)
    if state is None or state.precision is None:
        return ()
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for place in places_of(model):
        if id(place.parameter) in seen:
            continue
        seen.add(id(place.parameter))
        cost = cost_of(place.parameter, _te.weight_quantizer(place.owner, place.name) is not None)
        dtype = str(cost.dtype).removeprefix("torch.")
        found[f"gradients, {dtype}"] += cost.gradient
        found[f"gradients while they add up unreduced, {dtype}"] += cost.unreduced
        found["main weights in the optimizer, float32"] += cost.main
    return tuple((words, size) for words, size in sorted(found.items()) if size)


def cost_of(parameter: torch.Tensor, quantized: bool) -> Cost:
    """What training one parameter of a model with a precision policy costs. Local operation.

    Args:
        parameter: As the sharded model holds it, on meta or not.
        quantized: Whether it is or will be quantized.
    """
    if not (parameter.requires_grad and parameter.is_floating_point()):
        return Cost()
    dtype, elements = gradient_dtype(parameter), _torch.local_of(parameter).numel()
    whole = elements
    if isinstance(parameter, DTensor):
        whole, mesh = parameter.numel(), parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if _torch.shard_dim_of(placement) is not None and _axis(mesh, axis) != _CUT_BY_FSDP2:
                whole //= mesh.size(axis)
    main = elements * 4 if quantized or _te.is_quantized(_torch.local_of(parameter)) else 0
    return Cost(elements * dtype.itemsize, whole * dtype.itemsize, main, dtype)


def _axis(mesh: object, axis: int) -> str:
    names = getattr(mesh, "mesh_dim_names", None)
    return names[axis] if names else str(axis)
