"""What FSDP2 does around forward and backward of a unit, where its public hooks do not suffice; torch 2.11 to 2.15.

FSDP2 gathers a unit for backward in hooks on the tensors of its output, which it finds by ``torch.utils._pytree``. The
first module that runs forward becomes the root of all modules in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.upstream.fsdp2_units import FSDP_STATE, fsdp_parameter_groups, fsdp_state_of
from te_fsdp.upstream.torch_dtensor import flatten

if TYPE_CHECKING:
    from torch import nn

#: Leaves of an output that hold no tensors.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
#: How many objects of an output are searched.
_MOST = 10_000


def opaque_in(output: Any) -> list[Any]:
    """Return the objects in an output that ``torch.utils._pytree`` does not look into."""
    if isinstance(output, torch.Tensor):
        return []
    return [leaf for leaf in flatten(output)[0] if not isinstance(leaf, (torch.Tensor, *_PLAIN))]


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an output: in containers, dataclasses and attributes of other objects."""
    waiting, seen = [output], set[int]()
    while waiting and len(seen) < _MOST:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen and not isinstance(item, (*_PLAIN, type, torch.nn.Module, Callable)):
            seen.add(id(item))
            waiting.extend(_held_by(item))


def _held_by(item: Any) -> list[Any]:
    """Return what an object contains: items, attributes, slots."""
    held = []
    if isinstance(item, Mapping):
        held += item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        held += item
    held += getattr(item, "__dict__", {}).values()
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            held.append(getattr(item, slot, None))
    return held


def gather_in_backward_of(unit: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Let FSDP2 gather a unit in the backward of these outputs (``FSDPState._register_pre_backward_hook``). Local."""
    fsdp_state_of(unit)._register_pre_backward_hook(tensors)


def before_backward(unit: nn.Module, call: Callable[[], None]) -> None:
    """Call something before FSDP2 gathers a unit for backward (``FSDPParamGroup.pre_backward``). Local operation."""
    for group in fsdp_parameter_groups(unit):
        group.pre_backward = functools.partial(_call_first, call, group.pre_backward)


def _call_first(call: Callable[[], None], stock: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.compiler.is_compiling():
        call()
    return stock(*args, **named)


def is_bound_to_root(unit: nn.Module) -> bool:
    """Return whether FSDP2 has chosen the root of a unit, as it does in the first forward (``FSDPState._is_root``)."""
    return (unit.__dict__.get(FSDP_STATE) or fsdp_state_of(unit))._is_root is not None


def choose_root(unit: nn.Module) -> None:
    """Let FSDP2 take a unit for the root of all units in it (``FSDPState._lazy_init``). Local operation.

    Before a unit inside of it runs forward on its own, which FSDP2 would take for a root, and refuse the model later.
    """
    fsdp_state_of(unit)._lazy_init()
