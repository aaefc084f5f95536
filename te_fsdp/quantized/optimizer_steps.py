"""What must hold around every optimizer step of a model with quantized weights.

Before: the optimizer keeps fp32 main weights. torch's optimizers would otherwise update quantized weights by
dequantizing and requantizing them operation by operation, which loses most small updates in silence; TE's
FusedAdam without main weights raises, or leaves delayed-scaling weights as they are (TE 2.20.2).

After: delayed-scaling weights have the amax of the whole weight in their histories, where FusedAdam put that of
a shard; and no cached transpose, which FusedAdam does not update (Hopper layout).

Both look only at weights that te_fsdp has bound.

:func:`write_all` writes new values into many weights at once:

    current scaling, hybrids of it     amaxes of all, one max all-reduce per group, all scales, then the casts
    delayed scaling                    casts alone: the caller reduces the amaxes of all (``refresh_quantized``)
    float8-block, MXFP8                casts alone: scales belong to blocks
    NVFP4                              weight by weight, each with its reduction: TE 2.18 to 2.20 has no cast into a
                                       weight with an amax that is known
    high precision                     rounded

TE quantizes weight by weight: amax, reduction, scale and cast of one before those of the next. The bytes are the same.
TE's ``quantize_master_weights`` is not used: it rounds values to the weight's nominal dtype first, reduces the amaxes
of blocks that no rank shares here, and its scales come from a kernel that divides approximately.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp.errors import PrecisionError
from te_fsdp.quantized.amax_mark import reduce_newest_amax, take_delayed_scale

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from te_fsdp.parameters import Facts
    from te_fsdp.step_hooks import Step

#: Attribute of an optimizer to which te_fsdp has given main weights.
KEEPS_MAIN_WEIGHTS = "_te_fsdp_main_weights"


def quantized_among(
    held: Iterable[tuple[torch.Tensor, Facts]],
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Label, parameter and local tensor of every quantized weight of a bound module. Local operation.

    Args:
        held: From :func:`te_fsdp.step_hooks.held_by`.
    """
    found = [(facts.label, parameter) for parameter, facts in held if facts.label is not None]
    together = zip(found, _torch.locals_of([parameter for _, parameter in found]), strict=True)
    return [(label, parameter, local) for (label, parameter), local in together if _te.is_quantized(local)]


def refuse(optimizer: Optimizer, label: str) -> None:
    """Raise if an optimizer would update a quantized weight otherwise than through fp32 main weights.

    Local operation; all ranks have the same optimizer and raise the same.

    Args:
        optimizer: Any optimizer.
        label: Name of the weight.

    Raises:
        PrecisionError: Names the weight, and the option or the call that helps.
    """
    if hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        return
    if not _te.is_fused_adam(optimizer):
        got, fix = "none", "call te_fsdp.main_weights(model, optimizer) once, before the first step"
    else:
        fused: Any = optimizer
        if (
            fused.master_weights
            and fused.master_weight_dtype == torch.float32
            and not fused.store_param_remainders
        ):
            return
        got = f"master_weights={fused.master_weights}, master_weight_dtype={fused.master_weight_dtype}, "
        got += f"store_param_remainders={fused.store_param_remainders}"
        fix = "FusedAdam(..., master_weights=True), master_weight_dtype and store_param_remainders at their defaults"
    raise PrecisionError(
        f"{label}: {type(optimizer).__name__} on a quantized weight",
        expected="fp32 main weights, of which the quantized weight is one quantization",
        got=got,
        why="Updates smaller than the format's step would be rounded away",
        fix=fix,
    )


def take_out_main_weights(step: Step) -> None:
    """Give the parameters their places in the groups back, if a step that raised has left main weights there."""
    main_parameters = getattr(step.optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None:
        main_parameters.put_back(step.optimizer)


def require_main_weights(step: Step) -> None:
    """Raise if a quantized weight with a gradient has no fp32 main weight (:func:`refuse`)."""
    for label, parameter, _ in quantized_among(step.held):
        if parameter.grad is not None or getattr(parameter, "decoupled_grad", None) is not None:
            refuse(step.optimizer, label)
            return  # what holds for one weight holds for all


def refresh_quantized(step: Step) -> None:
    """Give delayed-scaling weights the amax of the whole weight, and drop their transposes.

    Collective over the weight mesh if there are some: one max all-reduce.
    """
    delayed = [(p, local) for _, p, local in quantized_among(step.held) if _te.has_delayed_scale(local)]
    for parameter, local in delayed:
        _te.forget_transpose(local)
        if parameter.requires_grad:
            take_delayed_scale(local)
    reduce_newest_amax(local for _, local in delayed)


#: Largest value of an element type (``tex.DType``) of float8.
_LARGEST = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}


class Scaled(NamedTuple):
    """A value that is about to be quantized with one scale, that of the amax of all pieces of its weight.

    Attributes:
        value: float32, this rank's piece; may be empty.
        quantizer: TE's ``Float8CurrentScalingQuantizer``.
        group: The ranks that hold the other pieces; ``None`` if this one holds all.
    """

    value: torch.Tensor
    quantizer: Any
    group: dist.ProcessGroup | None


class _Write(NamedTuple):
    """A quantized tensor of TE's, or a part of one, and what it shall hold."""

    target: Any
    quantizer: Any
    value: torch.Tensor


