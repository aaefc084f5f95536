"""Quantization of sharded weights: amax over all shards, scales, casts.

:func:`quantize_into` writes new values to many weights at once:

    current scaling, hybrids of it     amaxes of all, one max all-reduce per group, all scales, then the casts
    delayed scaling                    casts only; the caller reduces all amaxes (``refresh_quantized``)
    float8-block, MXFP8                casts only, since scales belong to blocks
    NVFP4                              each weight with its own reduction: TE 2.18 to 2.20 cannot use a given amax
    high precision                     rounded
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.lifecycle import Step, runs_if
from te_fsdp.quantized.components import FLOAT8
from te_fsdp.quantized.empty_shards import copy_delayed_scale
from te_fsdp.quantized.quantizer_record import (
    GROUP_ATTRIBUTE,
    QUANTIZER_RECORD,
    change_quantizer_record,
    count_write,
    quantizer_record,
)
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import Replacements, apply_patches, wrapping
from te_fsdp.upstream.te_formats import has_amax_history

#: Key of the main weight in the state of a parameter, as in TransformerEngine's FusedAdam
MAIN = "master_param"


# [Note: name of the amax group] TE 2.20 stores the amax group as an attribute of the tensor object. Every
# ``detach``, ``clone``, view and ``nn.Parameter`` loses it, and every FSDP2 all-gather overwrites it. A
# tensor with this attribute cannot be pickled or deep-copied. te_fsdp stores the *name* of the group on the
# tensor's quantizer, which TE copies to every tensor derived from it. A property then returns the group of
# this name when TE reads the attribute.
def set_amax_group(tensor: torch.Tensor, group_name: str | None) -> None:
    """Set the group over which later quantizations to ``tensor``, or to a copy of it, reduce the amax.

    Local operation. ``None`` removes the process group that TE's all-gather has set. Formats without one scale per
    tensor are not changed.
    """
    if has_amax_group(tensor, group_name):
        return
    tensor.__dict__.pop(GROUP_ATTRIBUTE, None)
    for quantizer in _te.all_one_scale_quantizers(tensor):
        _te.set_quantizer_amax_group(quantizer, None)
        if group_name is not None:
            apply_patches(DELAYED_UPDATES)
            change_quantizer_record(quantizer, amax_group=group_name)


def has_amax_group(tensor: torch.Tensor, group_name: str | None) -> bool:
    """Return whether a tensor still has this group. Always false for hybrids. Every all-gather calls it."""
    quantizer = getattr(tensor, _te.QUANTIZER, None)
    record = None if quantizer is None else quantizer.__dict__.get(QUANTIZER_RECORD)
    return bool(
        group_name is not None
        and record
        and record.amax_group == group_name
        and GROUP_ATTRIBUTE not in tensor.__dict__
        and not getattr(quantizer, _te.REDUCES_AMAX, False)
    )


def amax_group_name(tensor: torch.Tensor) -> str | None:
    """Return the group name set by :func:`set_amax_group`, or ``None``. Local operation."""
    quantizers = _te.one_scale_quantizers(_te.quantizer_of(tensor))
    return quantizer_record(quantizers[0]).amax_group if quantizers else None


# [Note: amax of delayed scaling] Delayed scaling does not read the group. A write stores this rank's amax in
# the history. TE reduces the history at the end of the next forward, over the group of ``te.autocast``. With
# a group name, te_fsdp reduces this amax immediately, so all ranks of a weight always agree.
def reduce_newest_amax(tensors: Iterable[torch.Tensor]) -> None:
    """Reduce the newest amax in the histories of delayed-scaling weights over all shards.

    Collective: one max all-reduce of one float per weight for each named group. The order of weights is the same on
    all ranks. Tensors without a group and those of other formats are not changed.
    """
    by_group: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        quantizer: Any = getattr(tensor, _te.QUANTIZER, None)
        if has_amax_history(type(quantizer)):
            record = quantizer.__dict__.get(QUANTIZER_RECORD)
            if record and record.amax_group is not None:
                # One all-reduce for each group, not for each tensor.
                by_group.setdefault(record.amax_group, []).append(quantizer.amax)
    for name, amaxes in by_group.items():
        reduce_max(amaxes, _torch.group_by_name(name))


def reduce_max(amaxes: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace one-element tensors by their maximum over the ranks of a group, in place.

    Collective: one max all-reduce over ``group``.
    """
    newest = torch.cat([amax.reshape(1) for amax in amaxes])
    dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    for amax, value in zip(amaxes, newest, strict=True):
        amax.copy_(value)


