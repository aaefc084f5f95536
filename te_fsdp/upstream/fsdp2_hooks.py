"""FSDP2's hooks of a unit, with less Python around them. Checked with torch 2.11 to 2.15."""

# [Note: cost of hooks] Five things around a hook cost more than the hook itself. They are replaced on the
# unit's own objects:
#
#     ``torch.cuda.stream``, ``current_stream``   the stream as a context manager in C; the index of the device
#     ``torch.profiler.record_function``     created only while a profiler runs; otherwise a context manager in C
#     ``torch._dynamo.disable(hook)(...)``   created once per hook instead of once per call
#     ``_spmd_no_typecheck`` (torch 2.14)    a context manager in C, if the package spmd_types is not installed
#     ``_register_post_backward_hook``       one loop over flat arguments; nested arguments are left to FSDP2
#
# Private names: ``FSDPState._pre_forward``, ``_post_forward``, ``_pre_backward``, ``_register_pre_backward_hook``,
# ``_training_state``;
# ``FSDPParamGroup.pre_forward``, ``post_forward``, ``pre_backward``, ``post_backward``,
# ``_register_post_backward_hook``; ``foreach_reduce``, ``_get_device_handle``.

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common
from torch.profiler import record_function

from te_fsdp.upstream.fsdp2_containers import TENSORLESS, post_forward, pre_forward
from te_fsdp.upstream.fsdp2_reduce import copy_in
from te_fsdp.upstream.fsdp2_units import GROUP, record_of_group
from te_fsdp.upstream.torch_autograd import function_transform
from te_fsdp.upstream.torch_dtensor import backward_id

#: Whether compiled autograd runs (torch before 2.13); always false in later versions.
_compiles_autograd: Callable[[], bool] = getattr(_fsdp_common, "compiled_autograd_enabled", bool)
_no_range = torch._C._profiler._RecordFunctionFast
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


def profiler_range(name: str) -> Any:
    """Return ``record_function(name)`` while a profiler runs, else a context manager without Python calls."""
    return record_function(name) if _is_profiling() else _no_range(name)


def current_stream(group: Any) -> Any:
    """Return the current stream of a group's device. Without an index torch searches the current device in Python."""
    return group.device_handle.current_stream(group.device.index)


def on_stream(stream: Any) -> Any:
    """Return a context manager that makes a stream the current one, without Python calls. Does nothing on the CPU."""
    return stream if hasattr(stream, "__enter__") else contextlib.nullcontext()


class _Streams:
    """Stream functions of a device (``torch.cuda``) as FSDP2 calls them, with fewer calls."""

    def __init__(self, device: str) -> None:
        self._module = getattr(torch, device)
        self.Event, self.stream = self._module.Event, on_stream

    def current_stream(self) -> Any:
        """Return the current stream of the current device."""
        return self._module.current_stream(self._module.current_device())


@functools.cache
def _substitutes() -> dict[str, Callable[..., Any]]:
    """Return replacements for these names in FSDP2's modules."""
    found: dict[str, Callable[..., Any]] = {
        "record_function": profiler_range,
        "_get_device_handle": functools.cache(_Streams),
        "foreach_reduce_scatter_copy_in": copy_in,
    }
    if not getattr(torch.distributed, "_is_spmd_types_available", bool)():
        # torch's defines and enters a generator that does nothing, in eleven calls.
        found["_spmd_no_typecheck"] = functools.partial(_no_range, "no_typecheck")
    reduce = _substitute(_fsdp_collectives.foreach_reduce.__wrapped__, found)  # type: ignore[attr-defined]
    return {**found, "foreach_reduce": torch.no_grad()(reduce)}


def _substitute(stock: Any, names: Mapping[str, Any]) -> Any:
    """Return a function with other global names. Functions that do not use them are returned unchanged."""
    if names.keys().isdisjoint(stock.__code__.co_names):
        return stock
    scope = {**stock.__globals__, **names}
    function = FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__)
    function.__kwdefaults__ = stock.__kwdefaults__
    return functools.update_wrapper(function, stock)


