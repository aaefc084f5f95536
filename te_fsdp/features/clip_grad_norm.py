"""Multiply all gradients: clip them by their norm over all ranks, or scale them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import raised_on_all_ranks
from te_fsdp.collectives.rendezvous import collective_call, is_capturing
from te_fsdp.errors import OrderError, PlacementError, PrecisionError, require_flags, require_number
from te_fsdp.features.hfsdp.gradients import averages_of
from te_fsdp.gradient_sync import require_reduced
from te_fsdp.lifecycle import gradients_of
from te_fsdp.mesh_checks import STAGES
from te_fsdp.process_modules import registered_at
from te_fsdp.records import COPIED, get_or_create_record, get_record, label_of, name_of
from te_fsdp.sharded_model import require_sharded_model, shard_of, sharded_model_of
from te_fsdp.upstream import torch_dtensor as _torch

# Global ranks of the process group of a mesh axis.
_Axis = tuple[int, ...]
# torch.nn.utils.clip_grad_norm_ adds this to the norm before dividing, so that a norm of zero is harmless.
_MARGIN = 1e-6
# Orders of norms are positive.
_SMALLEST = math.ulp(0.0)


@_torch.runs_eagerly
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_mesh: DeviceMesh | bool = True,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm over all ranks is at most ``max_norm``.

    The value equals that of ``torch.nn.utils.clip_grad_norm_`` on the unsharded model with all pipeline stages,
    accumulated in fp32.

    Collective: one all-reduce of a few floats per mesh axis of the parameters, and one over the pipeline stages. For
    an optimizer passed to :func:`te_fsdp.shard_optimizer`, the averages over the outer axis are computed first, and
    its step does not repeat them. Call it on all ranks. Ranks of a stage pass the same parameters in the same order. A
    rank may have no gradients or empty shards.

    Args:
        parameters: A model, or its parameters: DTensors on any meshes, and plain tensors, which count as replicated.
        max_norm: Maximum norm, not negative.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: Raise on all ranks if the norm is NaN or infinite. Otherwise gradients are scaled by the
            nonfinite factor, as in torch.
        pp_mesh: 1-D mesh of the pipeline stages to include. ``True``: :attr:`Meshes.pp` of the parameters' model,
            or the axis ``pp`` of the mesh that their meshes were sliced from.
            ``False``: this stage only. Pass several stages on one rank in one call. Parameters shared by stages (a
            tied embedding) count once per stage.

    Returns:
        Norm before clipping: fp32 scalar, identical on all ranks, on the gradients' device.

    Raises:
        PlacementError: A gradient is not reduced yet (``Partial``), or a number is out of range. After the first call,
            the GPUs of other ranks report a device-side assertion instead.
        OrderError: ``outer_strategy="optim"`` without ``shard_optimizer``, a backward after an earlier call, or
            parameters that are no longer part of the model.
        PrecisionError: The norm is not finite and ``error_if_nonfinite`` is set.
    """
    require_flags("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite)
    listed = _check_parameter_list(parameters)
    stages = _stages(listed, pp_mesh)
    trained, norm_type, wrong = _parameters(listed, max_norm, norm_type)
    total, failed = _norm(chosen := _averaged(trained), norm_type, stages, failed=wrong is not None)
    raise_failure(wrong, failed)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise PrecisionError(
            f"clip_grad_norm_: the gradients' norm of order {norm_type}",
            expected="a finite number",
            got=float(total),
            fix="find the NaN or infinite gradients (te_fsdp.report_nan), or pass error_if_nonfinite=False",
        )
    factor = torch.clamp(max_norm / (total + _MARGIN), max=1.0)
    gradients = [_torch.local_of(p.grad) for p in chosen if p.grad is not None]
    _torch.multiply_all_(gradients, factor)
    # With HFSDP the averages were scaled, not ``.grad``. The factor is recorded in case they are computed again.
    for averages in averages_of(listed):
        averages.multiplied(factor)
    return total


def raise_failure(own: PlacementError | None, failed: torch.Tensor) -> None:
    """Raise this rank's error, or PlacementError if calls have failed on other ranks. A GPU asserts it. Local."""
    if own is not None:
        raise own
    try:
        _torch.assert_on_device(failed == 0)  # the host does not wait for a GPU
    except RuntimeError:
        raise PlacementError(
            "clip_grad_norm_ failed on another rank",
            expected="max_norm and norm_type in range on all ranks",
            got="an error there, in its own output",
            fix="pass the same numbers on all ranks",
        ) from None


def partial_error(parameter: torch.Tensor, gradient: DTensor) -> PlacementError:
    """Return the error for a gradient that is not reduced yet. Local operation."""
    module, name = next(iter(registered_at({id(parameter)})), (None, ""))
    kind = "a parameter" if module is None else f"{name_of(module)}.{name}, a parameter"
    return PlacementError(
        f"clip_grad_norm_: gradient of {label_of(parameter, kind)}",
        expected=f"placements {tuple(getattr(parameter, 'placements', ()))}",
        got=f"{tuple(gradient.placements)}",
        why="The terms of the ranks are not summed yet",
        fix="clip after the last backward of the step, which reduces gradients",
    )


# [Note: norm over meshes] ``torch.nn.utils.clip_grad_norm_`` cannot see that experts are spread over ranks. On plain
# local tensors it would count replicated elements several times. Here every element counts once, with one collective
# per mesh axis.
def _norm(
    chosen: list[torch.Tensor], norm_type: float, stages: DeviceMesh | None, *, failed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all gradients over all ranks, counting each element once: fp32, zero without gradients.

    Also return the number of ranks whose call has ``failed``, which the collectives of the norm count, too.
    """
    spread: dict[tuple[_Axis, ...], list[torch.Tensor]] = {}
    groups: dict[_Axis, dist.ProcessGroup] = {}
    axes_of: dict[tuple[DeviceMesh, ...], tuple[_Axis, ...]] = {}
    for parameter in chosen:
        # Use the parameter's meshes, not the gradient's, which a rank may lack: all ranks must run the same
        # collectives.
        record = get_record(parameter)
        meshes = (parameter.device_mesh,) if isinstance(parameter, DTensor) else ()
        meshes = meshes if record is None or record.ep_mesh is None else (*meshes, record.ep_mesh)
        if meshes not in axes_of:
            axes_of[meshes] = _axes_of(meshes, groups)
        gradients = spread.setdefault(axes_of[meshes], [])
        gradient: Any = parameter.grad
        if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
            raise partial_error(parameter, gradient)
        # Replicas of a gradient may differ by rounding (see ``lifecycle.py``), and all ranks must get one result, so
        # that only the gradient of the first replica counts.
        is_first = not isinstance(parameter, DTensor) or all(
            index == 0 or not placement.is_replicate()
            for index, placement in zip(
                parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True
            )
        )
        if parameter.grad is not None and is_first:
            gradients.append(_torch.local_of(parameter.grad))
    device = _torch.local_of(chosen[0]).device if chosen else getattr(stages, "device_type", "cpu")
    if not spread and stages is None:
        return torch.zeros((), device=device), torch.zeros((), device=device)
    # This rank's sums of |g| ** norm_type (the maximum for inf). A stage without parameters contributes zero.
    sums = []
    for gradients in spread.values() or [[]]:
        norms = _torch.norms(gradients, norm_type)
        powers = torch.stack(norms) if norms else torch.zeros(1, device=device)
        sums.append(powers.amax() if math.isinf(norm_type) else (powers**norm_type).sum())
    count = torch.full_like(sums[0], failed)
    # Each set of axes has one sum, so the number of collectives does not grow with the parameters.
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis, group in groups.items():
        indices = [i for i, axes in enumerate(spread) if axis in axes]
        parts = torch.stack([*(sums[i] for i in indices), count])
        dist.all_reduce(parts, op=op, group=group)
        *reduced, count = parts.unbind()
        for index, part in zip(indices, reduced, strict=True):
            sums[index] = part
    # Roots are taken at the end: only powers of the norm add up over shards.
    total = torch.stack(sums)
    total = total.amax() if math.isinf(norm_type) else total.sum()
    if stages is not None:
        parts = torch.stack([total, count])
        dist.all_reduce(parts, op=op, group=stages.get_group())
        total, count = parts.unbind()
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type), count


def _check_parameter_list(params: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters as the optimizer has them; raise PlacementError for other values, such as gradients."""
    got = type(params).__name__
    if isinstance(params, nn.Module):
        params = params.parameters()
    elif isinstance(params, torch.Tensor):
        params = [params]
    try:
        listed = [shard_of(parameter) for parameter in params]
    except (AttributeError, TypeError):  # the items are not parameters, or it is not a list
        listed = None
    if (
        listed is None
        or not all(isinstance(t, torch.Tensor) for t in listed)
        or (
            listed
            and not any(t.requires_grad or t.grad is not None or isinstance(t, nn.Parameter) for t in listed)
        )
    ):
        raise PlacementError(
            "clip_grad_norm_: parameters",
            expected="a model, or its parameters",
            got=got
            if listed is None
            else f"a {got} without parameters, such as one of gradients or of models",
            fix="te_fsdp.clip_grad_norm_(model, max_norm); for several models torch.nn.ModuleList([a, b])",
        )
    return listed


def _stages(parameters: Sequence[torch.Tensor], stages: DeviceMesh | bool) -> DeviceMesh | None:
    """Return the mesh of the pipeline stages to include, even for a stage that trains nothing; ``None`` without one."""
    if isinstance(stages, DeviceMesh):
        return stages
    require_flags("clip_grad_norm_", pp_mesh=stages)
    parameters = parameters if stages else ()
    for state in map(sharded_model_of, parameters):
        if state is not None:
            return state.meshes.pp
    # torch's fully_shard records no model, but slices of a job's mesh refer to it.
    roots = (_torch.root_mesh(p.device_mesh) for p in parameters if isinstance(p, DTensor))
    return next((root[STAGES] for root in roots if STAGES in (root.mesh_dim_names or ())), None)


def _parameters(
    chosen: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> tuple[Sequence[torch.Tensor], float, PlacementError | None]:
    """Return each trainable parameter once, and the norm's order; raise for unreduced or replaced gradients.

    Raise for wrong arguments on all ranks in the first call. Later return the error, with the order of the last call.
    """
    for parameter in chosen:
        record = get_record(parameter)
        if record is not None and record.replaced_by and parameter.grad is None:
            name, by = record.replaced_by
            copied = by == COPIED
            raise OrderError(
                f"clip_grad_norm_: {name or label_of(parameter)}",
                expected="current parameters of the model",
                got=f"a copy created by {by}" if copied else f"a parameter that {by} has replaced",
                why="Only the model's current parameters have gradients, so nothing would be clipped",
                fix="pass the model, or list model.parameters() after te_fsdp.fully_shard and te_fsdp.materialize",
            )
    states = {id(state): state for state in map(sharded_model_of, chosen) if state is not None}
    # Later calls share wrong arguments in the norm's collectives.
    wrong, later = None, [s for s in states.values() if s.checked.clipping[0]]
    new = [s for s in states.values() if s.checks.clipping and not (s.checked.clipping[0] or is_capturing())]
    mesh = new[0].meshes.device_mesh if new else None
    # Without the rendezvous the collectives of a rank that clips alone would join those of the others' steps.
    waiting = collective_call("clip_grad_norm_", mesh) if new else nullcontext()
    with waiting, raised_on_all_ranks(mesh, "clip_grad_norm_"):
        fix = "max_norm=1.0; math.inf clips nothing"
        try:
            require_number("clip_grad_norm_", "max_norm", max_norm, least=0, fix=fix)
            require_number("clip_grad_norm_", "norm_type", norm_type, least=_SMALLEST, fix="norm_type=2.0")
        except PlacementError as error:
            if new or not later:
                raise
            wrong = error
            _, max_norm, norm_type = later[0].checked.clipping
    for state in states.values():
        require_reduced(state, "clip_grad_norm_", chosen)
        for record_arguments in state.checks.clipping:
            record_arguments(state, max_norm, norm_type)
        for check in state.components.check_gradients:
            check()
    trained = list({id(p): p for p in chosen if p.requires_grad or p.grad is not None}.values())
    return trained, norm_type, wrong


def _averaged(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each parameter, or with sharded optimizer state its main parameter, which has the averaged gradient.

    Computes missing averages. Collective over the replicas of parameters with sharded state, once per optimizer, in the
    same order on all ranks. Raises OrderError if a parameter of ``outer_strategy="optim"`` has no sharded optimizer, or
    gradients have changed since they were averaged.
    """
    averaged = list(parameters)
    for averages in averages_of(parameters, "clip_grad_norm_ before shard_optimizer"):
        averages.average()
        averaged = [averages.ready[id(p)].main if id(p) in averages.ready else p for p in averaged]
    for parameter, main in zip(parameters, averaged, strict=True):
        record = get_record(parameter)
        if main is not parameter and record is not None and record.ep_mesh is not None:
            get_or_create_record(main).ep_mesh = record.ep_mesh
    return [main for main in averaged if main.requires_grad or main.grad is not None]


def _axes_of(meshes: Sequence[DeviceMesh], groups: dict[_Axis, dist.ProcessGroup]) -> tuple[_Axis, ...]:
    """Return the distinct mesh axes larger than 1. Their process groups are added to ``groups``."""
    axes: list[_Axis] = []
    for mesh in meshes:
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1:
                group = mesh.get_group(axis)
                ranks = tuple(dist.get_process_group_ranks(group))
                # Meshes may have several groups of the same ranks. One of them is used for all.
                groups.setdefault(ranks, group)
                # The single parameter of all experts is on ep itself.
                axes += [ranks] if ranks not in axes else []
    return tuple(axes)


@_torch.runs_eagerly
@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float | torch.Tensor) -> None:
    """Multiply all gradients in place by a factor that is equal on all ranks, such as 1 / the number of tokens.

    Local operation. With HFSDP, after a backward that :func:`te_fsdp.microbatch` has marked as the last one, it
    completes the averages over ``dp_replicate``, as :func:`te_fsdp.clip_grad_norm_` does, and scales these. A factor
    that is a tensor has one element.

    Raises:
        OrderError: Gradients are not reduced yet, or have changed since they were averaged.
    """
    state = require_sharded_model(model, "scale_gradients")
    if not isinstance(factor, torch.Tensor) or factor.numel() != 1:
        require_number("scale_gradients", "factor", factor, least=-math.inf, fix="factor=1 / tokens")
    require_reduced(state, "scale_gradients")
    number = torch.as_tensor(factor, dtype=torch.float32).reshape(())
    averaging = averages_of(state.parameters().values())
    # Averages that started in backward are completed, so that they can be scaled in place of their gradients.
    for averages in averaging:
        averages.finish()
    # Replace gradients by their averages, which the next step uses.
    rows = {key: average for averages in averaging for key, average in averages.computed.items()}
    gradients = [gradient for gradient in gradients_of(state.parameters().values()) if gradient is not None]
    _torch.multiply_all_(
        _torch.local_tensors_of(rows.get(id(gradient), gradient) for gradient in gradients), number
    )
    for averages in averaging:
        averages.multiplied(number)
