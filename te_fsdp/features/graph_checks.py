"""What ``graphed_step`` is made of: a device's recordings, what they depend on, what stands in their way."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.collectives.redistribute import comm_of
from te_fsdp.features.nan_report import NanReport
from te_fsdp.lifecycle import parameters_of_optimizer
from te_fsdp.quantized.amax import KEEPS_MAIN_WEIGHTS, quantized_among
from te_fsdp.sharded_model import ShardedModel
from te_fsdp.upstream import te as _te, te_modules as _te_modules, torch_dtensor as _torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

T = TypeVar("T")


# ----------------------------------------------------------------------------------------------------- what has changed


def _addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Where the data of a tensor lie: of a quantized one each of its buffers."""
    local = _torch.local_of(tensor)
    if _te.is_quantized(local):
        return tuple([buffer.data_ptr() for buffer in _te.value_buffers_of(local)])
    return (local.data_ptr(),)


class Snapshot:
    """What a recording, with the step of ``optimizer`` or without, was made with; taken while weights are sharded."""

    def __init__(self, state: ShardedModel, optimizer: Optimizer | None) -> None:
        self._state, self._optimizer = state, optimizer
        self._modules = [(m, tuple(m._modules.values()), m.training) for m in state.model.modules()]
        self._held: list[tuple[dict[Any, Any], Any, torch.Tensor, tuple[int, ...], bool]] = []
        for module, _, _ in self._modules:
            self._watch(module._parameters)
            self._watch(module._buffers)
            # Delayed scaling's scales and histories, which no buffer of the module holds.
            for recipe_state in (_te.delayed_states(module) or {}).values():
                self._watch(vars(recipe_state))
        # By parameter and name: the dictionaries in between are made anew when state dicts are taken.
        self._states = [
            (parameter, name, tensor, _addresses(tensor))
            for parameter, kept in (optimizer.state if optimizer is not None else {}).items()
            for name, tensor in kept.items()
            if isinstance(tensor, torch.Tensor)
        ]
        self._groups, self._settings = self._grouped(), self._set()

    def _watch(self, owner: dict[Any, Any]) -> None:
        for key, tensor in owner.items():
            if isinstance(tensor, torch.Tensor):
                self._held.append((owner, key, tensor, _addresses(tensor), tensor.requires_grad))

    def changed(self) -> str:
        """What is no longer as it was, in words; empty if nothing is. Local operation."""
        if any(
            m.training != training or tuple(m._modules.values()) != children
            for m, children, training in self._modules
        ):
            return "a module, or a module's training mode"
        for owner, key, tensor, addresses, trained in self._held:
            if owner.get(key) is not tensor or tensor.requires_grad != trained:
                return f"{key} is another tensor, or frozen otherwise"
            if _addresses(tensor) != addresses:
                return f"{key} lies elsewhere"
        for parameter, name, tensor, addresses in self._states:
            kept = self._optimizer.state.get(parameter, {}).get(name)  # type: ignore[union-attr]
            if kept is not tensor or _addresses(tensor) != addresses:
                return f"{name} of the optimizer's state is another tensor"
        if self._grouped() != self._groups:
            return "the optimizer's parameters or options"
        return "" if self._set() == self._settings else "a setting of te_fsdp, or hooks of the optimizer"

    def _grouped(self) -> list[Any]:
        """Parameters and options of the optimizer, but for learning rates."""
        found: list[Any] = []
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            found.append([id(parameter) for parameter in group["params"]])
            found += [
                (name, _torch.local_of(value).data_ptr() if isinstance(value, torch.Tensor) else value)
                for name, value in group.items()
                if name not in ("params", "lr")
            ]
        return found

    def _set(self) -> list[Any]:
        comm, report = comm_of(self._state.model), self._state.components.get(NanReport)
        wire = None if comm is None else (comm.dtype, comm.fp32_sum)
        hooks = len(_torch.step_hooks(self._optimizer)) if self._optimizer is not None else 0
        return [self._state.sync.mode, wire, id(report), None if report is None else report.action, hooks]


# ------------------------------------------------------------------------------------------------------ learning rates


class LearningRates:
    """Learning rates as tensors on the device, which a recorded step reads; groups keep what they have been given."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._rates: list[tuple[torch.Tensor, Any]] = []

    def take(self) -> None:
        """Bring the rates that the groups have now. Local operation; enqueues a kernel for each that has changed."""
        groups = self._optimizer.param_groups
        for place, group in enumerate(groups):
            value = group["lr"]
            if place == len(self._rates):
                dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
                self._rates.append((torch.empty((), dtype=dtype, device=self._device), None))
            rate, known = self._rates[place]
            if isinstance(value, torch.Tensor):
                rate.copy_(value.detach().reshape(()), non_blocking=True)  # it may be changed in place
            elif value != known:
                rate.fill_(value)
                self._rates[place] = rate, value

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context the groups have these tensors."""
        groups = self._optimizer.param_groups
        kept = [group["lr"] for group in groups]
        for group, (rate, _) in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(groups, kept, strict=True):
                group["lr"] = value


# -------------------------------------------------------------------------------------------------------------- reasons


def why_not(optimizer: Optimizer, leaves: Sequence[Any]) -> str:
    """Why a step cannot be recorded at all; empty if nothing is known against it. Local operation."""
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        return "an input requires a gradient, which a recording does not hand back"
    main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None and main_parameters.cuts:
        why = why_step_runs_eagerly(optimizer)
        if why:
            return f"gradients that are averaged in the optimizer's step, which runs eagerly: {why}"
    return ""