def shorten_hooks(unit: nn.Module, groups: list[Any]) -> None:
    """Replace FSDP2's hooks of a unit by shorter ones. Call this before other replacements. Local operation."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    state.containers, state.returned_none = [], False  # [Note: containers of a caller]
    # torch searches a weak dictionary in five calls, and a step requests the state several times for each unit.
    unit.__dict__["_get_fsdp_state"] = weakref.ref(state)
    for registered, handle, name in (
        (unit._forward_pre_hooks, "_pre_forward_hook_handle", "_pre_forward"),
        (unit._forward_hooks, "_post_forward_hook_handle", "_post_forward"),
    ):
        key, stock = getattr(getattr(state, handle, None), "id", None), getattr(type(state), name)
        if key in registered and getattr(registered[key], "__func__", None) is stock:
            hook = MethodType(_shortened(stock), state)
            setattr(state, name, hook)  # ``register_fsdp_forward_method`` calls it too
            registered[key] = hook
    _replace(state, "_pre_backward")
    for group in groups:
        for name in ("pre_forward", "post_forward", "pre_backward", "post_backward"):
            _replace(group, name)
        stock = group._register_post_backward_hook
        group._register_post_backward_hook = functools.partial(_register_post_backward, group, stock)


def _replace(owner: Any, name: str) -> None:
    setattr(owner, name, MethodType(_shortened(getattr(type(owner), name)), owner))


@functools.cache
def _shortened(hook: Any) -> Any:
    """Return the function of a hook with the functions of :func:`_substitutes`."""
    inner, names = getattr(hook, "__wrapped__", None), hook.__code__.co_names
    is_disabled = inner is not None and "_dynamo" in names and "disable" in names
    stock = _substitute(inner if is_disabled else hook, _substitutes())
    if around := {"_pre_forward": pre_forward, "_post_forward": post_forward}.get(hook.__name__):
        stock = functools.partial(around, stock)
    return torch._dynamo.disable(stock, recursive=True) if is_disabled else stock


class _PostBackward(torch.autograd.Function):
    """Call a group's ``post_backward`` in the backward of its inputs (FSDP2's ``RegisterPostBackwardFunction``).

    If a backward contains several forwards of the unit, the last call reduces the gradients of all.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.ran = group, -1
        nodes = (group.__dict__.get(GROUP) or record_of_group(group)).post_backwards
        nodes.append(weakref.ref(ctx, nodes.remove))
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        group, ctx.ran = ctx.group, backward_id()
        record, reduces = group.__dict__[GROUP], group.reduce_grads
        if len(record.post_backwards) > 1:
            # Autograd adds the gradients of all forwards. A reduction before would mostly send zeros.
            others = [node for reference in tuple(record.post_backwards) if (node := reference()) is not None]
            record.is_postponed = reduces and any(
                node.ran != ctx.ran and torch._C._will_engine_execute_node(node) for node in others
            )
        if not record.is_postponed:
            group.post_backward()
            return None, *gradients
        group.reduce_grads = False
        try:
            group.post_backward()
        finally:
            group.reduce_grads, record.is_postponed = True, False
        return None, *gradients


def _register_post_backward(
    group: Any, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Run in place of ``_register_post_backward_hook`` for arguments that are tensors or contain none."""
    if _compiles_autograd() or function_transform():
        return stock(args, kwargs)
    if not torch.is_grad_enabled():
        return args, kwargs
    values, indices = [*args, *kwargs.values()], []
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                indices.append(index)
        # A recompute must not watch tensors in containers: their gradients of zero would run the graphs of others.
        elif (
            type(value) not in TENSORLESS
            and backward_id() == -1
            and not (type(value) in (list, tuple) and TENSORLESS.issuperset(map(type, value)))
        ):
            return stock(args, kwargs)
    if not indices:
        return args, kwargs
    watched = _PostBackward.apply(group, *[values[index] for index in indices])
    for index, value in zip(indices, watched, strict=True):
        values[index] = value
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