@wrapping
def update_quantized(
    self: Any, src: torch.Tensor, dst: Any, *, stock: Callable[..., Any], **kwargs: Any
) -> Any:
    """Quantize into a tensor; reduce its newest amax if it is a weight. Collective over the weight mesh then."""
    result = stock(self, src, dst, **kwargs)
    # A copy has the same scale and history, but only the weight's own quantizer reduces its amax.
    if quantizer_record(self).amax_group is not None and self is _te.quantizer_of(dst):
        reduce_newest_amax([dst])
    return result


#: Writes of delayed-scaling weights reduce the newest amax ([Note: amax of delayed scaling]).
DELAYED_UPDATES: Replacements = ((None, "delayed", update_quantized),)


# --- around a step


@runs_if("quantized")
def refresh_quantized(step: Step) -> None:
    """Reduce the newest amaxes of delayed-scaling weights, and drop their transposes.

    Collective over the weight mesh if there are such weights: one max all-reduce.
    """
    delayed = []
    for _, parameter, local in step.quantized:
        if has_amax_history(type(getattr(local, _te.QUANTIZER))):
            delayed.append(local)
            _te.drop_transpose(local)
            if parameter.requires_grad:
                copy_delayed_scale(local)
    if delayed:
        reduce_newest_amax(delayed)


# --- writes


class PendingQuantization(NamedTuple):
    """A value to be quantized with one scale, which depends on the amax of all shards.

    ``value`` is this rank's shard in float32, possibly empty. The other ranks of ``group`` have the other
    shards; ``None`` if the value is unsharded.
    """

    value: torch.Tensor
    quantizer: Any
    group: dist.ProcessGroup | None


