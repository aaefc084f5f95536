"""Tensors in the outputs of an FSDP2 unit; torch 2.11 to 2.15."""

# [Note: hooks of outputs] FSDP2 all-gathers a unit for backward in hooks on the tensors of its output. It
# finds them with ``torch.utils._pytree``.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from te_fsdp.upstream.fsdp2_units import fsdp_state_of
from te_fsdp.upstream.torch_dtensor import flatten

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
