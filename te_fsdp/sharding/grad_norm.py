"""Gradient norm and clipping over parameters on any mixture of meshes, every element counted once.

``torch.nn.utils.clip_grad_norm_`` stacks the norms of all gradients, which fails as soon as two parameters live on
different meshes (a tensor-parallel weight beside a norm's weight, an expert beside a dense layer), and would count what
is replicated as often as it is held if the parts were plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp import _torch
from te_fsdp.errors import PlacementError, PrecisionError
from te_fsdp.parameters import facts_of, noted
from te_fsdp.sharding.outer_averages import averaged
from te_fsdp.sharding.reductions import require_reduced
from te_fsdp.sharding.state import shard_of, state_of

# An axis of a mesh: the global ranks of its process group.
_Axis = tuple[int, ...]
# torch.nn.utils.clip_grad_norm_ divides by the norm plus this, so that a norm of zero does no harm.
_MARGIN = 1e-6


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm, taken over all ranks, is at most ``max_norm``.

    The value is that of ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, summed in float32.

    Collective: one all-reduce of a few floats per mesh axis that any parameter lives on; before that, what an optimizer
    given to :func:`te_fsdp.shard_optimizer` would average over the outer axis at its step, which then does not do it
    again. Call it on all ranks with the same parameters in the same order; a rank may lack gradients or hold empty
    shards.

    Args:
        parameters: A model, or its parameters: DTensors on any meshes and plain tensors, which count as replicated.
        max_norm: Largest norm allowed, not negative.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: Raise, on all ranks, if the norm is NaN or infinite; otherwise the gradients become what
            the arithmetic gives, as in torch.

    Returns:
        Norm before clipping: float32 scalar, equal on all ranks, on the gradients' device.

    Raises:
        PlacementError: A gradient that still waits for its reduction (``Partial``).
        OrderError: ``outer_strategy="optim"`` without ``shard_optimizer``, or a backward since an earlier call.
        PrecisionError: A non-finite norm, if asked for.
        ValueError: ``max_norm`` or ``norm_type`` out of range.
    """
    if math.isnan(max_norm) or max_norm < 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be a number of at least 0, got {max_norm}")
    chosen = _averaged(_parameters(parameters))
    total = grad_norm(chosen, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise PrecisionError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type}",
            expected="a finite number",
            got=float(total),
            fix="look for NaN or infinite gradients, or pass error_if_nonfinite=False",
        )
    factor = torch.clamp(max_norm / (total + _MARGIN), max=1.0)
    gradients = [_torch.local_of(p.grad) for p in chosen if p.grad is not None]
    _torch.multiply_all_(gradients, factor)
    return total


def grad_norm(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
) -> torch.Tensor:
    """Norm of all gradients over all ranks, every element counted once. See :func:`clip_grad_norm_`.

    Returns:
        float32 scalar, equal on all ranks; zero without gradients.
    """
    if not norm_type > 0:
        raise ValueError(f"grad_norm: norm_type must be positive, got {norm_type}")
    chosen = _averaged(_parameters(parameters))
    spread: dict[tuple[_Axis, ...], list[torch.Tensor]] = {}
    groups: dict[_Axis, dist.ProcessGroup] = {}
    known: dict[tuple[DeviceMesh, ...], tuple[_Axis, ...]] = {}
    for parameter in chosen:
        # By the parameter and not by its gradient, which a rank may lack: all ranks must meet in the same collectives.
        meshes = _meshes_of(parameter)
        if meshes not in known:
            known[meshes] = _axes_of(meshes, groups)
        gradients = spread.setdefault(known[meshes], [])
        _check_reduced(parameter)
        if parameter.grad is not None and _counts(parameter):
            gradients.append(_torch.local_of(parameter.grad))
    device = _torch.local_of(chosen[0]).device if chosen else torch.device("cpu")
    if not spread:
        return torch.zeros((), device=device)
    sums = [_local_sum(gradients, norm_type, device) for gradients in spread.values()]
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis, group in groups.items():
        places = [i for i, axes in enumerate(spread) if axis in axes]
        parts = torch.stack([sums[i] for i in places])
        dist.all_reduce(parts, op=op, group=group)
        for place, part in zip(places, parts.unbind(), strict=True):
            sums[place] = part
    whole = torch.stack(sums)
    return whole.amax() if math.isinf(norm_type) else whole.sum() ** (1.0 / norm_type)


def _parameters(given: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Each trainable parameter once, as the optimizer has it; raises if gradients still wait for their reduction."""
    if isinstance(given, nn.Module):
        given = given.parameters()
    elif isinstance(given, torch.Tensor):
        given = [given]
    chosen = [shard_of(parameter) for parameter in given]
    states = {id(state): state for state in map(state_of, chosen) if state is not None}
    for state in states.values():
        require_reduced(state, "grad_norm", chosen)
        if state.nan_report is not None:
            state.nan_report.check()
    return list({id(p): p for p in chosen if p.requires_grad or p.grad is not None}.values())


def _averaged(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter, or what stands for it and its averaged gradient; an expert's stays one."""
    found = averaged(parameters)
    for parameter, main in zip(parameters, found, strict=True):
        facts = facts_of(parameter)
        if main is not parameter and facts is not None and facts.ep_mesh is not None:
            noted(main).ep_mesh = facts.ep_mesh
    return found


def _meshes_of(parameter: torch.Tensor) -> tuple[DeviceMesh, ...]:
    """The meshes over which a parameter is spread: its own, axes that copy it included, and ``ep``."""
    facts = facts_of(parameter)
    meshes = (parameter.device_mesh,) if isinstance(parameter, DTensor) else ()
    return meshes if facts is None or facts.ep_mesh is None else (*meshes, facts.ep_mesh)


def _axes_of(meshes: Sequence[DeviceMesh], groups: dict[_Axis, dist.ProcessGroup]) -> tuple[_Axis, ...]:
    """The axes of meshes that are larger than 1, each once; adds their process groups to ``groups``."""
    axes: list[_Axis] = []
    for mesh in meshes:
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                group = mesh.get_group(axis)
                ranks = tuple(dist.get_process_group_ranks(group))
                groups.setdefault(ranks, group)
                # The one parameter of all experts lies on ep itself.
                axes += [ranks] if ranks not in axes else []
    return tuple(axes)


def _counts(parameter: torch.Tensor) -> bool:
    """Whether this rank's part of the gradient counts: of several copies the first, so that all ranks get one result.

    The copies of a gradient may differ by rounding (see ``step_hooks.py``).
    """
    if not isinstance(parameter, DTensor):
        return True
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return all(
        place == 0 or not placement.is_replicate()
        for place, placement in zip(coordinate, parameter.placements, strict=True)
    )


def _check_reduced(parameter: torch.Tensor) -> None:
    """A sum that is not done yet has no norm."""
    gradient: Any = parameter.grad
    if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
        raise PlacementError(
            f"grad_norm: gradient of a parameter of shape {tuple(parameter.shape)}",
            expected=f"placements {tuple(getattr(parameter, 'placements', ()))}",
            got=f"{tuple(gradient.placements)}",
            why="The ranks' parts have not been added up",
            fix="clip after the last backward of the step, when gradients are reduced",
        )


def _local_sum(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """This rank's part of the sum of |g| ** norm_type (of the maximum for inf), in float32."""
    found = _torch.norms(gradients, norm_type)
    if not found:
        return torch.zeros((), device=device)
    norms = torch.stack(found)
    return norms.amax() if math.isinf(norm_type) else (norms**norm_type).sum()
