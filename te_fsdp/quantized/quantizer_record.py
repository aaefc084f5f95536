"""The record of te_fsdp on TE's quantizers, which TE copies to every tensor derived from a weight.

Patches of TE's classes let copies of a quantizer keep its record, let tensors reduce their amax over the group of this
record, count quantizations, and let clones have their own scales (``upstream/patches.py``).
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import PATCHES, Replacements, apply_patches, wrapping

#: Attribute of a quantizer: its :class:`QuantizerRecord`.
QUANTIZER_RECORD = "_te_fsdp_quantizer"
#: TE's attribute of a tensor with the process group over which its amax is reduced.
GROUP_ATTRIBUTE = PATCHES["group"].attribute


@dataclass(frozen=True)
class QuantizerRecord:
    """Data of te_fsdp about a quantizer. Copies of the quantizer share it until one of them changes."""

    amax_group: str | None = None  #: Name of the group over which quantizations reduce the amax
    clones_scales: bool = False  #: Whether clones of its tensors have their own scales
    #: Number of quantizations into its tensors, if they are counted. Copies share the list.
    writes: list[int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizerRecord:
        """Return a copy with a separate counter."""
        return replace(self, writes=None if self.writes is None else [*self.writes])

    def __reduce__(self) -> Any:
        """Return an empty dict, readable without te_fsdp. A group name is valid in this process only."""
        return OrderedDict, ()


_UNRECORDED = QuantizerRecord()


def quantizer_record(quantizer: Any) -> QuantizerRecord:
    """Return the record of a quantizer, an empty one if it has none. Local operation."""
    return quantizer.__dict__.get(QUANTIZER_RECORD) or _UNRECORDED


def change_quantizer_record(quantizer: Any, **changes: Any) -> None:
    """Change fields of the record of one quantizer. Later copies of it have them, too. Local operation."""
    apply_patches(GROUP_NAMES)
    quantizer.__dict__[QUANTIZER_RECORD] = replace(quantizer_record(quantizer), **changes)


@wrapping
def copy(self: Any, *, stock: Callable[[Any], Any]) -> Any:
    """Return a copy of a quantizer, with its record. Local operation."""
    new, record = stock(self), self.__dict__.get(QUANTIZER_RECORD)
    if record:
        # TE's copy is made of the constructor's arguments alone.
        new.__dict__[QUANTIZER_RECORD] = record
    return new


def _get_group(self: Any) -> Any:
    """Return the group of the quantizer's name, or the group that TE has set."""
    quantizer = self._quantizer
    record = None if quantizer is None else quantizer.__dict__.get(QUANTIZER_RECORD)
    if not record or record.amax_group is None:
        return self.__dict__.get(GROUP_ATTRIBUTE)
    return _torch.group_by_name(record.amax_group)


def _set_group(self: Any, group: Any) -> None:
    """Store the group that TE sets, unless there is a name. FSDP2's group alone does not have all shards."""
    quantizer = self._quantizer
    record = None if quantizer is None else quantizer.__dict__.get(QUANTIZER_RECORD)
    if not record or record.amax_group is None:
        self.__dict__[GROUP_ATTRIBUTE] = group


@wrapping
def clone(self: Any, *, stock: Callable[[Any], Any]) -> Any:
    """Return a clone of a quantized tensor, with its own scales if it is a weight. Local operation."""
    new, quantizer = stock(self), _te.quantizer_of(self)
    if quantizer is not None and quantizer_record(quantizer).clones_scales:
        _te.clone_scales(new)
    return new


#: They support names of groups. Tensors without one are not affected.
GROUP_NAMES: Replacements = (
    (None, "copy", copy),
    # copy.deepcopy cannot copy a process group. The record contains its name, which the copy looks up.
    (None, "deepcopy", lambda stock: lambda self, memo: with_group(self, None)),
    (None, "group", lambda stock: property(_get_group, _set_group)),
    (None, "clone", clone),
)


def with_group(quantizer: Any, group: Any) -> Any:
    """Return a copy of a quantizer that reduces over ``group``; ``None``: without reduction."""
    new = quantizer.copy()
    _te.set_quantizer_amax_group(new, group)
    return new


# ``tensor._version`` does not count writes through ``.data``, through ``detach()`` or by ``torch._foreach_``
# functions. All of these call ``quantize_`` of a tensor that has a copy of the same quantizer. The copies share one
# counter.
def write_numbers_of(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return numbers that change with each write: versions, plus quantizations. Local operation."""
    # Every step calls it twice, so it makes few calls.
    numbers, local_tensors = _torch.versions_and_locals_of(parameters)
    for index, local in enumerate(local_tensors):
        quantizer = getattr(local, _te.QUANTIZER, None)
        if quantizer is None:
            continue
        record = quantizer.__dict__.get(QUANTIZER_RECORD)
        if not record or record.writes is None:  # a weight of one process
            apply_patches(COUNTED_WRITES)
            change_quantizer_record(quantizer, writes=[0])
        else:
            numbers[index] += record.writes[0]
    return numbers


@wrapping
def quantize_(self: Any, tensor: torch.Tensor, *args: Any, stock: Callable[..., Any], **kwargs: Any) -> Any:
    """Count a write, then quantize into the tensor. Collective as TE's method."""
    count_write(_te.quantizer_of(self))
    return stock(self, tensor, *args, **kwargs)


COUNTED_WRITES: Replacements = ((None, "count", quantize_),)


def count_write(quantizer: Any) -> None:
    """Count one quantization into the tensor of a quantizer; ``None``: a plain tensor."""
    record = None if quantizer is None else quantizer.__dict__.get(QUANTIZER_RECORD)
    if record and record.writes is not None:
        record.writes[0] += 1


def patch_clone_of_scales(tensor: torch.Tensor) -> None:
    """Let clones of a quantized weight, and their clones, have their own scales. Local operation.

    TE's clones share scales (2.18 to 2.20.2). A clone kept by the user (the best weights so far, values to be
    restored) would combine old data with new scales after the next step.
    """
    for part in (tensor, *_te.storage_parts_of(tensor)):
        quantizer = _te.quantizer_of(part)
        if quantizer is not None and not quantizer_record(quantizer).clones_scales:
            # Now, because views that the user takes before the first step need the counter.
            apply_patches(BLOCK_COPIES + COUNTED_WRITES)
            change_quantizer_record(quantizer, clones_scales=True, writes=[0])


# ``weight.copy_(source)`` of two tensors of one TE class copies the bytes and scales that both have (TE 2.20.2). If the
# weight has one scale per square block and the source one per row of a block, the source's scales are wrong for
# columns. te_fsdp stores rowwise data only and derives the columnwise data from it, which would then be wrong too.
# In the reverse direction the weight would keep its previous columnwise data.
def _dispatching(stock: Any) -> Any:
    @classmethod
    @functools.wraps(stock.__func__)
    def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and type(args[0]) is type(args[1]):
            target, source = args[:2]
            quantizer = _te.quantizer_of(target)
            is_ours = quantizer is not None and quantizer_record(quantizer).clones_scales
            if is_ours and target is source:  # TE would take the buffers of both first
                return target
            if is_ours and _te.format_of(target) is not _te.format_of(source):
                target.quantize_(source.dequantize(dtype=torch.float32))
                return target
        return stock.__func__(cls, func, types, args, kwargs)

    return __torch_dispatch__


BLOCK_COPIES: Replacements = ((None, "copy blocks", _dispatching),)
