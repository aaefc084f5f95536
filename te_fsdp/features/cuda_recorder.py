"""``CudaRecorder``: record calls as CUDA graphs, which read tensors at fixed addresses."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from te_fsdp.upstream import te_modules as _te_modules, torch_dtensor as _torch

T = TypeVar("T")


class CudaRecorder:
    """Records CUDA graphs that share one memory pool. They must be replayed one after the other.

    ``generators`` are used in addition to the device's and TransformerEngine's. Tests on the CPU replace this class.
    """

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator] = ()) -> None:
        self._device = device
        # All steps run on this stream, including eager ones. Autograd nodes that accumulate gradients store the stream
        # on which they were created, and a capture that encounters a different stream fails.
        self._stream = torch.cuda.Stream(device)
        self._generators = tuple(generators)
        self._recorded: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # Failed captures stay alive: the pinned memory allocator keeps querying whether they own a stream.
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def on_own_stream(self) -> Iterator[None]:
        """Run on the recorder's stream, after the current stream and before its later work."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Record the kernels that a function enqueues without running them. Raise its error, or the recording's."""
        graph = torch.cuda.CUDAGraph()
        generators = (*_te_modules.random_generators(), *self._generators)
        for generator in generators:
            graph.register_generator_state(generator)
        # A pool's id is valid while a graph recorded into it is alive.
        pool = next((other.pool() for other in self._recorded), None) or torch.cuda.graph_pool_handle()
        failure: Exception | None = None
        result: Any = None
        # Garbage collection during a capture might free device resources, which is not allowed.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            # "thread_local": NCCL's watchdog thread queries its events meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                try:
                    result = call()
                except Exception as error:
                    failure = error  # an error at the end of the capture would hide it
        except Exception as error:
            failure = failure or error
            self._failed.append(graph)
            _torch.end_failed_capture(self._device, pool)
            # Until torch 2.11, generators stay in capture state, and every later draw raises "Offset increment outside
            # graph capture". A successful capture resets them without changing their next draws.
            nothing = torch.zeros((), device=self._device)
            resetting = torch.cuda.CUDAGraph()
            for generator in generators:
                resetting.register_generator_state(generator)
            with torch.cuda.graph(resetting, stream=self._stream, capture_error_mode="thread_local"):
                nothing.zero_()
        finally:
            if collects:
                gc.enable()
        if failure is not None:
            raise failure
        self._recorded.add(graph)
        return graph, result


def capture_failure(error: Exception) -> str:
    """Return the reason to run eagerly after a capture has raised an error."""
    lines = str(error).splitlines() or [""]
    return f"the capture has failed ({type(error).__name__}: {lines[0][:200]})"


def recorder_for(device: torch.device, generators: Sequence[torch.Generator] = ()) -> CudaRecorder | None:
    """Return the recorder of a device; ``None`` if the device does not support recording."""
    return CudaRecorder(device, generators) if device.type == "cuda" else None


class Inputs:
    """Flattened arguments of a call, with tensors copied to fixed addresses, on ``device`` if it is given."""

    def __init__(self, leaves: list[Any], structure: Any, device: torch.device | None = None) -> None:
        self._structure = structure
        # Leaves of their own, since gradients of inputs are computed for them.
        self._held = [
            torch.empty_like(leaf, device=device, requires_grad=leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        self.static = [leaf for leaf in self._held if isinstance(leaf, torch.Tensor)]
        self.take(leaves)

    def arguments(self) -> Any:
        """Return the arguments in their original structure."""
        return _torch.unflatten(self._held, self._structure)

    def take(self, leaves: Sequence[Any]) -> None:
        """Copy the tensors of a further call. The host does not wait for copies from pinned memory."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for static, tensor in zip(self.static, tensors, strict=True):
            # By .data, because autograd may have saved the static input.
            static.data.copy_(tensor.detach(), non_blocking=True)


class LearningRates:
    """Learning rates as device tensors that a recorded step reads. Groups keep their own values."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self._rates: list[tuple[torch.Tensor, Any]] = []

    def take(self) -> None:
        """Copy the groups' current rates. Local operation that enqueues one kernel per changed rate."""
        groups = self._optimizer.param_groups
        for index, group in enumerate(groups):
            value = group["lr"]
            if index == len(self._rates):
                dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
                self._rates.append((torch.empty((), dtype=dtype, device=self._device), None))
            # A recorded kernel has the address of this tensor, so a new rate is written into it.
            rate, previous = self._rates[index]
            if isinstance(value, torch.Tensor):
                rate.copy_(value.detach().reshape(()), non_blocking=True)  # it may be changed in place
                self._rates[index] = rate, None
            elif value != previous:
                rate.fill_(value)
                self._rates[index] = rate, value

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Set these tensors in the groups, for the duration of a context."""
        groups = self._optimizer.param_groups
        # Schedulers and state dicts read numbers from the groups, so the tensors are there during the step
        # only.
        previous = [group["lr"] for group in groups]
        for group, (rate, _) in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, value in zip(groups, previous, strict=True):
                group["lr"] = value