# [Note: one reduction for all weights] TE quantizes weight by weight: amax, reduction, scale and cast of one
# weight before those of the next. The results are identical. TE's ``quantize_master_weights`` is not used. It
# rounds values to the weight's nominal dtype first, reduces amaxes of blocks that no ranks share here, and
# computes scales with an approximate division.
@torch.no_grad()
def quantize_into(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write new values to local tensors, each rounded or quantized once.

    Collective for weights with one scale: one max all-reduce of one float per weight for each amax group, and
    one per NVFP4 weight. Amaxes of delayed scaling stay local to this rank.

    A weight with a NaN gets scale 1 on all ranks. TE ignores NaN in an amax, so the scale of such a weight is
    arbitrary. ``pairs`` are local tensors and float32 values of their shapes, in the same order on all ranks.
    """
    current = []
    writes: list[tuple[Any, Any, torch.Tensor]] = []
    for local, value in pairs:
        quantizer: Any = getattr(local, _te.QUANTIZER, None)
        if quantizer is not None:
            count_write(quantizer)  # another optimizer with main weights of it compares the numbers
        if hasattr(local, "experts"):  # a grouped weight
            weight: Any = local
            weight.mark_experts()
            experts = zip(weight.experts, value.detach(), strict=True)
            writes += [(expert, quantizer, part) for expert, part in experts]
        elif (
            getattr(quantizer, "columnwise_source", "") == "original"
            and all(quantizer.get_usages().values())
            and len(_te.storage_parts_of(local)) == 2
        ):  # a hybrid, whose parts are both quantized from the value
            parts = zip(_te.storage_parts_of(local), _te.quantizers_of_parts(quantizer), strict=True)
            writes += [(part, target_quantizer, value) for part, target_quantizer in parts]
        else:
            writes.append((local, quantizer, value))
    for target, quantizer, value in writes:
        if quantizer is None:
            target.copy_(value)
        elif has_current_scale(type(quantizer)):
            current.append((target, quantizer, value))
        else:
            # A copy has the same scale and history but does not reduce this weight's amax.
            target_quantizer = quantizer.copy() if has_amax_history(type(quantizer)) else quantizer
            target_quantizer.update_quantized(value, target)
    groups: dict[str | None, Any] = {}  # by name, because most weights share one group
    requests = []
    for target, target_quantizer, value in current:
        record = target_quantizer.__dict__.get(QUANTIZER_RECORD)
        name = record.amax_group if record else None
        if name is None or name not in groups:
            groups[name] = _te.amax_group_of(target)  # the group of the name, as in TE's own quantization
        requests.append(PendingQuantization(value, target_quantizer, groups[name]))
    for (target, quantizer, value), scale in zip(current, shared_scales(requests), strict=True):
        cast(value, quantizer, scale, target)


@functools.cache
def has_current_scale(kind: type) -> bool:
    """Return whether a quantizer class computes a single scale from the amax of the value."""
    return issubclass(kind, _te.quantizer_classes("amax", blocks=False))


def shared_scales(requests: Sequence[PendingQuantization]) -> list[torch.Tensor]:
    """Return the scale of each value, computed like TE's from the amax over all shards.

    Collective: one max all-reduce of one float per value for each group. The order of requests is the same on
    all ranks. Each scale is one float32 element of a vector for its kind of quantizer.
    """
    by_group: dict[str, list[int]] = {}
    for index, (_, _, group) in enumerate(requests):
        by_group.setdefault("" if group is None else group.group_name, []).append(index)
    # Values of a group are neighbors in one vector, so that its all-reduce needs no packing.
    order = [index for members in by_group.values() for index in members]
    if not order:
        return []
    values = [requests[index].value for index in order]
    norms = iter(_torch.norms([value for value in values if value.numel()], torch.inf))
    amaxes = torch.stack([next(norms) if value.numel() else value.new_zeros(()) for value in values])
    # Replace NaN: its maximum over ranks would depend on their order.
    amaxes = amaxes.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    begin = 0
    for name, members in by_group.items():
        if name:
            group_amaxes = amaxes[begin : begin + len(members)]
            dist.all_reduce(group_amaxes, op=dist.ReduceOp.MAX, group=requests[members[0]].group)
        begin += len(members)
    by_options: dict[tuple[float, bool, float], Sequence[torch.Tensor]] = {}
    scales = [amaxes] * len(requests)
    for index_in_group, index in enumerate(order):
        quantizer = requests[index].quantizer
        largest = torch.finfo(FLOAT8[quantizer.dtype.name]).max
        options = largest, quantizer.force_pow_2_scales, quantizer.amax_epsilon
        if options not in by_options:
            # As ``compute_scale_from_amax`` of TE's ``current_scaling.cu``, for amaxes without NaN. number / tensor
            # would compute the reciprocal times the number, which rounds twice.
            raised = amaxes.clamp(min=quantizer.amax_epsilon)
            ratios = torch.full_like(raised, largest).div_(raised).clamp_(max=torch.finfo(torch.float32).max)
            if quantizer.force_pow_2_scales:
                ratios.view(torch.int32).bitwise_and_(0x7F800000)
            by_options[options] = ratios.masked_fill_((raised == 0) | raised.isinf(), 1.0).split(1)
        scales[index] = by_options[options][index_in_group]
    return scales


def cast(value: torch.Tensor, quantizer: Any, scale: torch.Tensor, target: Any = None) -> Any:
    """Quantize a float32 tensor, possibly empty, with a known scale. Local operation without synchronization.

    ``quantizer`` is TE's ``Float8CurrentScalingQuantizer``, which selects the buffers. Returns ``target``, or a
    new float8 tensor.
    """
    usages = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    (make,) = _te.quantizer_classes("history")
    # As in TE's ``quantize_master_weights``. With an empty amax tensor the kernel computes no amax.
    quantize: Any = make(scale=scale, amax=torch.empty(0), fp8_dtype=quantizer.dtype, **usages)
    if target is None:
        target = quantize(value)
    else:
        quantize.update_quantized(value, target)
    if not value.numel():  # no kernel runs, but this rank reads the gathered weight with its own scale
        _te.inverse_scale_of(target).copy_(scale.reciprocal())
    return target