def why_step_runs_eagerly(optimizer: Optimizer) -> str:
    """Why the step of an optimizer cannot be recorded; empty if nothing is known against it. Local operation."""
    name = type(optimizer).__name__
    # Ours are written to be recorded.
    foreign = [
        hook
        for hook in _torch.step_hooks(optimizer)
        if not str(getattr(hook, "__module__", "")).startswith("te_fsdp.")
    ]
    if foreign:
        return f"{name} has a hook that a recording would not call ({getattr(foreign[0], '__name__', foreign[0])})"
    if _te.is_fused_adam(optimizer):
        if not optimizer.capturable:  # type: ignore[missing-attribute]
            return "FusedAdam was built without capturable=True"
        main_parameters = getattr(optimizer, KEEPS_MAIN_WEIGHTS, None)
        replaced = main_parameters is not None and main_parameters.cuts
        quantized = [local for _, _, local in quantized_among(parameters_of_optimizer(optimizer))]
        if not replaced and any(map(_te.has_delayed_scale, quantized)):
            return (
                "FusedAdam cannot be captured over weights with delayed scaling; torch.optim.AdamW(fused=True, "
                "capturable=True) with te_fsdp.main_weights can"
            )
        return ""
    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD):
        return _why_sgd_runs_eagerly(optimizer)
    if not all("capturable" in group for group in groups):
        return f"{name} has no option capturable"
    return "" if all(group["capturable"] for group in groups) else f"{name} was built without capturable=True"


def _why_sgd_runs_eagerly(optimizer: torch.optim.SGD) -> str:
    """Its fused form alone reads the learning rate on the device, through an operator that DTensor may not know."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if sharded and not _torch.has_rule("_fused_sgd_.tensor_lr"):
        return (
            "SGD reads its learning rate on the host, and this torch has no fused SGD of sharded parameters"
        )
    if all(group.get("fused") for group in optimizer.param_groups):
        return ""
    return "SGD reads its learning rate on the host unless it is built with fused=True"


# ----------------------------------------------------------------------------------------------------------- recording


class CudaRecorder:
    """Records into CUDA graphs that share one pool of memory: they must be replayed one after the other.

    Everything runs on one stream of its own, eager steps too: autograd's nodes that add up gradients remember the
    stream on which they were made, and a capture that meets another stream fails. ``generators`` are those besides the
    device's own and TransformerEngine's. Tests on the CPU bring a recorder of their own.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._generators = tuple(generators)
        self._recorded: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # Failed captures: the allocator of pinned memory goes on asking them whether a stream is theirs.
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the recorder's stream, after and before what the current stream has."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record what a function enqueues, without running it; raises what the function or the recording raises."""
        graph = torch.cuda.CUDAGraph()
        generators = (*_te_modules.random_generators(), *self._generators)
        for generator in generators:
            graph.register_generator_state(generator)
        # The id of a pool is good while a graph lives that was recorded into it; later the allocators refuse it.
        pool = next((other.pool() for other in self._recorded), None) or torch.cuda.graph_pool_handle()
        failure: Exception | None = None
        result: Any = None
        # A collection in the middle may free what belongs to the device: an operation that no capture allows.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            # "thread_local": NCCL's watchdog asks for its events meanwhile, from a thread of its own.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    result = call()
                except Exception as error:
                    failure = error  # what ends the capture would raise hides it
        except Exception as error:
            failure = failure or error
            self._failed.append(graph)
            self._mend(pool, generators)
        finally:
            if collects:
                gc.enable()
        if failure is not None:
            raise failure
        self._recorded.add(graph)
        return graph, result

    def _mend(self, pool: Any, generators: Sequence[torch.Generator]) -> None:
        """Leave the process as before a capture that could not be begun or ended.

        Up to torch 2.11 generators stay in the state of the capture, and every later draw raises "Offset increment
        outside graph capture"; a capture that ends well takes them out of it, without a change of what they draw next.
        """
        _torch.end_failed_capture(self._device, pool)
        nothing = torch.zeros((), device=self._device)
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            nothing.zero_()


def recorder_for(device: torch.device, generators: Sequence[torch.Generator] = ()) -> CudaRecorder | None:
    """The recorder of a device; ``None`` for one that records nothing."""
    return CudaRecorder(device, generators) if device.type == "cuda" else None


class Signature(NamedTuple):
    """What of a call's arguments a recording depends on: all but the values of tensors."""

    structure: Any  #: How the leaves lie in tuples, lists and dictionaries
    #: Of a tensor its shape, dtype and whether it requires a gradient; else the value itself.
    leaves: list[Any]

    @classmethod
    def of(cls, leaves: list[Any], structure: Any) -> Signature:
        """The signature of flattened arguments."""
        looks = [
            ("tensor", leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        return cls(structure, looks)

    def fits(self, other: Signature) -> bool:
        """Whether what was recorded for one holds for the other."""
        return (
            self.structure == other.structure
            and len(self.leaves) == len(other.leaves)
            and all(map(_same, self.leaves, other.leaves))
        )


def _same(mine: Any, other: Any) -> bool:
    """Whether two values are known to be equal: objects that cannot say are not."""
    if mine is other:
        return True
    try:
        return type(mine) is type(other) and bool(mine == other)
    except (RuntimeError, ValueError, TypeError):  # arrays, and dataclasses that hold tensors
        return False


class Inputs:
    """Flattened arguments of a call whose tensors are copied to addresses that do not change, on ``device``."""

    def __init__(self, leaves: list[Any], structure: Any, device: torch.device) -> None:
        self._structure = structure
        self._held = [
            torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self.take(leaves)

    def arguments(self) -> Any:
        """The arguments, of the structure that was given."""
        return _torch.unflatten(self._held, self._structure)

    @torch.no_grad()
    def take(self, leaves: list[Any]) -> None:
        """Copy the tensors of another call in; from pinned memory nothing waits for the copy."""
        for held, leaf in zip(self._held, leaves, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(leaf, non_blocking=True)
