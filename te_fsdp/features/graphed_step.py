"""``graphed_step``: record a training step into CUDA graphs once, then replay it.

    gradients    forward and backward of all microbatches, reductions, norm and clipping         one graph
                 with ``microbatches=N``: the first, the second, and the last microbatch         three graphs
    update       the optimizer's step with main weights and quantization                         one graph, or eager

The graphs contain the device's work. The following host work runs around each replay:

    before       copy inputs and learning rates to fixed addresses, reshard weights, and check that the model and the
                 optimizer are those of the recording
    between      check ``report_nan``, so that an error leaves the weights unchanged
    after        increment the versions of parameters, copy outputs
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from te_fsdp.collectives.agreement import on_any_rank
from te_fsdp.collectives.rendezvous import collective_call
from te_fsdp.errors import require_integer, require_kind, require_number
from te_fsdp.features.clip_grad_norm import clip_grad_norm_
from te_fsdp.features.cuda_recorder import Inputs, LearningRates, capture_failure, recorder_for
from te_fsdp.features.graph_checks import (
    Buffers,
    OptimizerStates,
    Signature,
    Snapshot,
    addresses_between_microbatches,
    reason_for_eager_step,
    reason_not_recordable,
    require_microbatches,
)
from te_fsdp.features.hfsdp.gradients import averages_of
from te_fsdp.features.main_weights import check_optimizer
from te_fsdp.features.nan_report import NanReport
from te_fsdp.features.param_gather import release_params
from te_fsdp.features.written_weights import update_main_weights_since, weight_versions
from te_fsdp.gradient_sync import microbatch, require_reduced, wait_for_reductions, zero_grad
from te_fsdp.sharded_model import refuse_in_backward, require_sharded_model
from te_fsdp.tensor_version import WeightVersions
from te_fsdp.upstream import fsdp2_state as _fsdp2, torch_dtensor as _torch

T = TypeVar("T")

_log = logging.getLogger("te_fsdp")

#: Maximum number of kinds of inputs, and of recordings. Loops that exceed them run eagerly.
MAX_KINDS, MAX_RECORDINGS = 4, 16


class StepOutput(NamedTuple):
    """Result of a step."""

    #: Output of the function with detached tensors, copied so that the next step does not overwrite it. With
    #: ``microbatches=N`` the list of N outputs.
    output: Any
    #: Gradient norm before clipping, fp32 scalar; ``None`` without ``max_norm``.
    grad_norm: torch.Tensor | None


def graphed_step(
    model: nn.Module,
    optimizer: Optimizer,
    forward_backward: Callable[..., Any],
    *,
    max_norm: float | None = None,
    warmup: int = 3,
    generators: Iterable[torch.Generator] = (),
    microbatches: int | None = None,
) -> GraphedStep:
    """Create a training step that is recorded into CUDA graphs and replayed with few host calls.

    ``forward_backward`` runs forward and backward of all microbatches of a step, as in a loop. The step then completes
    reductions, clips, steps the optimizer and clears gradients. Gradients from before the step are dropped. The first
    ``warmup`` calls run eagerly. The next one records and replays. Results equal the eager loop bit for bit, except
    that a recorded optimizer reads its learning rate as an fp32 tensor.

    A recording is valid while only tensor values change. Inputs with a new signature (shapes, dtypes, structure, or
    values other than tensors) run eagerly once and are then recorded in addition. The step is recorded again
    after a parameter, buffer or optimizer state was replaced or moved (loading in place does neither). So it is after
    a change of the training mode, ``report_nan``, ``grad_comm``, ``set_auto_sync`` or an option of the optimizer. A
    changed learning rate is read without a recording. Values that the function does not get as arguments, such as a
    recipe in a closure, stay those of the recording. Pass them as arguments, or call :meth:`GraphedStep.forget`.

    Steps that cannot be recorded run eagerly, and the reason is logged once. This applies to all steps on the CPU, and
    after a failed capture (for example because the function reads a device value). Only the optimizer's step runs
    eagerly if the optimizer reads host values (without ``capturable=True``, TE's FusedAdam over weights with delayed
    scaling, hooks of other libraries).

    Collective over the model's ranks when it records: a rendezvous and three all-reduces of one integer. All ranks
    must make the same number of calls and pass new kinds of inputs in the same call. Other collectives are those of
    the function and of the optimizer.

    Args:
        model: Materialized model passed to :func:`te_fsdp.fully_shard`. Call this before the model's first backward. A
            capture fails if autograd has run the model on a different stream.
        optimizer: Optimizer over the model's parameters, with main weights and sharded state already set up.
        forward_backward: Gets the arguments of each call, with tensors on the model's device. Runs forward and
            backward of all microbatches in :func:`te_fsdp.microbatch` and returns losses or other values: tensors in
            tuples, lists and dicts. Neither steps nor clears gradients. It may scale gradients by a tensor.
        max_norm: Maximum norm for :func:`te_fsdp.clip_grad_norm_`.
        warmup: Number of eager calls before the first recording, at least 1.
        generators: Device generators of the function, in addition to the device's default and those of TE's tracker.
        microbatches: Number N of microbatches, if ``forward_backward`` runs one only. The step calls it in
            :func:`te_fsdp.microbatch` with ``argument[i]`` of each tensor that has dims, and ``is_first_microbatch`` if
            it has this parameter. The second microbatch is replayed N - 2 times, so graphs do not grow with N.

    Raises:
        OrderError: The model is not sharded, or the optimizer has parameters of other models.
        PlacementError: ``warmup``, ``microbatches`` or ``max_norm`` is out of range, or an argument of a wrong type.
    """
    require_sharded_model(model, "graphed_step")
    require_integer("graphed_step", "warmup", warmup, least=1)
    require_kind("graphed_step", "forward_backward", forward_backward, Callable, expected="a function")  # type: ignore[bad-argument-type]
    require_kind("graphed_step", "generators", generators, Iterable, expected="torch.Generators")
    if max_norm is not None:
        require_number("graphed_step", "max_norm", max_norm, least=0, fix="max_norm=1.0, or max_norm=None")
    check_optimizer(model, optimizer)
    return GraphedStep(model, optimizer, forward_backward, max_norm, warmup, tuple(generators), microbatches)


# [Note: assumptions of a recording] A recording assumes that the following is the same in each step: sync
# modes and ``last_microbatches`` (only compared with each other, and advanced by eager steps only), order and
# number of microbatches, FSDP2's state (as after any complete step), and the order of reductions on which
# ranks agree over the CPU (agreed once).
#
# [Note: graphs of microbatches] With ``microbatches=N`` the first, the second and the last microbatch are
# different device work: the first one all-gathers weights that a strategy keeps and creates gradients, and the
# last one reduces what the others have accumulated. The second one leaves all gradients and weights at the
# addresses at which it found them (compared after its capture), so its replays can follow each other. A stream
# under capture must not wait for an event of a different capture. So each graph waits for its reductions at its end.
class _MicrobatchGraph(NamedTuple):
    """The graph of one microbatch's forward, backward and reductions, or of all microbatches."""

    graph: torch.cuda.CUDAGraph
    output: Any  #: Output of the function, overwritten by each replay
    forwards: int  #: Number of microbatches counted by ``report_nan``