@torch.no_grad()
def write_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Make local tensors their new values, each rounded or quantized once.

    Collective for weights with one scale: one max all-reduce for each group over which an amax is taken, of one float
    per weight; for each NVFP4 weight one more. Amaxes of delayed scaling are left as they are on this rank.

    A weight with a NaN gets scale 1 on all ranks. TE passes over NaN in an amax; which values the others keep beside
    it says nothing.

    Args:
        pairs: Local tensor and float32 value of its shape, in the same order on all ranks.
    """
    current: list[_Write] = []
    for write in _writes(pairs):
        target, quantizer, value = write
        if quantizer is None:
            target.copy_(value)
        elif has_current_scale(type(quantizer)):
            current.append(write)
        else:
            # A copy has the same scale and history, and does not reduce this weight's amax by itself.
            own = quantizer.copy() if _te.is_delayed_quantizer(quantizer) else quantizer
            own.update_quantized(value, target)
    # Answers with the group of the weight's mark, as TE's own quantization of it would ask.
    requests = [Scaled(value, own, _te.amax_group_of(target)) for target, own, value in current]
    for (target, quantizer, value), scale in zip(current, shared_scales(requests), strict=True):
        cast(value, quantizer, scale, target)


def _writes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[_Write]:
    """The single quantizations that those of some weights consist of, as TE makes them one after the other."""
    found: list[_Write] = []
    for local, value in pairs:
        quantizer = getattr(local, _te.QUANTIZER, None)
        if quantizer is None or (has_current_scale(type(quantizer)) and not hasattr(local, "experts")):
            found.append(_Write(local, quantizer, value))
        elif _te.is_grouped(local):
            weight: Any = local
            weight.mark_experts()
            experts = zip(weight.experts, value.detach(), strict=True)
            found += [_Write(expert, quantizer, part) for expert, part in experts]
        elif _has_independent_parts(local, quantizer):
            parts = zip(_te.parts_of(local), _te.quantizers_of_parts(quantizer), strict=True)
            found += [_Write(part, own, value) for part, own in parts]
        else:
            found.append(_Write(local, quantizer, value))
    return found


def _has_independent_parts(local: torch.Tensor, quantizer: Any) -> bool:
    """Whether a tensor is a hybrid one, both parts of which are quantized from the value itself."""
    original = getattr(quantizer, "columnwise_source", "") == "original"
    return original and all(quantizer.get_usages().values()) and len(_te.parts_of(local)) == 2


@functools.cache
def has_current_scale(kind: type) -> bool:
    """Whether a class of quantizers takes one scale, and nothing else, from the amax of the value."""
    return issubclass(kind, _te.quantizer_classes("amax", blocks=False))


def shared_scales(requests: Sequence[Scaled]) -> list[torch.Tensor]:
    """The scale of each value, as TE computes it, from the amax over all pieces of the weight.

    Collective: one max all-reduce for each group, of one float per value.

    Args:
        requests: In the same order on all ranks.

    Returns:
        One float32 element for each, all in one vector for each kind of quantizer.
    """
    by_group: dict[str, list[int]] = {}
    for index, (_, _, group) in enumerate(requests):
        by_group.setdefault("" if group is None else group.group_name, []).append(index)
    order = [index for members in by_group.values() for index in members]
    if not order:
        return []
    amaxes = _amaxes_of([requests[index].value for index in order])
    begin = 0
    for name, members in by_group.items():
        if name:
            own = amaxes[begin : begin + len(members)]
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=requests[members[0]].group)
        begin += len(members)
    by_options: dict[tuple[float, bool, float], Sequence[torch.Tensor]] = {}
    scales = [amaxes] * len(requests)
    for place, index in enumerate(order):
        quantizer = requests[index].quantizer
        options = _LARGEST[quantizer.dtype.name], quantizer.force_pow_2_scales, quantizer.amax_epsilon
        if options not in by_options:
            by_options[options] = _scales_of(amaxes, *options).split(1)
        scales[index] = by_options[options][place]
    return scales


def _amaxes_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitudes as one float32 vector: 0 without elements, infinity with a NaN. Local operation."""
    norms = iter(_torch.norms([value for value in values if value.numel()], torch.inf))
    found = torch.stack([next(norms) if value.numel() else value.new_zeros(()) for value in values])
    # Not NaN: what a maximum over ranks makes of it depends on their order.
    return found.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _scales_of(amaxes: torch.Tensor, largest: float, power_of_two: bool, epsilon: float) -> torch.Tensor:
    """``compute_scale_from_amax`` of TE's ``current_scaling.cu``, of a vector of amaxes without NaN."""
    raised = amaxes.clamp(min=epsilon)
    # Not a number over a tensor: that is the reciprocal times the number, rounded twice.
    scales = torch.full_like(raised, largest).div_(raised).clamp_(max=torch.finfo(torch.float32).max)
    if power_of_two:
        scales.view(torch.int32).bitwise_and_(0x7F800000)
    return scales.masked_fill_((raised == 0) | raised.isinf(), 1.0)


def cast(value: torch.Tensor, quantizer: Any, scale: torch.Tensor, target: Any = None) -> Any:
    """Quantize with a scale that is known. Local operation, which nothing waits for.

    Args:
        value: float32; may be empty.
        quantizer: TE's ``Float8CurrentScalingQuantizer``, which says into which buffers.
        scale: One element.
        target: Float8 tensor of that shape; ``None``: a new one.

    Returns:
        The float8 tensor.
    """
    usages = {"rowwise": quantizer.rowwise_usage, "columnwise": quantizer.columnwise_usage}
    (make,) = _te.quantizer_classes("history")
    # As TE does for shards of main weights (``quantize_master_weights``): without elements its kernel takes no amax.
    given: Any = make(scale=scale, amax=torch.empty(0), fp8_dtype=quantizer.dtype, **usages)
    if target is None:
        target = given(value)
    else:
        given.update_quantized(value, target)
    if not value.numel():  # no kernel runs, but this rank reads the gathered weight with its own scale
        _te.inverse_scale_of(target).copy_(scale.reciprocal())
    return target
