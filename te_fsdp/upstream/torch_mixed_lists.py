"""Operators over lists of tensors on several meshes, which torch refuses; torch 2.11 to 2.15.

They are those of ``torch.nn.utils``: ``clip_grad_norm_``, ``get_total_norm``, ``clip_grads_with_norm_``,
``clip_grad_value_`` and ``parameters_to_vector``.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from te_fsdp.upstream.torch_dtensor import count_writes, is_replication_implicit

_aten = torch.ops.aten
#: Operators that run once per mesh. They change or measure each tensor on its own.
_ELEMENTWISE = (
    _aten._foreach_norm.Scalar,  # clip_grad_norm_, get_total_norm
    _aten._foreach_mul_.Tensor,  # clip_grads_with_norm_
    _aten._foreach_clamp_min_.Scalar,  # clip_grad_value_
    _aten._foreach_clamp_max_.Scalar,
)
#: Operators that join the tensors.
_JOINING = (_aten.stack.default, _aten.cat.default)
OPERATORS = (*_ELEMENTWISE, *_JOINING)
#: Computes the factor of clip_grads_with_norm_. With ``foreach=False`` the factor then multiplies single gradients.
#: ``mul_`` itself has no handler, which would run for every multiplication of optimizers.
_FACTOR = _aten.clamp.default

#: Return whether a list concerns an owner, or raise.
Concerns: TypeAlias = Callable[[Any, str, Sequence[torch.Tensor], bool], bool]


class MixedLists:
    """Handlers of the operators (``OpDispatcher._custom_op_handlers``) for the DTensors of owners, such as models."""

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[Any, Concerns] = weakref.WeakKeyDictionary()
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        for operator in OPERATORS:
            handlers.setdefault(operator, self._handle)
        handlers.setdefault(_FACTOR, self._handle_factor)

    def watch(self, owner: Any, concerns: Concerns) -> None:
        """Call ``concerns(owner, operator, tensors, is_mixed)`` before each operator, while the owner exists.

        Mixed lists that concern an owner run once per mesh. Other lists run as without te_fsdp.
        """
        self._owners[owner] = concerns

    def _handle_factor(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Return the factor of clip_grads_with_norm_ as a plain tensor, which multiplies gradients of any mesh."""
        result = run_stock(op, args, kwargs)
        if result.ndim or clipping_arguments() is None:
            return result
        # All of them: several models may have equal meshes.
        owners = list(self._owners.items())
        concerned = [concerns(owner, "clamp", [result], True) for owner, concerns in owners]
        return _full(result) if any(concerned) else result

    def _handle(self, op: Any, args: Any, kwargs: Any) -> Any:
        tensors = [*args[0], *(value for value in args[1:] if isinstance(value, DTensor))]
        is_mixed = len({t.device_mesh if isinstance(t, DTensor) else None for t in tensors}) > 1
        if is_replication_implicit():
            return run_stock(op, args, kwargs)
        name = op.overloadpacket.__name__
        # The newest first: an older model may have equal meshes.
        owners = reversed(list(self._owners.items()))
        concerned = [concerns(owner, name, tensors, is_mixed) for owner, concerns in owners]
        if not is_mixed or not any(concerned):
            return run_stock(op, args, kwargs)
        if op in _JOINING:
            return op([_full(tensor) for tensor in args[0]], *args[1:], **kwargs)
        others = [_full(value) for value in args[1:]]
        by_mesh: dict[Any, list[int]] = {}
        for index, tensor in enumerate(args[0]):
            by_mesh.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(index)
        results: list[Any] = [None] * len(args[0])
        for indices in by_mesh.values():
            part = op([args[0][index] for index in indices], *others, **kwargs)
            for index, result in zip(indices, part or (), strict=bool(part)):
                results[index] = result
        return results if any(result is not None for result in results) else None


#: The handlers of this process.
mixed_lists = functools.cache(MixedLists)


@functools.cache
def support_foreach_copy() -> None:
    """Let ``torch._foreach_copy_`` take DTensors, and count its writes. Local operation, once per process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.setdefault(_aten._foreach_copy_.default, _copy_each)


def _copy_each(op: Any, args: Any, kwargs: Any) -> None:
    """Copy tensor by tensor, because torch 2.11 to 2.15 have no ``_foreach_copy_`` of DTensors. Averages use it."""
    targets, sources, *options = args
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, *options, **kwargs)
    # Below autograd, where this runs, torch counts no writes.
    count_writes(targets)


class ForeachWrites:
    """Handlers that count writes of ``torch._foreach_`` functions to DTensors, while owners such as models need it."""

    # torch counts none below autograd (2.11 to 2.15). Not all the time, because handlers would make each step of
    # torch's optimizers slower.
    def __init__(self) -> None:
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handlers = DTensor._op_dispatcher._custom_op_handlers
        self._replaced: dict[Any, Any] = {}
        self._lock = threading.RLock()  # other threads may step
        mixed_lists()  # its handlers must not come later
        names = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
        packets = [getattr(_aten, name) for name in names if name != "_foreach_copy_"]  # has its own handler
        self._operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]

    def count(self, owner: Any) -> None:
        """Count writes from now on. Local operation."""
        with self._lock:
            self._owners.add(owner)
            if not self._replaced:
                found = {op: self._handlers.get(op) for op in self._operators}
                # An operator that ran meanwhile may have put this handler back.
                self._replaced = {op: None if old == self._handle else old for op, old in found.items()}
                self._handlers.update(dict.fromkeys(self._operators, self._handle))

    def ignore(self, owner: Any) -> None:
        """Undo :meth:`count`. Local operation."""
        with self._lock:
            self._owners.discard(owner)
        self._restore()

    def _restore(self) -> None:
        """Remove the handlers if no owner is left."""
        with self._lock:
            replaced = self._replaced
            if not self._owners:
                self._replaced = {}
                for op, handler in replaced.items():
                    self._handlers.pop(op, None)
                    if handler is not None:
                        self._handlers[op] = handler

    def _handle(self, op: Any, args: Any, kwargs: Any) -> Any:
        result = (self._replaced.get(op) or run_stock)(op, args, kwargs)
        count_writes(args[0])
        if not self._owners:  # the last one was freed
            self._restore()
        return result


#: The handlers of this process.
foreach_writes = functools.cache(ForeachWrites)


def clipping_arguments() -> tuple[float, float] | None:
    """Return max_norm and norm_type (0 if unknown) if torch's clip_grads_with_norm_ runs, not other code's factors."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_clip_grads_with_norm_" and frame.f_globals["__name__"].startswith(
            "torch."
        ):
            outer = frame.f_back and frame.f_back.f_back  # behind the decorator
            norm_type = outer.f_locals.get("norm_type", 0.0) if outer is not None else 0.0
            return frame.f_locals["max_norm"], norm_type
        frame = frame.f_back
    return None


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def run_stock(op: Any, args: Any, kwargs: Any) -> Any:
    """Run torch's own implementation, which it uses for operators without a handler."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op, None)  # another thread may have removed it
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[op] = handler