@dataclass
class _Recording:
    """A recorded step for one kind of inputs."""

    signature: Signature
    inputs: Inputs  #: Inputs of one call of the function
    #: The graph of all microbatches, or those of [Note: graphs of microbatches]
    gradients: list[_MicrobatchGraph]
    norm: torch.Tensor | None  #: Gradient norm, overwritten by each replay
    trained: list[torch.Tensor]  #: Parameters with gradients
    read_between: list[torch.Tensor]  #: Their gradients if they are read between the graphs, else empty
    update: torch.cuda.CUDAGraph | None = None  #: The optimizer's step; ``None`` if it runs eagerly


class GraphedStep:
    """A training step created by :func:`graphed_step`.

    Attributes:
        why_eager: Reason why steps are not recorded; empty if they can be.
        why_step_eager: Reason why the optimizer's step is not recorded; empty if it can be.
        recordings: Number of recordings.
        replays: Number of replayed steps.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        forward_backward: Callable[..., Any],
        max_norm: float | None,
        warmup: int,
        generators: tuple[torch.Generator, ...],
        microbatches: int | None,
    ) -> None:
        self.why_eager = self.why_step_eager = self._update_failure = ""
        self.recordings = self.replays = self._steps = 0
        self._model, self._optimizer, self._call = model, optimizer, forward_backward
        self._max_norm, self._warmup, self._microbatches = max_norm, warmup, microbatches
        if microbatches is not None:
            require_integer("graphed_step", "microbatches", microbatches, least=1)
        self._last = (microbatches or 1) - 1  # number of the last call of the function in a step
        self._takes_first = microbatches is not None and (
            "is_first_microbatch" in inspect.signature(forward_backward).parameters
        )
        self._state = require_sharded_model(model, "graphed_step")
        self._device = self._state.meshes.device
        self._rates = LearningRates(optimizer, self._device)
        self._earlier = torch.zeros((), dtype=torch.int32, device=self._device)  # see NanReport
        self._drop()
        self._recorder = recorder_for(self._device, generators)
        if self._recorder is None:
            self._run_eagerly(f"there are no CUDA graphs on {self._device.type}")

    def __call__(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Run one step with the arguments of ``forward_backward``. Same collectives as the eager step.

        Raises:
            GradientError: ``report_nan`` has a finding. Nothing was updated.
            OrderError: As in the optimizer's step, or for a call in backward.
        """
        refuse_in_backward("graphed_step")
        leaves, structure = _torch.flatten((args, kwargs))
        if self._microbatches is not None:
            require_microbatches(leaves, self._microbatches)
        if self._recorder is None:
            return self._eager(leaves, structure)
        with self._recorder.on_own_stream():
            if self._state.unsharded.gathers or self._state.gathered():
                # Weights unsharded by an evaluation would be stale after a replay.
                release_params(self._model)
            if self._snapshot is not None and (change := self._snapshot.changed()):
                _log.info("graphed_step: recorded again, because of a change: %s", change)
                self._drop()
            signature = Signature.of(leaves, structure)
            recording = next((r for r in self._recorded if r.signature.fits(signature)), None)
            reads_rates = self._step_can_be_recorded() if recording is None else recording.update is not None
            if reads_rates:
                self._rates.take()
            is_warm = self._steps >= self._warmup
            if recording is None and is_warm and not self.why_eager and self._has_run(signature):
                why = ""
                if len(self._recorded) == MAX_KINDS:
                    why = f"inputs of more than {MAX_KINDS} kinds (shapes, dtypes, or non-tensor values)"
                elif self.recordings == MAX_RECORDINGS:
                    why = f"the model or the optimizer has changed after each of {MAX_RECORDINGS} recordings"
                if why:
                    self._run_eagerly(why)
                else:
                    recording = self._record(signature, leaves, structure)
            if recording is not None:
                return self._replay(recording, leaves)
            present = [
                leaf.to(self._device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in leaves
            ]
            output = self._eager(present, structure)
            self._steps += 1
            if not self._has_run(signature):
                # Only the latest kinds, so that memory stays bounded for data with many shapes.
                self._seen_signatures = [*self._seen_signatures[1 - MAX_KINDS :], signature]
            return output

    def forget(self) -> None:
        """Drop all recordings. The next call runs eagerly and the one after it records again. Local operation.

        Use it after changes that te_fsdp cannot detect, and to retry a step that could not be recorded
        (:attr:`why_eager`). Call it on all ranks. Call it before ``dist.destroy_process_group``, which waits forever
        for graphs with collectives.
        """
        self._drop()
        self._update_failure = ""
        if self._recorder is not None:
            self.why_eager = ""

    def _drop(self) -> None:
        self._seen_signatures: list[Signature] = []
        self._recorded: list[_Recording] = []
        self._snapshot: Snapshot | None = None
        self._weights: WeightVersions | None = None  # after the last replay of the optimizer's step

    # ----------------------------------------------------------------------------------------------------- eager steps

    def _eager(self, leaves: list[Any], structure: Any) -> StepOutput:
        zero_grad(self._model)
        outputs = [
            self._run(number, *_torch.unflatten(self._leaves_of(leaves, number), structure))
            for number in range(self._last + 1)
        ]
        return StepOutput(self._combine_outputs(outputs), self._update(self._complete()))

    def _leaves_of(self, leaves: list[Any], number: int) -> list[Any]:
        """Return the arguments of one call: of each tensor its entry for the microbatch, and all other arguments."""
        if self._microbatches is None:
            return leaves
        return [leaf[number] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf for leaf in leaves]

    def _combine_outputs(self, outputs: list[Any]) -> Any:
        return outputs[0] if self._microbatches is None else outputs

    def _run(self, number: int, args: Any, kwargs: Any) -> Any:
        """Call the function: for one microbatch, or for all of them. Return its output with detached tensors."""
        if self._microbatches is None:
            output = self._call(*args, **kwargs)
        else:
            first = {"is_first_microbatch": number == 0} if self._takes_first else {}
            with microbatch(self._model, is_last=number == self._last):
                output = self._call(*args, **kwargs, **first)
        return _map_tensors(torch.Tensor.detach, output)

    def _complete(self) -> torch.Tensor | None:
        """Complete gradients, until no work is pending on other streams. Clip, and return the norm."""
        require_reduced(self._state, "graphed_step")
        for averages in averages_of(self._state.parameters().values()):
            averages.finish()
        # With report_nan the norm is computed later, because it reads the NaN report on the host.
        return self._clip() if self._state.components.get(NanReport) is None else None

    def _clip(self) -> torch.Tensor | None:
        return None if self._max_norm is None else clip_grad_norm_(self._model, self._max_norm)

    def _update(self, norm: torch.Tensor | None) -> torch.Tensor | None:
        """Clip (unless done already), step the optimizer and clear gradients."""
        norm = self._clip() if norm is None else norm
        with nullcontext() if self._recorder is None or self.why_step_eager else self._rates.in_place():
            self._optimizer.step()
        zero_grad(self._model)
        return norm

    def _run_eagerly(self, why: str) -> None:
        """Run all following steps eagerly, and log the reason once."""
        self.why_eager = why
        self._drop()
        _log.warning("graphed_step: steps run eagerly: %s", why)

    def _step_can_be_recorded(self) -> bool:
        """Return whether the optimizer's step can be recorded. Log once if not."""
        why = self._update_failure or reason_for_eager_step(self._optimizer)
        if why and why != self.why_step_eager:
            _log.warning("graphed_step: the optimizer's step runs eagerly, outside of the graph: %s", why)
        self.why_step_eager = why
        return not why

    # ------------------------------------------------------------------------------------------------------- recording

    def _has_run(self, signature: Signature) -> bool:
        return any(earlier.fits(signature) for earlier in self._seen_signatures)

    def _record(self, signature: Signature, leaves: list[Any], structure: Any) -> _Recording | None:
        """Record a step; return ``None`` if some rank cannot. Collective over the model's ranks."""
        with collective_call("graphed_step", self._state.meshes.device_mesh):
            why = reason_not_recordable(self._optimizer, leaves)
            if on_any_rank(bool(why), self._state.meshes.device_mesh):
                self._run_eagerly(why or "a different rank cannot record its step")
                return None
            recording, is_valid = self._record_gradients(signature, leaves, structure), True
            if recording is not None and self._step_can_be_recorded():
                is_valid = self._record_update(recording)
            self._clear_events()
        if recording is None or not is_valid:
            return recording
        if recording.update is not None and self._state.components.get(NanReport) is None:
            # Both graphs are replayed at once: nothing reads gradients between them.
            recording.read_between = []
        self._recorded.append(recording)
        self._snapshot = Snapshot(self._state, None if recording.update is None else self._optimizer)
        self.recordings += 1
        _log.info(
            "graphed_step: recorded, %s",
            "without the optimizer" if recording.update is None else "with the optimizer",
        )
        return recording

    def _record_update(self, recording: _Recording) -> bool:
        """Try to record the optimizer's step; return whether to keep the recording. Collective over the ranks."""
        report, norm = self._state.components.get(NanReport), recording.norm
        states = OptimizerStates(self._optimizer)
        if report is not None:
            report.check()  # a check inside of the recording is then not needed
        recorded, mesh = self._on_all_ranks(lambda: self._update(norm)), self._state.meshes.device_mesh
        changed = states.changed()
        is_created, is_replaced = (on_any_rank(changed == kind, mesh) for kind in ("created", "replaced"))
        if is_replaced and not isinstance(recorded, str):
            recorded = "it replaces the tensors of its state"
        if is_created or isinstance(recorded, str):
            states.restore()
        if isinstance(recorded, str):
            self._update_failure = recorded
            self._step_can_be_recorded()  # logs the reason
        elif not is_created:
            recording.update, recording.norm = recorded
        return isinstance(recorded, str) or not is_created

    def _record_gradients(self, signature: Signature, leaves: list[Any], structure: Any) -> _Recording | None:
        """Record the graphs of gradients; ``None`` if one failed on any rank. Collective over the model's ranks."""
        inputs = Inputs(self._leaves_of(leaves, 0), structure, self._device)
        zero_grad(self._model)
        self._clear_events()
        report = self._state.components.get(NanReport)
        parts, norm, buffers = list[_MicrobatchGraph](), None, Buffers(self._model)

        def run(number: int) -> StepOutput:
            """Run the part of a step that one graph contains ([Note: graphs of microbatches])."""
            before = addresses_between_microbatches(self._state) if 0 < number < self._last else None
            output = self._run(number, *inputs.arguments())
            if name := buffers.replaced():
                raise RuntimeError(f"forward replaces the buffer {name}, which must be updated in place")
            if number == self._last:
                return StepOutput(output, self._complete())
            wait_for_reductions(self._state)
            if before is not None:
                after = addresses_between_microbatches(self._state)
                moved = [name for name in {**before, **after} if before.get(name) != after.get(name)]
                if moved:
                    raise RuntimeError(f"{moved[0]} has a different address after each microbatch")
            return StepOutput(output, None)

        # The first, the middle and the last microbatch differ. All middle ones replay one graph.
        for number in sorted({0, min(1, self._last), self._last}):
            if report is not None:
                report.forget()
                report.earlier = self._earlier
            recorded = self._on_all_ranks(functools.partial(run, number))
            if report is not None:
                report.earlier = None
            if isinstance(recorded, str):
                buffers.restore()
                self._clear_events()
                self._run_eagerly(recorded)
                return None
            graph, (output, norm) = recorded
            parts.append(_MicrobatchGraph(graph, output, 0 if report is None else report.microbatch))
            for root in self._state.roots() if number < self._last else ():
                _fsdp2.clear_events(root)
        trained = [p for p in self._state.parameters().values() if p.grad is not None]
        gradients = [p.grad for p in trained if p.grad is not None]
        return _Recording(signature, inputs, parts, norm, trained, gradients)

    def _clear_events(self) -> None:
        """Clear all events of a recording, or of the step before one, on which a stream could wait."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device.type).synchronize(self._device)
        for root in self._state.roots():
            _fsdp2.clear_events(root)
        zero_grad(self._model)
        if self._state.gathered():
            release_params(self._model)

    def _on_all_ranks(self, call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T] | str:
        """Return the recording, or why it failed on this or another rank. Collective over the model's ranks."""
        assert self._recorder is not None
        recorded, why = None, "the capture has failed on a different rank"
        try:
            recorded = self._recorder.record(call)
        except Exception as error:
            # Catch any error. The step then runs eagerly and raises its own error.
            why = capture_failure(error)
        failed = on_any_rank(recorded is None, self._state.meshes.device_mesh)
        return why if failed or recorded is None else recorded

    # -------------------------------------------------------------------------------------------------------- replaying

    def _replay(self, recording: _Recording, leaves: list[Any]) -> StepOutput:
        """Replay one step of a recording. Collective as the recorded step."""
        report, norm = self._state.components.get(NanReport), recording.norm
        if report is not None:
            report.forget()
        outputs, parts = [], recording.gradients
        for number in range(self._last + 1):
            part = parts[-1] if number == self._last else parts[min(number, 1)]
            recording.inputs.take(self._leaves_of(leaves, number))
            if report is not None:
                self._earlier.fill_(report.microbatch)
                report.microbatch += part.forwards
            part.graph.replay()
            # The next replay writes to the same addresses.
            outputs.append(_map_tensors(torch.Tensor.clone, part.output))
        for parameter, gradient in zip(recording.trained, recording.read_between, strict=False):
            parameter.grad = gradient
        if report is not None:
            report.check()
        if recording.update is not None:
            # [Note: written weights] The graph does not contain it, because it depends on writes by user code.
            update_main_weights_since(self._optimizer, self._weights)
            recording.update.replay()
            # A replay changes memory without the code that counts versions. Autograd would not notice saved
            # tensors that were overwritten.
            increment_version(recording.trained)
            self._weights = weight_versions(self._optimizer, self._weights)
        else:
            norm = self._clip() if norm is None else norm
            self._optimizer.step()
        for parameter in recording.trained if recording.read_between else ():
            parameter.grad = None
        if report is not None:
            report.forget()
        self.replays += 1
        return StepOutput(self._combine_outputs(outputs), None if norm is None else norm.clone())


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    leaves, structure = _torch.flatten(value)
    mapped = [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return _torch.unflatten(mapped, structure)
