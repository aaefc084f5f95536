"""CUDA graphs without a GPU: the operations of a capture, run again on the same memory without their Python."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that keeps shape and strides if the original is set to other memory."""
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


class Tape(TorchDispatchMode):
    """A recording: operations with their memory, as the kernels of a graph. Python runs in the capture only.

    As a capture, it leaves memory that was there before unchanged, and refuses to read values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reused: list[torch.Tensor] = []  #: Results of other recordings whose memory this one may use
        self._calls: list[Callable[[], Any]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._resize = torch.UntypedStorage.resize_
        self._waits = False  # gloo's own operations run when the caller waits: they belong to the collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it."""
        if any(item not in _PLAIN for item in types):
            return NotImplemented  # its own operations follow
        # Ranks agree on integers on the CPU, which a capture on a GPU does not contain either.
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        if self._waits:
            return func(*args, **kwargs)
        given = tree_map_only(torch.Tensor, _alias, (args, kwargs))
        for value, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value) if written or func.namespace == "c10d" else ():
                if isinstance(tensor, torch.Tensor):
                    self._keep(tensor.untyped_storage())
        result = func(*args, **kwargs)
        is_view = any(
            item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns
        )
        if is_view or func.overloadpacket in (torch.ops.aten.set_, torch.ops.aten.empty):
            return result
        outputs = [_alias(item) for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        known = {
            item.untyped_storage()._cdata for item in tree_leaves(given) if isinstance(item, torch.Tensor)
        }
        self._made |= {item.untyped_storage()._cdata for item in outputs} - known

        def again() -> None:
            outcome = func(*given[0], **given[1])
            for work in tree_leaves(outcome) if func.namespace == "c10d" else ():
                if isinstance(work, torch.ScriptObject):
                    dist.Work.unbox(work).wait()
            new = [item for item in tree_leaves(outcome) if isinstance(item, torch.Tensor)]
            for held, tensor in zip(outputs, new, strict=True):
                if func.namespace == "_c10d_functional":
                    tensor = torch.ops._c10d_functional.wait_tensor(tensor)
                if held.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
                    held.copy_(tensor)

        self._calls.append(again)
        return result

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._made and key not in self._before:
            self._before[key] = storage, storage.clone()

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Capture what the context runs."""
        from te_fsdp.emulation import tex

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            self._calls.append(lambda: self._resize(storage, size))
            return self._resize(storage, size)

        stock_wait = dist.Work.wait

        def wait(work: Any, *args: Any) -> Any:
            self._waits = True
            try:
                return stock_wait(work, *args)
            finally:
                self._waits = False

        draws = torch.get_rng_state()
        try:
            with (
                mock.patch.object(tex, "_disable_current_modes", contextlib.nullcontext),
                mock.patch.object(torch.UntypedStorage, "resize_", resize),
                mock.patch.object(dist.Work, "wait", wait),
                self,
            ):
                yield
        finally:
            torch.set_rng_state(draws)
            for storage, before in self._before.values():
                if storage.size() == before.size():
                    storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations."""
        for tensor in self.reused:
            tensor.fill_(math.nan)
        for call in self._calls:
            call()

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is that of the recording, and not of what it reads."""
        return tensor.untyped_storage()._cdata in self._made


class TapeRecorder:
    """Records on the CPU, for ``graphed_step`` and ``graphed_units``.

    The pool of CUDA graphs reuses the memory of results without references for later recordings. Here their replays
    fill the gradients of such backwards with NaN.
    """

    def __init__(self) -> None:
        self._gradients: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    def on_own_stream(self) -> Any:
        """Do nothing, because there are no streams."""
        return contextlib.nullcontext()

    def record(self, call: Callable[[], Any]) -> tuple[Tape, Any]:
        """Capture a function."""
        tape = Tape()
        with tape.capture():
            result = call()
        kept = {
            local.untyped_storage()._cdata for each, _ in self._gradients if (local := each()) is not None
        }
        tape.reused = [
            memory
            for each, memory in self._gradients
            if each() is None and memory.untyped_storage()._cdata not in kept
        ]
        if getattr(call, "__name__", "") == "_backward":
            locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in result if tensor is not None]
            self._gradients += [(weakref.ref(one), _alias(one)) for one in locals_ if tape.has_made(one)]
        return tape, result


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let steps that are created in the context record: on the CPU by :class:`TapeRecorder`, on GPUs by CUDA graphs."""
    import harness

    from te_fsdp.features import graphed_step

    if harness.device_type() != "cpu":
        yield
        return
    with mock.patch.object(graphed_step, "recorder_for", lambda *_: TapeRecorder()):
        yield
