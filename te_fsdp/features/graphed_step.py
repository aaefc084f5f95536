"""``graphed_step``: a training step recorded into CUDA graphs once, and replayed from then on.

    gradients    forward and backward of all microbatches, reductions, the norm and clipping      one graph
    update       the optimizer's step, with main weights and quantization                         another, or eager

The graphs hold what the device did; of what Python did besides, this runs again around each replay:

    before       inputs and learning rates are copied into place; kept weights are released; a look at whether the model
                 and the optimizer are those of the recording
    between      ``report_nan`` is asked, so that an error leaves weights as they are
    after        versions of parameters are counted up; outputs are copied

and this is what a recording rests on, since it is the same in each step: sync modes and ``last_microbatches`` (compared
with each other, and advanced by eager steps alone), the order and number of microbatches, FSDP2's own bookkeeping (as
after any complete step), the exchanges over the CPU by which ranks agree on orders of reductions (agreed once).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import increment_version

from te_fsdp.collectives.agreement import on_any_rank
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import require_number
from te_fsdp.features.clip_grad_norm import clip_grad_norm_
from te_fsdp.features.graph_checks import (
    Inputs,
    LearningRates,
    Signature,
    Snapshot,
    recorder_for,
    why_not,
    why_step_runs_eagerly,
)
from te_fsdp.features.hfsdp.gradients import averages_of
from te_fsdp.features.main_weights import check_optimizer
from te_fsdp.features.nan_report import NanReport
from te_fsdp.gradient_sync import release_params, require_reduced, zero_grad
from te_fsdp.sharded_model import refuse_in_backward, require_sharded_model
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

T = TypeVar("T")

_log = logging.getLogger("te_fsdp")

#: How many kinds of inputs are recorded, and how often something is recorded anew: loops that change more run eagerly.
MOST_KINDS, MOST_RECORDINGS = 4, 16


class StepOutput(NamedTuple):
    """What a step gives back."""

    output: Any  #: What the function has returned, tensors detached: copies that the next step leaves alone
    #: The gradients' norm before clipping, float32 scalar; ``None`` without ``max_norm``.
    grad_norm: torch.Tensor | None


def graphed_step(
    model: nn.Module,
    optimizer: Optimizer,
    forward_backward: Callable[..., Any],
    *,
    max_norm: float | None = None,
    warmup: int = 3,
    generators: Iterable[torch.Generator] = (),
) -> GraphedStep:
    """Make a training step that is recorded into CUDA graphs and replayed: the host then issues a handful of calls.

    ``forward_backward`` runs forward and backward of all microbatches of a step, as a loop would; the step then
    completes reductions, clips, steps the optimizer and clears gradients. It begins without gradients: those left from
    before are dropped. The first ``warmup`` calls run eagerly, the next one records and replays. Values are those of
    the eager loop bit for bit, but the learning rate of a recorded optimizer is a float32 tensor.

    A recording holds while all is as it was but the values of tensors. Inputs with other shapes, dtypes, structure or
    other values that are not tensors run eagerly once and are then recorded beside the first; a replaced or moved
    parameter, buffer or optimizer state (loading in place replaces none), another training mode, other options of the
    optimizer but the learning rate, ``report_nan``, ``grad_comm`` or ``set_auto_sync`` in another state: recorded anew.
    What the function takes from elsewhere than its arguments, such as a recipe in a closure, is that of the recording:
    pass it as an argument, or call :meth:`GraphedStep.forget`.

    What cannot be recorded runs eagerly, and one line in the log says why: all steps on the CPU, or where the capture
    fails, for example since the function reads a value of the device; the optimizer's step alone where an optimizer
    reads the host (built without ``capturable=True``, TE's FusedAdam over weights with delayed scaling, hooks of other
    libraries).

    Collective over the model's ranks when it records: a meeting, and three all-reduces of one integer. All ranks must
    call it as often, and meet new kinds of inputs in the same call. Otherwise collectives are those of the function
    and of the optimizer.

    Args:
        model: The model that :func:`te_fsdp.fully_shard` was called on, materialised. Call this before the model's
            first backward: a capture fails where autograd has seen the model on another stream.
        optimizer: Over the model's parameters, with main weights and sharded states as it shall have them.
        forward_backward: Gets the arguments of each call, tensors on the model's device; runs forward and backward, of
            microbatches in :func:`te_fsdp.microbatch`, and returns losses or what else is wanted: tensors in tuples,
            lists and dictionaries. Neither steps nor clears gradients. It may scale them by a tensor.
        max_norm: Clip all gradients by :func:`te_fsdp.clip_grad_norm_`.
        warmup: Eager calls before the first recording, at least 1.
        generators: Generators of the device that the function draws from, besides the device's own and those of TE's
            tracker.

    Raises:
        OrderError: A model without sharding state; an optimizer that holds other parameters than the model's.
        ValueError: ``warmup`` or ``max_norm`` out of range.
    """
    require_sharded_model(model, "graphed_step")
    if warmup < 1:
        raise ValueError(f"graphed_step: warmup must be at least 1, got {warmup}")
    if max_norm is not None:
        require_number(
            "graphed_step", "max_norm", max_norm, least=0, fix="max_norm=1.0, or None to clip nothing"
        )
    check_optimizer(model, optimizer)
    return GraphedStep(model, optimizer, forward_backward, max_norm, warmup, tuple(generators))


@dataclass
class _Recording:
    """A step that was recorded for one kind of inputs."""

    signature: Signature
    inputs: Inputs
    gradients: torch.cuda.CUDAGraph  #: Forward, backward, reductions
    output: StepOutput  #: What the function has returned, and the norm: written anew by each replay
    trained: list[torch.Tensor]  #: Parameters that got gradients
    held: list[torch.Tensor]  #: Their gradients, where somebody reads them between the graphs; else empty
    microbatches: int  #: How many ``report_nan`` has counted
    update: torch.cuda.CUDAGraph | None = None  #: The optimizer's step; ``None`` where it runs eagerly


class GraphedStep:
    """A training step of :func:`graphed_step`.

    Attributes:
        why_eager: Why steps are not recorded; empty while nothing stands in the way.
        why_step_eager: Why the optimizer's step is not part of what is recorded; empty while nothing stands in the way.
        recordings: How often a step was recorded.
        replays: How many steps were replayed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        forward_backward: Callable[..., Any],
        max_norm: float | None,
        warmup: int,
        generators: tuple[torch.Generator, ...],
    ) -> None:
        self.why_eager = self.why_step_eager = self._no_update = ""
        self.recordings = self.replays = self._steps = 0
        self._model, self._optimizer, self._call = model, optimizer, forward_backward
        self._max_norm, self._warmup = max_norm, warmup
        self._state = require_sharded_model(model, "graphed_step")
        self._device = self._state.meshes.device
        self._rates = LearningRates(optimizer, self._device)
        self._drop()
        self._recorder = recorder_for(self._device, generators)
        if self._recorder is None:
            self._run_eagerly(f"there are no CUDA graphs on {self._device.type}")

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        """One step with arguments of ``forward_backward``: forward, backward, clipping, update. Collective as these.

        Raises:
            GradientError: ``report_nan`` has seen one; nothing was updated.
            OrderError: As the optimizer's step; a call in backward.
        """
        refuse_in_backward("graphed_step")
        if self._recorder is None:
            return self._eager(args, kwargs)
        leaves, structure = _torch.flatten((args, kwargs))
        with self._recorder.aside():
            return self._aside(leaves, structure)

    def forget(self) -> None:
        """Drop what was recorded: the next call runs eagerly, the one after it records anew. Local operation.

        For changes that te_fsdp cannot see, and to try again what could not be recorded (:attr:`why_eager`). Call it on
        all ranks; and before ``dist.destroy_process_group``, which waits for ever for graphs that hold communication.
        """
        self._drop()
        self._no_update = ""
        if self._recorder is not None:
            self.why_eager = ""

    def _drop(self) -> None:
        self._known: list[Signature] = []
        self._recorded: list[_Recording] = []
        self._snapshot: Snapshot | None = None

    # ----------------------------------------------------------------------------------------------------- eager steps

    def _aside(self, leaves: list[Any], structure: Any) -> StepOutput:
        """A step on the recorder's stream."""
        if self._state.unsharded.gathers or self._state.gathered():
            release_params(self._model)  # of an evaluation: a replay would leave it stale
        if self._snapshot is not None and (what := self._snapshot.changed()):
            _log.info("graphed_step: recorded anew, since this has changed: %s", what)
            self._drop()
        signature = Signature.of(leaves, structure)
        found = next((r for r in self._recorded if r.signature.fits(signature)), None)
        reads_rates = self._step_can_be_recorded() if found is None else found.update is not None
        if reads_rates:
            self._rates.take()
        if found is None and self._may_record(signature):
            found = self._record(signature, Inputs(leaves, structure, self._device), leaves)
        if found is not None:
            return self._replay(found, leaves)
        there = [
            leaf.to(self._device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        output = self._eager(*_torch.unflatten(there, structure))
        self._steps += 1
        if not self._has_run(signature):
            self._known = [*self._known[1 - MOST_KINDS :], signature]
        return output

    def _eager(self, args: Any, kwargs: Any) -> StepOutput:
        zero_grad(self._model)
        output, norm = self._gradients(args, kwargs)
        return StepOutput(output, self._update(norm))

    def _gradients(self, args: Any, kwargs: Any) -> StepOutput:
        """Forward and backward, until nothing is under way on other streams."""
        leaves, structure = _torch.flatten(self._call(*args, **kwargs))
        leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        require_reduced(self._state, "graphed_step")
        for averages in averages_of(self._state.parameters().values()):
            averages.finish()
        # With report_nan it waits: a norm asks for what was seen, on the host.
        norm = self._clip() if self._state.components.get(NanReport) is None else None
        return StepOutput(_torch.unflatten(leaves, structure), norm)

    def _clip(self) -> torch.Tensor | None:
        return None if self._max_norm is None else clip_grad_norm_(self._model, self._max_norm)

    def _update(self, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Clipping, unless that is done, and the optimizer's step; leaves no gradients."""
        norm = self._clip() if norm is None else norm
        with nullcontext() if self._recorder is None or self.why_step_eager else self._rates.in_place():
            self._optimizer.step()
        zero_grad(self._model)
        return norm

    def _run_eagerly(self, why: str) -> None:
        """From now on; says so once."""
        self.why_eager = why
        self._drop()
        _log.warning("graphed_step: steps run eagerly: %s", why)

    def _step_can_be_recorded(self) -> bool:
        """Whether the optimizer's step can be; says once why not."""
        why = self._no_update or why_step_runs_eagerly(self._optimizer)
        if why and why != self.why_step_eager:
            _log.warning("graphed_step: the optimizer's step runs eagerly, beside the graph: %s", why)
        self.why_step_eager = why
        return not why

    # ------------------------------------------------------------------------------------------------------- recording

    def _has_run(self, signature: Signature) -> bool:
        return any(known.fits(signature) for known in self._known)

    def _may_record(self, signature: Signature) -> bool:
        """Whether a kind of inputs is to be recorded now: one that has run, after the first steps."""
        if self.why_eager or self._steps < self._warmup or not self._has_run(signature):
            return False
        why = ""
        if len(self._recorded) == MOST_KINDS:
            why = f"inputs of more than {MOST_KINDS} kinds (shapes, dtypes, or values beside tensors)"
        elif self.recordings == MOST_RECORDINGS:
            why = f"the model or the optimizer has changed after each of {MOST_RECORDINGS} recordings"
        if why:
            self._run_eagerly(why)
        return not why

    def _record(self, signature: Signature, inputs: Inputs, leaves: list[Any]) -> _Recording | None:
        """Record a step, or find out on all ranks that it cannot be. Collective over the model's ranks."""
        with collective_call("graphed_step", self._state.meshes.device_mesh):
            why = why_not(self._optimizer, leaves)
            if on_any_rank(bool(why), self._state.meshes.device_mesh):
                self._run_eagerly(why or "another rank cannot record its step")
                return None
            recording = self._record_gradients(signature, inputs)
            if recording is not None and self._step_can_be_recorded():
                self._record_update(recording)
            self._settle()
        if recording is None:
            return None
        if recording.update is not None and self._state.components.get(NanReport) is None:
            recording.held = []
        self._recorded.append(recording)
        self._snapshot = Snapshot(self._state, None if recording.update is None else self._optimizer)
        self.recordings += 1
        _log.info(
            "graphed_step: recorded, %s", "without the optimizer" if recording.update is None else "whole"
        )
        return recording

    def _record_gradients(self, signature: Signature, inputs: Inputs) -> _Recording | None:
        """The first graph; ``None`` if it failed on any rank. Collective over the model's ranks."""
        args, kwargs = inputs.arguments()
        zero_grad(self._model)
        self._settle()
        report = self._state.components.get(NanReport)
        if report is not None:
            report.forget()
        made = self._on_all_ranks(lambda: self._gradients(args, kwargs))
        if isinstance(made, str):
            self._settle()
            self._run_eagerly(made)
            return None
        replay, output = made
        trained = [p for p in self._state.parameters().values() if p.grad is not None]
        held = [p.grad for p in trained if p.grad is not None]
        count = 0 if report is None else report.microbatch
        return _Recording(signature, inputs, replay, output, trained, held, count)

    def _record_update(self, recording: _Recording) -> None:
        """The second graph, unless it fails on any rank. Collective over the model's ranks."""
        report = self._state.components.get(NanReport)
        if report is not None:
            report.check()  # asked now, it is not asked in the recording
        output, norm = recording.output
        made = self._on_all_ranks(lambda: self._update(norm))
        if isinstance(made, str):
            self._no_update = made
            self._step_can_be_recorded()  # says so
            return
        recording.update, clipped = made
        recording.output = StepOutput(output, clipped)

    def _settle(self) -> None:
        """Leave nothing of a recording, or of the step before one, that a stream could wait for."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)
        for root in self._state.roots():
            _fsdp2.clear_events(root)
        zero_grad(self._model)
        if self._state.gathered():
            release_params(self._model)

    def _on_all_ranks(self, call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T] | str:
        """What was recorded, or why that has failed, here or on another rank. Collective over the model's ranks."""
        assert self._recorder is not None
        made, why = None, "the capture has failed on another rank"
        try:
            made = self._recorder.record(call)
        except Exception as error:
            # Whatever it is: the step runs eagerly then, and raises what is wrong with it.
            lines = str(error).splitlines() or [""]
            why = f"the capture has failed ({type(error).__name__}: {lines[0][:200]})"
        failed = on_any_rank(made is None, self._state.meshes.device_mesh)
        return why if failed or made is None else made

    # -------------------------------------------------------------------------------------------------------- replaying

    def _replay(self, recording: _Recording, leaves: list[Any]) -> StepOutput:
        """One step of a recording."""
        report, norm = self._state.components.get(NanReport), recording.output.grad_norm
        if report is not None:
            report.forget()
        recording.inputs.take(leaves)
        recording.gradients.replay()
        for parameter, gradient in zip(recording.trained, recording.held, strict=False):
            parameter.grad = gradient
        if report is not None:
            report.microbatch = recording.microbatches
            report.check()
        if recording.update is not None:
            recording.update.replay()
            increment_version(recording.trained)
        else:
            norm = self._clip() if norm is None else norm
            self._optimizer.step()
        for parameter in recording.trained if recording.held else ():
            parameter.grad = None
        if report is not None:
            report.forget()
        self.replays += 1
        found, structure = _torch.flatten(tuple(recording.output._replace(grad_norm=norm)))
        copies = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in found]
        return StepOutput(*_torch.unflatten(copies, structure))
