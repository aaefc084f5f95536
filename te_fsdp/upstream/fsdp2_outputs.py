"""Hooks around the forward and backward of an FSDP2 unit, beyond FSDP2's public hooks; torch 2.11 to 2.15."""

# [Note: hooks of outputs] FSDP2 all-gathers a unit for backward in hooks on the tensors of its output. It
# finds them with ``torch.utils._pytree``. The first module that runs forward becomes the root of all modules
# in it.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.upstream.fsdp2_units import fsdp_state_of
from te_fsdp.upstream.torch_dtensor import flatten

if TYPE_CHECKING:
    from torch import nn

#: Leaves of an output that contain no tensors.
_TENSORLESS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
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


def is_bound_to_root(unit: nn.Module) -> bool:
    """Return whether FSDP2 has chosen the root of a unit, as it does in the first forward (``FSDPState._is_root``)."""
    return unit._get_fsdp_state()._is_root is not None  # type: ignore[operator]


def make_root(unit: nn.Module) -> None:
    """Make a unit the root of all units in it (``FSDPState._lazy_init``). Local operation."""
    # Call it before a unit inside of it runs forward on its own. FSDP2 would make the inner unit a root and
    # later reject the model.
    fsdp_state_of(unit)._lazy_init()
