"""``UnitRecording``: one unit, recorded as two CUDA graphs.

    before forward       FSDP2 all-gathers into memory at fixed addresses
    forward graph        reads static inputs, to which each call copies its own; outputs are cloned
    before backward      FSDP2 all-gathers again; transposes of quantized weights are copied to fixed addresses
    backward graph       reads static gradients of outputs; gradients of inputs are cloned, those of weights are not
    after backward       autograd accumulates gradients, FSDP2 reduces them

The notes at :class:`UnitRecording` explain memory and streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from te_fsdp.errors import OrderError
from te_fsdp.features.cuda_recorder import CudaRecorder, Inputs
from te_fsdp.features.graph_checks import Buffers, ModuleSnapshot, Signature
from te_fsdp.records import binding_of, param_owners
from te_fsdp.upstream import fsdp2_state as _fsdp2, te as _te, torch_dtensor as _torch, unit_graphs as _graphs
from te_fsdp.upstream.te_derived import derive_columnwise_usage

_CONSTANTS = (bool, int, float, str, type(None))


class NotRecordableError(RuntimeError):
    """A unit cannot be recorded. The text has the reason."""


class Weight(NamedTuple):
    """A parameter of a unit, unsharded."""

    parameter: torch.Tensor
    trained: bool


class Gradient(NamedTuple):
    """A recorded gradient."""

    local: torch.Tensor
    spec: Any = None  #: Spec of a DTensor


class StaticBuffers:
    """Buffers at fixed addresses that the recordings of a model use in turn."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self.recent: list[Any] = []  #: Gradients of weights of the last recorded backwards

    def like(self, use: str, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the buffer for the n-th tensor of a use, with the shape and dtype of ``tensor``."""
        key = use, index, tensor.shape, tensor.dtype
        if key not in self._made:
            self._made[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return self._made[key]


def addresses_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the addresses of a parameter's local tensor; for a quantized one, without derived buffers."""
    local = _torch.local_of(tensor)
    row = _te.format_of(local) if _te.is_quantized(local) else None
    if row is None:
        return (local.data_ptr(),)
    values = [getattr(local, buffer.attribute, None) for buffer in row.buffers if not buffer.is_derived]
    return tuple([0 if value is None else value.data_ptr() for value in values])


# [Note: stand-ins] Autograd's nodes that accumulate gradients store the stream on which they were created. A capture
# that reaches a node of a different stream fails. So the recorded forward uses stand-ins: new leaves over the memory
# of the unsharded parameters. Gradients of stand-ins become those of the parameters.
#
# [Note: memory of graphs] All graphs share one pool. What a forward saves stays allocated until its backward is
# recorded, as in an eager pass. Afterwards the pool reuses this memory, also for later recordings. A graph may
# therefore only be replayed in the order of its recording (:mod:`te_fsdp.features.graphed_units` checks this). Results
# are read without keeping their memory allocated.
#
# [Note: gradients of weights] They are not copied if FSDP2 reduces them next. Reductions may read them while the next
# unit computes, as FSDP2 waits for a reduction at the end of the next unit's backward. So they stay allocated during
# one further recording. If that unit did not run, and before the next forward, a replay waits for the reduction.
# Gradients that wait longer are copied: autograd adds those of several forwards of a unit in one backward, and FSDP2
# reduces a unit whose inputs need no gradient at the end of the backward.
class UnitRecording:
    """Two graphs of one unit for one kind of inputs."""

    def __init__(
        self,
        unit: nn.Module,
        forward: Callable[..., Any],
        signature: Signature,
        inputs: tuple[list[Any], Any],
        recorder: CudaRecorder,
        buffers: StaticBuffers,
        fixed: set[int],
    ) -> None:
        self._held = Inputs(*inputs)
        self.inputs = len(self._held.static)  #: Number of tensors among the inputs
        self.signature = signature  #: Kind of inputs, and the context of the forward
        self.generation = 0  #: Number of the forward pass in which it was recorded
        self.order = 0  #: Its position among the recordings of that pass
        self.unit, self._call, self._recorder, self._buffers = unit, forward, recorder, buffers
        self.trained: list[bool] = []  #: Whether each output requires gradients
        self.weights = [Weight(parameter, parameter.requires_grad) for parameter in unit.parameters()]
        #: Bindings of modules whose parameters stay DTensors while they are unsharded
        self.bindings = [
            binding
            for module in unit.modules()
            if (binding := binding_of(module)) is not None
            and binding.fsdp.is_managed
            and any(isinstance(parameter, DTensor) for parameter in module._parameters.values())
        ]
        self._snapshot = ModuleSnapshot(unit, addresses_of)
        self._fixed = fixed | {address for w in self.weights for address in addresses_of(w.parameter)}
        self._stand_ins: list[torch.Tensor] = []
        self._edges: list[Any] = []
        self._output: tuple[list[Any], Any] = ([], None)
        self._staged: list[tuple[torch.Tensor, str, torch.Tensor]] = []
        self._outputs: list[torch.Tensor] = []
        self._gradients: list[Gradient | None] = []
        self._grad_outputs: list[torch.Tensor] = []
        self._forward_graph: Any = None
        self._backward_graph: Any = None

    @property
    def is_complete(self) -> bool:
        """Return whether the backward is recorded."""
        return self._backward_graph is not None

    def changed(self) -> str:
        """Return what has changed since the recording; empty if nothing has. Local operation, in every forward."""
        return self._snapshot.changed()

    # ---------------------------------------------------------------------------------------------------------- forward

    def record_forward(self) -> None:
        """Record the forward, without running it. Raise the unit's error, or NotRecordableError."""
        versions = _torch.versions_of(self._held.static)
        before = Buffers(self.unit)
        try:
            self._forward_graph, results = self._recorder.record(self._forward)
            if name := before.replaced():
                raise NotRecordableError(f"it replaces the buffer {name}, which must be updated in place")
        except Exception:
            before.restore()
            raise
        if versions != _torch.versions_of(self._held.static):
            raise NotRecordableError("it changes an input in place")
        self._outputs = [_graphs.without_ownership(result) for result in results]

    def _forward(self) -> list[torch.Tensor]:
        args, kwargs = self._held.arguments()
        # The unit runs with new leaves in place of its parameters ([Note: stand-ins]).
        self._stand_ins = []
        for parameter in [weight.parameter for weight in self.weights]:
            trained = parameter.requires_grad
            if isinstance(parameter, DTensor):
                stand_in: Any = _torch.with_local(
                    _torch.local_of(parameter), parameter, requires_grad=trained
                )
            else:
                stand_in = torch.nn.Parameter(parameter.detach(), requires_grad=trained)
            for key, value in parameter.__dict__.items():
                # The unit's code may read attributes of its parameters, such as te_fsdp's records.
                stand_in.__dict__.setdefault(key, value)
            self._stand_ins.append(stand_in)
        by_id = {id(w.parameter): stand_in for w, stand_in in zip(self.weights, self._stand_ins, strict=True)}
        owners = param_owners(self.unit)
        for owner in owners:
            owner.module._parameters[owner.name] = by_id[id(owner.parameter)]  # type: ignore[unsupported-operation]
        given = _torch.flatten((args, kwargs))
        # torch.autocast must not keep casts in the memory of a graph.
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            output = self._call(*args, **kwargs)
        finally:
            torch.set_autocast_cache_enabled(caches)
            for owner in owners:
                owner.module._parameters[owner.name] = owner.parameter
        leaves, structure = _torch.flatten((args, kwargs))
        if structure != given[1] or any(a is not b for a, b in zip(leaves, given[0], strict=True)):
            raise NotRecordableError(
                "it changes a list or dict among its arguments, which a replay would not"
            )
        leaves, structure = _torch.flatten(output)
        # A replay writes to the memory of these tensors. Other values are those of the recording, so only
        # constants are allowed.
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if type(leaf) is not torch.Tensor and not isinstance(leaf, _CONSTANTS):
                raise NotRecordableError(f"it returns {type(leaf).__name__}, which a replay cannot create")
        self._output = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.trained = [tensor.requires_grad for tensor in tensors]
        # ``torch.autograd.grad`` needs these edges of the outputs, not their memory.
        edge_of = torch.autograd.graph.get_gradient_edge
        self._edges = [t if t.is_leaf else edge_of(t) for t in tensors if t.requires_grad]
        return [tensor.detach() for tensor in tensors]

    def apply(self, token: Any, leaves: Sequence[Any]) -> Any:
        """Run the recorded forward; its backward gets ``token``."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        parameters = [weight.parameter for weight in self.weights if weight.trained]
        results = _Replay.apply(token, len(tensors), *tensors, *parameters)
        filled, structure = self._output
        filled = list(filled)
        for index, result in zip(self._places, results, strict=True):
            filled[index] = result
        return _torch.unflatten(filled, structure)

    def replay_forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy inputs, replay, and return copies of the outputs."""
        self._held.take(tensors)
        self._forward_graph.replay()
        return [output.clone() for output in self._outputs]

    # --------------------------------------------------------------------------------------------------------- backward

    def run_backward(
        self, gradients: Sequence[torch.Tensor | None], *, is_alone: bool, is_reduced_next: bool
    ) -> list[Any]:
        """Replay the backward, which the first call records. Return gradients of inputs and parameters.

        ``is_alone``: the running backward contains no other forward of the unit. ``is_reduced_next``: no other replay
        comes before the end of the unit's backward.
        """
        outputs_grad = [g for g, trained in zip(gradients, self.trained, strict=True) if trained]
        if not self.is_complete:
            outputs = [o for o, trained in zip(self._outputs, self.trained, strict=True) if trained]
            self._grad_outputs = [self._buffers.like("output", n, output) for n, output in enumerate(outputs)]
        for static, gradient in zip(self._grad_outputs, outputs_grad, strict=True):
            # Autograd passes None for an output that the loss does not use. The graph reads a tensor.
            static.zero_() if gradient is None else static.copy_(gradient)
        # Each pass derives these buffers again, in new memory. The graph reads those that it was recorded with.
        for local, attribute, staged in self._staged if self.is_complete else ():
            if getattr(local, attribute) is None:
                # FSDP2 unshards a unit once for several of its backwards, and the first one has dropped the buffer.
                derive_columnwise_usage(local)
            value = getattr(local, attribute)
            if value is None:
                raise OrderError(
                    f"graphed_units: a weight without {attribute}, which its recorded backward reads",
                    fix="omit the unit from graphed_units(model, units=...)",
                )
            if value.data_ptr() != staged.data_ptr():
                staged.copy_(value)
        if not self.is_complete:
            self._record_backward()
        inputs = self.inputs
        self._backward_graph.replay()
        results: list[Any] = [g and g.local.clone() for g in self._gradients[:inputs]]
        is_reduced_next = is_reduced_next and _graphs.reduces_gradients(self.unit)
        managed = {id(parameter) for parameter, _ in _fsdp2.unsharded_parameters(self.unit)}
        for weight, gradient in zip(self.weights, self._gradients[inputs:], strict=True):
            if not weight.trained:
                continue
            if gradient is None:
                results.append(None)
                continue
            # The next replays overwrite a gradient that is neither added to .grad nor reduced before.
            stays = weight.parameter.grad is None and not (
                is_reduced_next and id(weight.parameter) in managed
            )
            copies = stays or not is_alone
            local = gradient.local.clone() if copies else gradient.local.detach()
            results.append(local if gradient.spec is None else _torch.dtensor(local, gradient.spec))
        return results

    def _record_backward(self) -> None:
        """Record the backward, without running it. Raise OrderError if it cannot be recorded."""
        restored: list[tuple[Any, str, torch.Tensor]] = []
        for index, (weight, stand_in) in enumerate(zip(self.weights, self._stand_ins, strict=True)):
            local = _torch.local_of(weight.parameter)
            if _te.is_quantized(local):
                restored += self._stage(index, local, _torch.local_of(stand_in))
        del self._buffers.recent[:-1]  # [Note: gradients of weights]
        try:
            self._backward_graph, recorded = self._recorder.record(self._backward)
        except Exception as error:
            raise OrderError(
                "graphed_units: a unit's backward cannot be recorded",
                got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                why="Its forward was recorded, so that it cannot run eagerly any more",
                fix="omit the unit from graphed_units(model, units=...)",
            ) from error
        finally:
            for stand_in, attribute, value in restored:
                setattr(stand_in, attribute, value)
        self._buffers.recent.append(recorded[self.inputs :])
        self._gradients = [None if gradient is None else _recorded(gradient) for gradient in recorded]
        # Later backwards replay the recording, so the autograd graph behind it can be freed.
        self._stand_ins, self._edges = [], []

    def _stage(
        self, index: int, local: torch.Tensor, stand_in: torch.Tensor
    ) -> list[tuple[Any, str, torch.Tensor]]:
        """Copy the buffers of a quantized weight that TE derives in each pass to fixed addresses.

        Return the attributes of the stand-in that must be restored, because units share these buffers.
        """
        if stand_in is not local:
            # The second all-gather, for backward, may have replaced the buffers that the stand-in got in
            # forward.
            stand_in.__dict__.update(local.__dict__)
        row = _te.format_of(local)
        assert row is not None
        replaced: list[tuple[Any, str, torch.Tensor]] = []
        for number, attribute in enumerate(row.attributes):
            value = getattr(local, attribute, None)
            # Memory with a constant address needs no copy.
            if value is None or {value.data_ptr(), value.untyped_storage().data_ptr()} & self._fixed:
                continue
            staged = self._buffers.like(attribute, 100 * index + number, value)
            staged.copy_(value)
            setattr(stand_in, attribute, staged)
            replaced.append((stand_in, attribute, value))
            self._staged.append((local, attribute, staged))
        return replaced

    def _backward(self) -> list[torch.Tensor | None]:
        """Return gradients of all input tensors, then of all weights."""
        tensors = self._held.static + self._stand_ins
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        computed = iter(torch.autograd.grad(self._edges, trained, self._grad_outputs, allow_unused=True))
        return [next(computed) if tensor.requires_grad else None for tensor in tensors]


def _recorded(gradient: torch.Tensor) -> Gradient:
    local = _graphs.without_ownership(_torch.local_of(gradient))
    return Gradient(local, _torch.spec_of(gradient) if isinstance(gradient, DTensor) else None)


class _Replay(torch.autograd.Function):
    """The autograd node of a replayed unit. Its inputs are the unit's inputs and trained parameters."""

    @staticmethod
    def forward(ctx: Any, token: Any, inputs: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.token = token
        outputs = token.recording.replay_forward(tensors[:inputs])
        trained = zip(outputs, token.recording.trained, strict=True)
        ctx.mark_non_differentiable(*[output for output, is_trained in trained if not is_trained])
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[bad-override]
        goes_on = _graphs.goes_on_to_inputs(ctx, ctx.token.recording.inputs)
        return None, None, *ctx.token.backward(grad_outputs, goes_on)
