"""What :func:`te_fsdp.graphed_step` needs of the device: streams, CUDA graphs, and inputs at fixed addresses."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from te_fsdp import _te, _torch

__all__ = ["CudaRecorder", "Inputs", "Recorder", "Replay", "Signature", "recorder_for"]

T = TypeVar("T")


class Replay(Protocol):
    """Work of the device that was recorded: ``torch.cuda.CUDAGraph``."""

    def replay(self) -> None:
        """Enqueue it on the current stream, with the addresses that it was recorded with."""
        ...


class Recorder(Protocol):
    """Who records; tests on the CPU bring one of their own."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Work on the recorder's stream, after and before what the current stream has."""
        ...

    def record(self, call: Callable[[], T]) -> tuple[Replay, T]:
        """Record what a function enqueues, without running it; raises what the function or the recording raises."""
        ...


class CudaRecorder:
    """Records into CUDA graphs that share one pool of memory: they must be replayed one after the other.

    Everything runs on one stream of its own, eager steps too: autograd's nodes that add up gradients remember the
    stream on which they were made, and a capture that meets another stream fails.

    Args:
        device: A CUDA device.
        generators: Random number generators besides the device's own and TransformerEngine's.
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
        """See :class:`Recorder`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, call: Callable[[], T]) -> tuple[Replay, T]:
        """See :class:`Recorder`."""
        graph = torch.cuda.CUDAGraph()
        generators = (*_te.random_generators(), *self._generators)
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


def recorder_for(device: torch.device, generators: Sequence[torch.Generator] = ()) -> Recorder | None:
    """The recorder of a device; ``None`` for one that records nothing."""
    return CudaRecorder(device, generators) if device.type == "cuda" else None


@dataclass
class Signature:
    """What of a call's arguments a recording depends on: all but the values of tensors.

    Attributes:
        structure: How the leaves lie in tuples, lists and dictionaries.
        leaves: Of a tensor its shape, dtype and whether it requires a gradient; else the value itself.
    """

    structure: Any
    leaves: list[Any]

    @classmethod
    def of(cls, leaves: list[Any], structure: Any) -> Signature:
        """The signature of flattened arguments."""
        return cls(structure, [_look(leaf) for leaf in leaves])

    def fits(self, other: Signature) -> bool:
        """Whether what was recorded for one holds for the other."""
        return (
            self.structure == other.structure
            and len(self.leaves) == len(other.leaves)
            and all(map(_same, self.leaves, other.leaves))
        )


def _look(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return "tensor", leaf.shape, leaf.dtype, leaf.requires_grad
    return leaf


def _same(mine: Any, other: Any) -> bool:
    """Whether two values are known to be equal: objects that cannot say are not."""
    if mine is other:
        return True
    try:
        return type(mine) is type(other) and bool(mine == other)
    except (RuntimeError, ValueError, TypeError):  # arrays, and dataclasses that hold tensors
        return False


class Inputs:
    """Arguments of a call whose tensors lie at addresses that do not change.

    Args:
        leaves: Flattened arguments; tensors among them are copied.
        structure: Of the arguments.
        device: Where the copies lie.
    """

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
