"""``report_nan``: report where gradients became NaN or infinite, before the values spread.

    backward     right before a unit's gradients are reduced: one norm of the buffer, on the device
    no_sync      right before the next forward: one norm per unit of the accumulated gradients
    step         one flag per unit is read, and an all-reduce of one number combines the ranks
    a new step   the record is cleared: after a step, or when a forward finds that all gradients were cleared

:func:`report_nan` attaches the component :class:`NanReport`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from te_fsdp.collectives.agreement import gather, maximum
from te_fsdp.collectives.redistribute import GradComm
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.component import Component
from te_fsdp.errors import GradientError, OrderError, PlacementError, message, shorten
from te_fsdp.features.replicated_gradients import ReplicatedGradients
from te_fsdp.sharded_model import ShardedModel, get_sharded_model, shard_of
from te_fsdp.unit_communication import set_unit_grad_comm
from te_fsdp.upstream import fsdp2_gradients as _fsdp2_gradients, torch_dtensor as _torch

_log = logging.getLogger("te_fsdp")

#: Label of the gradients of parameters that FSDP2 does not manage.
NOT_SHARDED = "parameters that are not sharded"
#: Largest number of parameters that a message names.
MOST = 8


def report_nan(model: nn.Module, *, action: str = "raise") -> NanReport:
    """Start to watch the gradients of a sharded model for NaN and infinity. Collective over the model's ranks.

    Every optimizer step, and every norm of :func:`te_fsdp.clip_grad_norm_`, first checks whether any rank has seen one
    since the previous step. Costs one pass over each gradient buffer on the device, a few kernels per unit and
    microbatch, and one all-reduce of one number per step over the world.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on.
        action: ``"raise"``: :class:`GradientError` on all ranks before the step; ``"log"``: a warning on each rank, and
            the step runs.

    Returns:
        The report, with ``check()`` for loops that do not step an optimizer of torch, and ``remove()``.

    Raises:
        CollectiveError: Some ranks do not call it.
        OrderError: The model is not sharded, or has a report already.
        PlacementError: The action is unknown.
    """
    if action not in ("raise", "log"):
        raise PlacementError(
            "report_nan: action",
            expected='"raise" or "log"',
            got=repr(action),
            fix='action="raise", the default',
        )
    state = get_sharded_model(model)
    if state is None or state.components.get(NanReport) is not None:
        raise OrderError(
            f"report_nan({type(model).__name__})",
            expected="the model that te_fsdp.fully_shard was called on, once",
            got="a model that is not sharded" if state is None else "a model that has a report",
            fix="call te_fsdp.fully_shard first, and remove() on an earlier report",
        )
    # Its checks are collective, so a report of some ranks only would wait in the first step.
    with collective_call("report_nan", state.meshes.device_mesh):
        return NanReport(state, action)


# [Note: when the device is read] Nothing waits for the device until the step, or until a norm is computed for
# clipping. Parameters are searched only then, and only if a rank has seen such a value. A reduction spreads
# NaN over ranks, but not over parameters.
class NanReport(Component):
    """Watches the gradients of one model.

    Attributes:
        action: ``"raise"`` or ``"log"``.
        microbatch: Number of the current microbatch, from 1; 0 before the first one of a step.
        earlier: In a CUDA graph of one microbatch, the number of microbatches before it, on the device.
    """

    def __init__(self, state: ShardedModel, action: str) -> None:
        self.action, self.microbatch, self._is_checked, self._has_raised = action, 0, False, False
        self.earlier: torch.Tensor | None = None
        self._state = weakref.ref(state)
        self._labels = [*state.modules, NOT_SHARDED]
        self._first = torch.zeros(len(self._labels), dtype=torch.int32, device=state.meshes.device)
        # All reductions of the model use one GradComm, which calls `observer` with each buffer before its
        # reduction.
        if state.sync.comm is None:
            state.sync.comm = GradComm()
        self._comm = state.sync.comm
        for name, unit in state.modules.items():
            set_unit_grad_comm(unit, self._comm, name)
        self._comm.observer = self._check_buffer
        state.components.attach(self)

    def remove(self) -> None:
        """Stop watching. Local operation."""
        self._comm.observer = None
        state = self._state()
        if state is not None:
            state.components.detach(self)

    def check(self) -> None:
        """Check whether any rank has seen NaN or infinity since the previous step.

        Collective over the world: one all-reduce of one number. None if nothing ran since the previous check, and more
        only if a rank has seen one. With ``action="raise"`` all ranks then raise GradientError, which names
        parameters, ranks and microbatches.
        """
        if self._is_checked:
            return
        self._check_unreduced()
        count = self._first.count_nonzero().to(torch.int32)
        # Also without a finding: a collective that only some ranks call would hang.
        maximum(count)
        text = self._describe() if int(count) else ""
        if text and self.action == "raise":
            self._has_raised = True
            raise GradientError(text)
        if text:
            _log.warning("%s", text)
        # The step does not repeat the all-reduce of clipping.
        self._is_checked = True

    def forget(self) -> None:
        """Begin a new step. Local operation.

        te_fsdp calls it after a step, in ``te_fsdp.zero_grad``, and in the next forward after gradients were set to
        ``None``. Gradients that were filled with zeros (``optimizer.zero_grad(set_to_none=False)``) are detected after
        an error that this report has raised. Call this if a loop skips a step for another reason and fills gradients
        with zeros.
        """
        self.microbatch, self._is_checked, self._has_raised = 0, False, False
        self._first.zero_()

    # Phases: before a step, before a norm and after each call of a closure; and after a step.
    check_gradients = check
    finish_step = forget

    def zero_grad(self, parameters: Iterable[torch.Tensor]) -> None:
        """Discard recorded values, as :meth:`forget`."""
        self.forget()

    def _require_state(self) -> ShardedModel:
        state = self._state()
        assert state is not None  # a hook of its model runs
        return state

    def before_forward(self) -> None:
        """Begin a microbatch. Local operation."""
        if torch.is_grad_enabled():
            if self.microbatch and self._are_cleared():
                self.forget()
            # Before the next backward adds to these gradients, so that a finding belongs to its microbatch.
            self._check_unreduced()
            self.microbatch += 1
            self._is_checked = False

    def _are_cleared(self) -> bool:
        """Return whether the gradients of all previous microbatches were cleared, because their step was skipped."""
        state = self._require_state()
        if any(
            True
            for unit in state.modules.values()
            for _ in _fsdp2_gradients.params_with_unreduced_gradients(unit)
        ) or any(unreduced() for unreduced in state.components.unreduced):
            return False
        gradients = (p.grad for p in map(shard_of, state.model.parameters()))
        if not self._has_raised:  # stops at the first one: this runs before each microbatch
            return all(gradient is None for gradient in gradients)
        # Zeros, not only finite values: this rank's NaN may be in another rank's shard of the gradient.
        present = [_torch.local_of(gradient) for gradient in gradients if gradient is not None]
        return not any(bool(gradient.count_nonzero()) for gradient in present)

    def _check_unreduced(self) -> None:
        """Check the gradients of this rank that were accumulated without a reduction."""
        state = self._require_state()
        for name, unit in state.modules.items():
            gradients = [
                g
                for managed in _fsdp2_gradients.params_with_unreduced_gradients(unit)
                for g in _fsdp2_gradients.unreduced_gradients_of(managed)
            ]
            if gradients:
                # One number for all of them, kept on the device: reading it here would wait for the backward.
                self._record(name, _torch.abs_max(list(map(_torch.local_of, gradients))))
        replicated = state.components.get(ReplicatedGradients)
        accumulated = replicated.waiting() if replicated is not None else []
        # foreach kernels take tensors of one dtype.
        for dtype in {gradient.dtype for gradient in accumulated}:
            self._record(NOT_SHARDED, _torch.abs_max([g for g in accumulated if g.dtype == dtype]))

    def _check_buffer(self, label: str | None, buffer: torch.Tensor) -> None:
        """Check one buffer of gradients right before its reduction."""
        if buffer.numel():
            # One number for the buffer: it is not finite if any element is not.
            norm = torch.linalg.vector_norm(buffer, float("inf"))
            self._record(NOT_SHARDED if label is None else label, norm)

    @torch.no_grad()
    def _record(self, label: str, norm: torch.Tensor) -> None:
        """Record the first microbatch with a norm that is not finite, on the device."""
        first = self._first[self._labels.index(label)]
        number = self.microbatch if self.earlier is None else self.earlier + self.microbatch
        # `where` instead of an `if`, which would wait for the device.
        first.copy_(torch.where(torch.isfinite(norm) | (first != 0), first, number))

    def _describe(self) -> str:
        """Return the same report on all ranks, empty if gradients were cleared since. Collective over the world."""
        state = self._require_state()
        mine = dict(zip(self._labels, self._first.tolist(), strict=True))
        flagged = {label: number for label, number in mine.items() if number}
        gradients = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
        names = [n for n, g in gradients.items() if not bool(torch.isfinite(_torch.local_of(g)).all())]
        # All ranks build the report from all findings, so that they raise the same error.
        reports = gather((flagged, names))
        bad = list(dict.fromkeys(name for _, named in reports for name in named))
        if not bad:  # zero_grad after an error
            self._first.zero_()
            return ""
        lines, units = [], [label for label in self._labels if label != NOT_SHARDED]
        replicated = {name for name, plan in state.plans.items() if plan.storage.is_replicated}
        for label in self._labels:
            where = [f"rank {r} (microbatch {f[label]})" for r, (f, _) in enumerate(reports) if label in f]
            prefix = f"{label}." if label else ""
            inner = tuple(f"{unit}." for unit in units if unit != label and unit.startswith(prefix))
            names = [
                n for n in bad if n.startswith(prefix) and not n.startswith(inner) and n not in replicated
            ]
            if label == NOT_SHARDED:
                names = [name for name in bad if name in replicated]
            named = shorten(names, MOST)
            named = f"{label} ({named})" if label == NOT_SHARDED and named else named
            if where:
                lines.append(f"{named or label or 'the root unit'}: {', '.join(where)}")
        return message(
            "gradients with NaN or infinity: " + "; ".join(lines),
            expected="finite gradients on every rank",
            why="The reduction spreads them to all ranks",
            fix="inspect the batches of these ranks and the loss scale. To skip the step, call zero_grad()",
        )
