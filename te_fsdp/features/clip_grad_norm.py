"""Looking at all gradients before a step: their norm, clipping, and where NaN comes from (``report_nan``).

``torch.nn.utils.clip_grad_norm_`` stacks the norms of all gradients, which fails as soon as two parameters live on
different meshes (a tensor-parallel weight beside a norm's weight, an expert beside a dense layer), and would count what
is replicated as often as it is held if the parts were plain tensors. Here every element counts once.

``report_nan`` tells which parameter, rank and microbatch made gradients NaN or infinite, before it spreads:

    backward     right before a unit's gradients are reduced: one norm of the whole buffer, on the device
    no_sync      right before the next forward: one norm per unit of what has added up
    step         one flag per unit is read, and an all-reduce of one number tells whether any rank has seen anything
    a new step   what was seen is forgotten: after a step, or when a forward finds that all gradients were cleared

Nothing waits for the device until the step, or until a norm is computed for clipping. Only then, and only when
something was seen, parameters are looked through: a reduction spreads NaN over ranks, but not over parameters.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.agreement import gather, maximum
from te_fsdp.collectives.redistribute import GradComm, comm_of, set_comm
from te_fsdp.errors import (
    GradientError,
    OrderError,
    PlacementError,
    PrecisionError,
    message,
    require_flags,
    require_number,
)
from te_fsdp.features.hfsdp.gradients import averaged_tensors_of, averages_of
from te_fsdp.gradient_sync import require_reduced
from te_fsdp.records import COPIED, get_or_create_record, get_record, label_of
from te_fsdp.sharded_model import get_sharded_model, shard_of, sharded_model_of
from te_fsdp.unit_communication import set_unit_grad_comm
from te_fsdp.upstream import fsdp2_gradients as _fsdp2_gradients, torch_dtensor as _torch

if TYPE_CHECKING:
    from te_fsdp.sharded_model import ShardedModel

_log = logging.getLogger("te_fsdp")

# An axis of a mesh: the global ranks of its process group.
_Axis = tuple[int, ...]
# torch.nn.utils.clip_grad_norm_ divides by the norm plus this, so that a norm of zero does no harm.
_MARGIN = 1e-6
# Orders of norms are positive.
_SMALLEST = math.ulp(0.0)
#: What the gradients of parameters that FSDP2 does not manage go by.
NOT_SHARDED = "parameters that are not sharded"
#: How many parameters a message names.
MOST = 8


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    pp_mesh: DeviceMesh | bool = True,
) -> torch.Tensor:
    """Scale all gradients in place so that their norm, taken over all ranks, is at most ``max_norm``.

    The value is that of ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, all stages of a pipeline included,
    summed in float32.

    Collective: one all-reduce of a few floats per mesh axis that any parameter lives on, and of one over the stages;
    before that, what an optimizer given to :func:`te_fsdp.shard_optimizer` would average over the outer axis at its
    step, which then does not do it again. Call it on all ranks, on those of a stage with the same parameters in the
    same order; a rank may lack gradients or hold empty shards.

    Args:
        parameters: A model, or its parameters: DTensors on any meshes and plain tensors, which count as replicated.
        max_norm: Largest norm allowed, not negative.
        norm_type: Order of the norm, positive; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: Raise, on all ranks, if the norm is NaN or infinite; otherwise the gradients become what
            the arithmetic gives, as in torch.
        pp_mesh: The stages whose gradients count too, a 1-D mesh. ``True``: :attr:`Meshes.pp` of the parameters' model.
            ``False``: this stage alone. Several stages on a rank are given in one call. What stages share (a tied
            embedding) counts once for each that has it.

    Returns:
        Norm before clipping: float32 scalar, equal on all ranks, on the gradients' device.

    Raises:
        PlacementError: A gradient that still waits for its reduction (``Partial``); arguments out of range.
        OrderError: ``outer_strategy="optim"`` without ``shard_optimizer``, or a backward since an earlier call;
            parameters that the model has lost.
        PrecisionError: A non-finite norm, if asked for.
    """
    require_flags("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite)
    given = _check_parameter_list(parameters)
    require_number(
        "clip_grad_norm_", "max_norm", max_norm, least=0, fix="max_norm=1.0; math.inf clips nothing"
    )
    require_number("clip_grad_norm_", "norm_type", norm_type, least=_SMALLEST, fix="norm_type=2.0")
    stages = _stages(given, pp_mesh)
    chosen = _averaged(_parameters(given))
    total = _norm(chosen, norm_type, stages)
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
    for averages in averages_of(given):
        averages.multiplied(factor)
    return total


def _norm(chosen: list[torch.Tensor], norm_type: float, stages: DeviceMesh | None) -> torch.Tensor:
    """Norm of all gradients over all ranks, every element counted once: float32, zero without gradients."""
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
    device = _torch.local_of(chosen[0]).device if chosen else getattr(stages, "device_type", "cpu")
    if not spread and stages is None:
        return torch.zeros((), device=device)
    # A stage without parameters takes part with a zero.
    sums = [_local_sum(gradients, norm_type, device) for gradients in spread.values() or [[]]]
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis, group in groups.items():
        places = [i for i, axes in enumerate(spread) if axis in axes]
        parts = torch.stack([sums[i] for i in places])
        dist.all_reduce(parts, op=op, group=group)
        for place, part in zip(places, parts.unbind(), strict=True):
            sums[place] = part
    whole = torch.stack(sums)
    whole = whole.amax() if math.isinf(norm_type) else whole.sum()
    if stages is not None:
        dist.all_reduce(whole, op=op, group=stages.get_group())
    return whole if math.isinf(norm_type) else whole ** (1.0 / norm_type)


def _check_parameter_list(given: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter as the optimizer has it; raises for something else, such as gradients, which have none."""
    got = type(given).__name__
    if isinstance(given, nn.Module):
        given = given.parameters()
    elif isinstance(given, torch.Tensor):
        given = [given]
    try:
        listed = [shard_of(parameter) for parameter in given]
    except (AttributeError, TypeError):  # names beside parameters, or no list at all
        listed = None
    if listed is None or (
        listed
        and not any(t.requires_grad or t.grad is not None or isinstance(t, nn.Parameter) for t in listed)
    ):
        raise PlacementError(
            "clip_grad_norm_: parameters",
            expected="a model, or its parameters",
            got=got if listed is None else f"a {got} of tensors that are no parameters, such as gradients",
            fix="te_fsdp.clip_grad_norm_(model, max_norm)",
        )
    return listed


