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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common
from torch.profiler import record_function

from te_fsdp.upstream.fsdp2_reduce import copy_in
from te_fsdp.upstream.fsdp2_units import GROUP, fsdp_parameter_groups, fsdp_state_of, record_of_group
from te_fsdp.upstream.torch_autograd import function_transform
from te_fsdp.upstream.torch_dtensor import backward_id, flatten

#: Whether compiled autograd runs (torch before 2.13); always false in later versions.
_compiles_autograd: Callable[[], bool] = getattr(_fsdp_common, "compiled_autograd_enabled", bool)
_no_range = torch._C._profiler._RecordFunctionFast
_is_profiling: Callable[[], bool] = torch.autograd._profiler_enabled

#: Arguments and outputs of a forward that contain no tensors.
_TENSORLESS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)


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


def shorten_hooks(unit: nn.Module) -> None:
    """Replace FSDP2's hooks of a unit by shorter ones. Call this before other replacements. Local operation."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    state.containers = {}  # records of the caller's containers among the arguments of the running forward
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
    for group in fsdp_parameter_groups(unit):
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
    if around := {"_pre_forward": pass_containers, "_post_forward": restore_containers}.get(hook.__name__):
        stock = around(stock)
    return torch._dynamo.disable(stock, recursive=True) if is_disabled else stock


# [Note: containers of a caller] FSDP2 passes copies of lists, dicts and dataclasses among a unit's arguments to
# forward, with moved, cast or watched tensors in them. Items that forward adds or replaces (auxiliary losses, caches
# of keys) would be lost without an error. So forward gets the caller's containers. They contain FSDP2's tensors until
# it ends or raises. New items are outputs, for which FSDP2 all-gathers the unit in backward. The state has the
# containers, because hooks of users may replace the arguments.
#: Id of a container of the caller -> the container, and id of an item of FSDP2 -> that item, and the caller's item
_Records: TypeAlias = "dict[int, tuple[Any, dict[int, tuple[Any, Any]]]]"


def pass_containers(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_pre_forward`` so that the arguments that it returns contain the caller's lists and dicts."""

    @functools.wraps(stock)
    def pre_forward(state: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if state.containers:  # left by a forward that raised, or a recompute that stopped early
            _restored(state.containers)
        new_args, new_kwargs = stock(state, module, args, kwargs)
        found: _Records = {}
        state.containers = found
        # Recomputes add no outputs, and may stop before the end of forward.
        if new_args is args and new_kwargs is kwargs and backward_id() != -1:
            return new_args, new_kwargs
        for place, value in enumerate(args):
            if type(value) not in _TENSORLESS and not isinstance(value, torch.Tensor):
                merged = _merged(value, new_args[place], found)
                new_args = (*new_args[:place], merged, *new_args[place + 1 :])
        for name, value in kwargs.items():
            if type(value) not in _TENSORLESS and not isinstance(value, torch.Tensor):
                new_kwargs[name] = _merged(value, new_kwargs[name], found)
        return new_args, new_kwargs

    return pre_forward


def _merged(old: Any, new: Any, found: _Records) -> Any:
    """Return ``new``, FSDP2's copy of ``old``, with the containers of ``old``, which get FSDP2's items.

    ``found`` gets a record of each container.
    """
    result, items, is_container = old, dict[int, tuple[Any, Any]](), isinstance(old, (list, dict, deque))
    if not is_container and hasattr(old, "__dataclass_fields__") and hasattr(old, "__dict__"):
        old, new, is_container = vars(old), {**vars(old), **vars(new)}, True
    if id(old) in found:
        return result
    if is_container:
        found[id(old)] = old, items
        for key, item in list(old.items() if isinstance(old, dict) else enumerate(old)):
            merged = item if type(item) in _TENSORLESS else _merged(item, new[key], found)
            items[id(merged)] = merged, item
            if merged is not item:
                old[key] = merged
        return result
    if not isinstance(old, tuple) or type(old) is torch.Size:
        return new
    merged = [_merged(*pair, found) for pair in zip(old, new, strict=True)]
    return type(new)(*merged) if hasattr(new, "_fields") else type(new)(merged)


def restore_containers(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``_post_forward`` so that it restores the caller's items. Items that forward added stay."""

    @functools.wraps(stock)
    def post_forward(state: Any, module: nn.Module, args: Any, output: Any) -> Any:
        added = None
        if state.containers:
            added, state.containers = _restored(state.containers), {}
        if added and torch.is_grad_enabled() and backward_id() == -1:
            state._register_pre_backward_hook(
                [tensor for tensor in tensors_in(added) if tensor.requires_grad]
            )
        return stock(state, module, args, output)

    return post_forward


def restore_after_exception(units: Iterable[nn.Module]) -> None:
    """Restore the items of the caller's lists and dicts after a forward that raised. Local operation.

    Args:
        units: The units of the model, inner ones first.
    """
    for unit in units:
        _restored(fsdp_state_of(unit).containers)
        fsdp_state_of(unit).containers = {}


def _restored(found: _Records) -> list[Any]:
    """Restore the caller's items of the containers that :func:`_merged` recorded. Return the items that are new."""
    added: list[Any] = []
    for container, items in found.values():
        for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if id(item) in items:
                container[key] = items[id(item)][1]
            else:
                added.append(item)
    return added


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
            type(value) not in _TENSORLESS
            and backward_id() == -1
            and not (type(value) in (list, tuple) and _TENSORLESS.issuperset(map(type, value)))
        ):
            return stock(args, kwargs)
    if not indices:
        return args, kwargs
    watched = _PostBackward.apply(group, *[values[index] for index in indices])
    for index, value in zip(indices, watched, strict=True):
        values[index] = value
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


# --- tensors in outputs


# [Note: hooks of outputs] FSDP2 all-gathers a unit for backward in hooks on the tensors of its output. It
# finds them with ``torch.utils._pytree``.

#: How many objects of an output are searched.
_MAX_OBJECTS = 10_000


def opaque_in(output: Any) -> list[Any]:
    """Return the leaves of an output in which tensors may be hidden."""
    if isinstance(output, torch.Tensor):
        return []
    return [leaf for leaf in flatten(output)[0] if not isinstance(leaf, (torch.Tensor, *_TENSORLESS))]


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: in containers, dataclasses and attributes of other objects."""
    waiting, seen = [output], set[int]()
    while waiting and len(seen) < _MAX_OBJECTS:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if id(item) in seen or isinstance(item, (*_TENSORLESS, type, torch.nn.Module, Callable)):
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        # Subclasses of containers may have attributes too.
        waiting += getattr(item, "__dict__", {}).values()
        for kind in type(item).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            waiting += [getattr(item, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots)]


def gather_in_backward_of(unit: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Let FSDP2 all-gather a unit in the backward of these outputs (``_register_pre_backward_hook``). Local."""
    fsdp_state_of(unit)._register_pre_backward_hook(tensors)
