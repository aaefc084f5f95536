"""Tensors in the arguments of a unit, or in its outputs. Checked with torch 2.11 to 2.15."""

# Private names: ``FSDPState._pre_forward``, ``_post_forward``, ``_register_pre_backward_hook``.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from te_fsdp.upstream.fsdp2_units import fsdp_state_of
from te_fsdp.upstream.torch_dtensor import backward_id, flatten

#: Arguments and outputs of a forward that contain no tensors.
TENSORLESS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
)
#: Objects in which no tensors are searched.
_CLOSED = (*TENSORLESS, type, nn.Module, Callable)


# [Note: containers of a caller] FSDP2 passes copies of lists, dicts and dataclasses among a unit's arguments to
# forward, with moved, cast or watched tensors in them. Items that forward adds or replaces (auxiliary losses, caches
# of keys) would be lost without an error. So forward gets the caller's containers. They contain FSDP2's tensors until
# it ends or raises. New items are outputs, for which FSDP2 all-gathers the unit in backward. So are new tensors in
# objects that FSDP2 does not copy (``UserDict``). The state has a record for each running forward of the unit, which
# may call itself. It has the containers, because hooks of users may replace the arguments.
#: Id of a container of the caller -> the container, and id of an item of FSDP2 -> that item, and the caller's item
_Records: TypeAlias = "dict[int, tuple[Any, dict[int, tuple[Any, Any]]]]"


def pre_forward(
    stock: Callable[..., Any], state: Any, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run ``_pre_forward``, and return arguments that contain the caller's lists and dicts."""
    new_args, new_kwargs = stock(state, module, args, kwargs)
    found: _Records = {}
    state.containers.append(found)
    state.returned_none = False
    # Recomputes add no outputs.
    if new_args is args and new_kwargs is kwargs and backward_id() != -1:
        return new_args, new_kwargs
    for place, value in enumerate(args):
        if type(value) not in TENSORLESS and not isinstance(value, torch.Tensor):
            merged = _merged(value, new_args[place], found)
            new_args = (*new_args[:place], merged, *new_args[place + 1 :])
    for name, value in kwargs.items():
        if type(value) not in TENSORLESS and not isinstance(value, torch.Tensor):
            new_kwargs[name] = _merged(value, new_kwargs[name], found)
    return new_args, new_kwargs


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
            merged = item if type(item) in TENSORLESS else _merged(item, new[key], found)
            items[id(merged)] = merged, item
            if merged is not item:
                old[key] = merged
        return result
    if isinstance(old, tuple) and type(old) is not torch.Size:
        merged = [_merged(*pair, found) for pair in zip(old, new, strict=True)]
        return type(new)(*merged) if hasattr(new, "_fields") else type(new)(merged)
    if new is old and torch.is_grad_enabled() and not isinstance(old, (torch.Tensor, *_CLOSED)):
        found[id(old)] = old, {id(tensor): (tensor, tensor) for tensor in tensors_in(old)}
    return new


def post_forward(stock: Callable[..., Any], state: Any, module: nn.Module, args: Any, output: Any) -> Any:
    """Run ``_post_forward``, and restore the caller's items before. Items that forward added stay."""
    found, state.returned_none = state.containers.pop() if state.containers else None, output is None
    if found and (added := _restored(found)) and torch.is_grad_enabled() and backward_id() == -1:
        state._register_pre_backward_hook([tensor for tensor in tensors_in(added) if tensor.requires_grad])
    return stock(state, module, args, output)


def restore_after_exception(unit: nn.Module) -> bool:
    """Restore the caller's items if a forward of a unit without output has raised. Return whether it has. Local."""
    state: Any = unit._get_fsdp_state()  # type: ignore[operator]
    has_ended, state.returned_none = state.returned_none, False
    if not has_ended and state.containers:
        _restored(state.containers.pop())
    return not has_ended


def _restored(found: _Records) -> list[Any]:
    """Restore the caller's items of the containers that :func:`_merged` recorded. Return the items that are new."""
    added: list[Any] = []
    for container, items in found.values():
        if not isinstance(container, (list, dict, deque)):
            added += [tensor for tensor in tensors_in(container) if id(tensor) not in items]
            continue
        for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if id(item) in items:
                container[key] = items[id(item)][1]
            else:
                added.append(item)
    return added


# --- tensors in outputs


# [Note: hooks of outputs] FSDP2 all-gathers a unit for backward in hooks on the tensors of its output. It
# finds them with ``torch.utils._pytree``.

#: How many objects of an output are searched.
_MAX_OBJECTS = 10_000


def opaque_in(output: Any) -> list[Any]:
    """Return the leaves of an output in which tensors may be hidden."""
    if isinstance(output, torch.Tensor):
        return []
    return [leaf for leaf in flatten(output)[0] if not isinstance(leaf, (torch.Tensor, *TENSORLESS))]


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: in containers, dataclasses and attributes of other objects."""
    waiting, seen = [output], set[int]()
    while waiting and len(seen) < _MAX_OBJECTS:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
            continue
        if id(item) in seen or isinstance(item, _CLOSED):
            continue
        seen.add(id(item))
        if isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, (list, tuple, set, frozenset, deque)):
            waiting += item
        # Subclasses of containers may have attributes too.
        waiting += getattr(item, "__dict__", {}).values()
        for kind in type(item).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            waiting += [getattr(item, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots)]


def gather_in_backward_of(unit: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Let FSDP2 all-gather a unit in the backward of these outputs (``_register_pre_backward_hook``). Local."""
    fsdp_state_of(unit)._register_pre_backward_hook(tensors)