def _stages(parameters: Sequence[torch.Tensor], asked: DeviceMesh | bool) -> DeviceMesh | None:
    """The stages over which gradients count, also those of a stage that trains nothing; ``None`` without any."""
    if isinstance(asked, DeviceMesh):
        return asked
    require_flags("grad_norm", pp_mesh=asked)
    states = (sharded_model_of(parameter) for parameter in parameters) if asked else ()
    return next((state.meshes.pp for state in states if state is not None), None)


def _parameters(chosen: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Each trainable parameter once; raises if gradients wait for their reduction, or come to other parameters."""
    for parameter in chosen:
        facts = get_record(parameter)
        if facts is not None and facts.replaced_by and parameter.grad is None:
            name, by = facts.replaced_by
            copied = by == COPIED
            raise OrderError(
                f"grad_norm: {name or label_of(parameter)}",
                expected="parameters that the model has now",
                got=f"a copy, by {by}" if copied else f"one from before {by}, which has replaced it",
                why="Gradients go to the model's parameters: nothing would be clipped",
                fix="pass the model, or list model.parameters() after te_fsdp.fully_shard and te_fsdp.materialize",
            )
    states = {id(state): state for state in map(sharded_model_of, chosen) if state is not None}
    for state in states.values():
        require_reduced(state, "grad_norm", chosen)
        if state.nan_report is not None:
            state.nan_report.check()
    return list({id(p): p for p in chosen if p.requires_grad or p.grad is not None}.values())


def _averaged(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each parameter, or what stands for it and its averaged gradient; an expert's stays one."""
    found = averaged_tensors_of(parameters)
    for parameter, main in zip(parameters, found, strict=True):
        facts = get_record(parameter)
        if main is not parameter and facts is not None and facts.ep_mesh is not None:
            get_or_create_record(main).ep_mesh = facts.ep_mesh
    return [main for main in found if main.requires_grad or main.grad is not None]


def _meshes_of(parameter: torch.Tensor) -> tuple[DeviceMesh, ...]:
    """The meshes over which a parameter is spread: its own, axes that copy it included, and ``ep``."""
    facts = get_record(parameter)
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

    The copies of a gradient may differ by rounding (see ``lifecycle.py``).
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


def _local_sum(gradients: list[torch.Tensor], norm_type: float, device: torch.device | str) -> torch.Tensor:
    """This rank's part of the sum of |g| ** norm_type (of the maximum for inf), in float32."""
    found = _torch.norms(gradients, norm_type)
    if not found:
        return torch.zeros((), device=device)
    norms = torch.stack(found)
    return norms.amax() if math.isinf(norm_type) else (norms**norm_type).sum()


# ---------------------------------------------------------------------------------------------------------- report_nan


def report_nan(model: nn.Module, *, action: str = "raise") -> NanReport:
    """Watch the gradients of a sharded model for NaN and infinity from now on.

    Every optimizer step, and every norm of :func:`te_fsdp.clip_grad_norm_`, first asks whether any rank has seen one
    since the last step. Costs one pass over each gradient buffer on the device, a few kernels per unit and microbatch,
    and one all-reduce of one number per step over the world.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        action: ``"raise"``: :class:`GradientError` on all ranks before the step; ``"log"``: a warning on each rank, and
            the step is taken.

    Returns:
        The watch, with ``check()`` for loops that do not step an optimizer of torch, and ``remove()``.

    Raises:
        OrderError: A model that was not sharded, or that is watched already.
        ValueError: Another action.
    """
    if action not in ("raise", "log"):
        raise ValueError(f'report_nan: action: expected "raise" or "log", got {action!r}')
    state = get_sharded_model(model)
    if state is None or state.nan_report is not None:
        raise OrderError(
            f"report_nan({type(model).__name__})",
            expected="the model that te_fsdp.fully_shard was called on, once",
            got="one that was not" if state is None else "one that is watched already",
            fix="call te_fsdp.fully_shard before, and remove() of an earlier watch",
        )
    return NanReport(state, action)


class NanReport:
    """A watch on the gradients of one model.

    Attributes:
        action: ``"raise"`` or ``"log"``.
        microbatch: Number of the microbatch that is running, from 1; 0 before the first one of a step.
    """

    def __init__(self, state: ShardedModel, action: str) -> None:
        self.action, self.microbatch, self._asked, self._raised = action, 0, False, False
        self._state = weakref.ref(state)
        self._labels = [*state.modules, NOT_SHARDED]
        self._first = torch.zeros(len(self._labels), dtype=torch.int32, device=state.meshes.device)
        comm = comm_of(state.model)
        self._comm = GradComm() if comm is None else comm
        if comm is None:
            set_comm(state.model, self._comm)
        for name, unit in state.modules.items():
            set_unit_grad_comm(unit, self._comm, name)
        self._comm.look = self._look
        self._hook = state.model.register_forward_pre_hook(_torch.disable_compile(self._next_microbatch))
        state.nan_report = self

    def remove(self) -> None:
        """Stop watching. Local operation."""
        self._hook.remove()
        self._comm.look = None
        state = self._state()
        if state is not None and state.nan_report is self:
            state.nan_report = None

    def check(self) -> None:
        """Ask whether any rank has seen NaN or infinity since the last step.

        Collective over the world: one all-reduce of one number, none if nothing ran since the last answer; more only
        when something was seen.

        Raises:
            GradientError: One was seen, with ``action="raise"``; on all ranks, naming parameters, ranks, microbatches.
        """
        if self._asked:
            return
        self._look_at_unreduced()
        seen = self._first.count_nonzero().to(torch.int32)
        maximum(seen)
        text = self._describe() if int(seen) else ""
        if text and self.action == "raise":
            self._raised = True
            raise GradientError(text)
        if text:
            _log.warning("%s", text)
        self._asked = True

    def forget(self) -> None:
        """Begin a new step. Local operation.

        Happens by itself: after a step, in ``te_fsdp.zero_grad``, and in the next forward after gradients were set to
        ``None``. Gradients that something else has filled with zeros (``optimizer.zero_grad(set_to_none=False)``) are
        recognised after an error that this watch has raised; where a loop skips a step for other reasons, and clears
        gradients so, call this.
        """
        self.microbatch, self._asked, self._raised = 0, False, False
        self._first.zero_()

    def _watched(self) -> ShardedModel:
        state = self._state()
        assert state is not None  # a hook of its model runs
        return state

    def _next_microbatch(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            if self.microbatch and self._are_cleared():
                self.forget()
            self._look_at_unreduced()
            self.microbatch += 1
            self._asked = False

    def _are_cleared(self) -> bool:
        """Whether no gradient is left of the microbatches so far: the step that they belonged to was given up."""
        state = self._watched()
        if any(
            True
            for unit in state.modules.values()
            for _ in _fsdp2_gradients.params_with_unreduced_gradients(unit)
        ) or (state.replicated is not None and state.replicated.pending):
            return False
        found = (p.grad for p in map(shard_of, state.model.parameters()))
        if not self._raised:  # stops at the first one: this runs before each microbatch
            return all(gradient is None for gradient in found)
        # Zeros and not only finite: another rank may hold the part of a gradient that this rank has spoilt.
        left = [_torch.local_of(gradient) for gradient in found if gradient is not None]
        return not any(bool(gradient.count_nonzero()) for gradient in left)

    def _look_at_unreduced(self) -> None:
        """What has added up without a reduction, on this rank alone."""
        state = self._watched()
        for name, unit in state.modules.items():
            gradients = [
                g
                for managed in _fsdp2_gradients.params_with_unreduced_gradients(unit)
                for g in _fsdp2_gradients.unreduced_gradients_of(managed)
            ]
            if gradients:
                self._note(name, _torch.abs_max(list(map(_torch.local_of, gradients))))
        whole = state.replicated.waiting() if state.replicated is not None else []
        for dtype in {gradient.dtype for gradient in whole}:
            self._note(NOT_SHARDED, _torch.abs_max([g for g in whole if g.dtype == dtype]))

    def _look(self, label: str | None, buffer: torch.Tensor) -> None:
        """One buffer of gradients right before its reduction."""
        if buffer.numel():
            norm = torch.linalg.vector_norm(buffer, float("inf"))
            self._note(NOT_SHARDED if label is None else label, norm)

    @torch.no_grad()
    def _note(self, label: str, norm: torch.Tensor) -> None:
        """Keep the number of the first microbatch with a norm that is not finite; on the device."""
        first = self._first[self._labels.index(label)]
        first.copy_(torch.where(torch.isfinite(norm) | (first != 0), first, self.microbatch))

    def _describe(self) -> str:
        """Who has seen what, the same text on all ranks; empty if it was cleared since. Collective over the world."""
        state = self._watched()
        mine = dict(zip(self._labels, self._first.tolist(), strict=True))
        flagged = {label: number for label, number in mine.items() if number}
        gradients = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
        names = [n for n, own in gradients.items() if not bool(torch.isfinite(_torch.local_of(own)).all())]
        found = gather((flagged, names))
        bad = list(dict.fromkeys(name for _, named in found for name in named))
        if not bad:  # zero_grad after an error
            self._first.zero_()
            return ""
        lines = []
        for label in self._labels:
            where = [f"rank {r} (microbatch {f[label]})" for r, (f, _) in enumerate(found) if label in f]
            if where:
                whole = {name for name, plan in state.plans.items() if plan.storage.is_whole}
                named = ", ".join(_named(bad, label, self._labels, whole))
                named = f"{label} ({named})" if label == NOT_SHARDED and named else named
                lines.append(f"{named or label or 'the root unit'}: {', '.join(where)}")
        return message(
            "gradients with NaN or infinity: " + "; ".join(lines),
            expected="finite gradients on every rank",
            why="The reduction spreads them to all ranks",
            fix="look at these ranks' data, or at the loss scale; zero_grad() and go on skips the step",
        )


def _named(names: Iterable[str], label: str, labels: list[str], whole: set[str]) -> list[str]:
    """Return the names that belong to a unit and to no unit in it, or those of parameters that stay ``whole``."""
    prefix = f"{label}." if label else ""
    inner = tuple(f"{u}." for u in labels if u not in (NOT_SHARDED, label) and u.startswith(prefix))
    own = [
        name for name in names if name.startswith(prefix) and not name.startswith(inner) and name not in whole
    ]
    if label == NOT_SHARDED:
        own = [name for name in names if name in whole]
    return [*own[:MOST], f"and {len(own) - MOST} more"] if len(own) > MOST else own
