"""One scale for a weight whose pieces lie on several ranks: who reduces its amax, and what holds around a step.

TE 2.20 keeps the group of the amax as an attribute of the tensor object: every ``detach``, ``clone``, view and
``nn.Parameter`` loses it, every FSDP2 gather overwrites it, and while it is there nobody can pickle or deep
copy the tensor. te_fsdp keeps the *name* of the group on the tensor's quantizer, which TE copies along with
every tensor made from it: the mark. TE's question for the group is answered with the group of that name.

Delayed scaling asks no such question: a write leaves this rank's amax in the history, and TE reduces the history
at the end of the next forward, over whatever group ``te.autocast`` was given. Writes into a marked weight reduce
that amax at once, so that the ranks of a weight agree at any time.

FSDP2 cuts rows into pieces of ceil(M / n): small weights leave ranks without any. Such a rank still takes part in the
amax of the whole weight, and reads the gathered bytes with the scale that it holds itself: two places where TE
2.20.2 passes over an empty tensor (its extension returns before the all-reduce, and the other ranks wait for ever;
its Adam kernel for delayed scaling leaves the scale alone).

torch's optimizers would update quantized weights by dequantizing and requantizing them operation by operation, which
loses most small updates in silence: they must keep fp32 main weights. TE's FusedAdam without main weights raises, or
leaves delayed-scaling weights as they are; with them it puts the amax of a shard into their histories, and does not
update cached transposes of the Hopper layout (TE 2.20.2).

:func:`quantize_into` writes new values into many weights at once:

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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from te_fsdp.errors import PrecisionError
from te_fsdp.upstream import te as _te, torch_dtensor as _torch
from te_fsdp.upstream.patches import PATCHES, apply_patch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from te_fsdp.lifecycle import Step
    from te_fsdp.records import ParameterRecord

_MARK = "_te_fsdp_amax_group"
# Of quantizers whose tensors are cloned with their scales.
_CLONES = "_te_fsdp_clones_scales"
_MARKS = (_MARK, _CLONES)
_ATTRIBUTE = PATCHES["group"].attribute
#: Attribute of an optimizer to which te_fsdp has given main weights.
KEEPS_MAIN_WEIGHTS = "_te_fsdp_main_weights"


def set_amax_group(tensor: torch.Tensor, group_name: str | None) -> None:
    """Name the group over which every later quantization into ``tensor``, or into a copy of it, reduces the amax.

    Local operation. ``None``: the process group that TE's gather has put there is taken off. Formats without one scale
    per tensor are left alone.
    """
    if group_name is not None:
        if has_amax_group(tensor, group_name):
            return
        keep_amax_group_in_copies()
    tensor.__dict__.pop(_ATTRIBUTE, None)
    for quantizer in _te.all_one_scale_quantizers(tensor):
        _te.set_quantizer_amax_group(quantizer, None)
        if group_name is not None:
            quantizer.__dict__[_MARK] = group_name


def has_amax_group(tensor: torch.Tensor, group_name: str | None) -> bool:
    """Whether nothing has changed since a tensor was marked so: asked at every gather. Of hybrids it is not known."""
    quantizer = getattr(tensor, _te.QUANTIZER, None)
    return (
        group_name is not None
        and quantizer is not None
        and quantizer.__dict__.get(_MARK) == group_name
        and _ATTRIBUTE not in tensor.__dict__
        and not getattr(quantizer, _te.REDUCES_AMAX, False)
    )


def amax_group_name(tensor: torch.Tensor) -> str | None:
    """Name of the group that :func:`set_amax_group` gave, ``None`` for a tensor without. Local operation."""
    found = _te.one_scale_quantizers(_te.quantizer_of(tensor))
    return found[0].__dict__.get(_MARK) if found else None


def reduce_newest_amax(tensors: Iterable[torch.Tensor]) -> None:
    """Give delayed-scaling weights the amax of the whole weight as the newest of their histories.

    Collective: one max all-reduce for each group that the marks name, of one float per weight; the weights in the same
    order on all ranks. Unmarked tensors and those of other formats are left alone.
    """
    by_group: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        quantizer = _te.quantizer_of(tensor)
        if _te.is_delayed_quantizer(quantizer) and _MARK in quantizer.__dict__:
            by_group.setdefault(quantizer.__dict__[_MARK], []).append(quantizer.amax)
    for name, amaxes in by_group.items():
        reduce_max(amaxes, _torch.group_by_name(name))


def reduce_max(amaxes: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give tensors of one element the largest value that the ranks of a group have, in place.

    Collective: one max all-reduce over ``group``.
    """
    newest = torch.cat([amax.reshape(1) for amax in amaxes])
    dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    for amax, value in zip(amaxes, newest, strict=True):
        amax.copy_(value)


def keep_amax_group_in_copies() -> None:
    """Teach TE's classes about the mark; once per process, later calls do nothing.

    Tensors without a mark, those of models that te_fsdp does not know, behave as before.
    """
    apply_patch("copy", _wrap_copy)
    apply_patch("deepcopy", lambda stock: _deepcopy)
    apply_patch("pickle", _wrap_getstate)
    apply_patch("group", lambda stock: property(_get_group, _set_group))
    apply_patch("delayed", _wrap_update_delayed)
    apply_patch("clone", _wrap_clone)


def _get_group(self: Any) -> Any:
    """The marked group, or what TE has set."""
    quantizer = self._quantizer
    name = None if quantizer is None else quantizer.__dict__.get(_MARK)
    return self.__dict__.get(_ATTRIBUTE) if name is None else _torch.group_by_name(name)


def _set_group(self: Any, group: Any) -> None:
    """Keep what TE sets, unless there is a mark: FSDP2's group alone is not the whole weight."""
    quantizer = self._quantizer
    if quantizer is None or _MARK not in quantizer.__dict__:
        self.__dict__[_ATTRIBUTE] = group


def _wrap_copy(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(stock)
    def copy(self: Any) -> Any:
        new = stock(self)
        new.__dict__.update({name: self.__dict__[name] for name in _MARKS if name in self.__dict__})
        return new

    return copy


def _wrap_update_delayed(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def update_quantized(self: Any, src: torch.Tensor, dst: Any, **kwargs: Any) -> Any:
        result = stock(self, src, dst, **kwargs)
        if self is _te.quantizer_of(dst) and _MARK in self.__dict__:
            reduce_newest_amax([dst])
        return result

    return update_quantized


def _wrap_getstate(stock: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    @functools.wraps(stock)
    def __getstate__(self: Any) -> dict[str, Any]:
        # In another process the name may belong to other ranks.
        return {key: value for key, value in stock(self).items() if key != _MARK}

    return __getstate__


def _with_group(quantizer: Any, group: Any) -> Any:
    """A copy of a quantizer that reduces over ``group``, or over none."""
    new = quantizer.copy()
    _te.set_quantizer_amax_group(new, group)
    return new


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """A copy in this process keeps the mark, and never takes a process group along."""
    return _with_group(self, None)


def patch_clone_of_scales(tensor: torch.Tensor) -> None:
    """Let clones of a quantized weight, and of those, have scales of their own. Local operation.

    TE's clones share them (2.18 to 2.20.2). Who keeps ``parameter.detach().clone()`` or a cloned state dict (the best
    weights so far, values to be put back) would find new scales under old bytes after the next step.
    """
    for part in (tensor, *_te.storage_parts_of(tensor)):
        quantizer = _te.quantizer_of(part)
        if quantizer is not None and _CLONES not in quantizer.__dict__:
            keep_amax_group_in_copies()  # TE copies it for every tensor made from this one
            quantizer.__dict__[_CLONES] = True


def _wrap_clone(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(stock)
    def clone(self: Any) -> Any:
        new, quantizer = stock(self), _te.quantizer_of(self)
        if quantizer is not None and _CLONES in quantizer.__dict__:
            _te.clone_scales(new)
        return new

    return clone


# --- shards without rows


def patch_empty_shards() -> None:
    """Let empty tensors take part in current scaling's amax reductions; once per process.

    Quantizations without a reduction, and those of tensors with elements, go their old way.
    """
    apply_patch("quantize empty", _wrap_quantize)
    apply_patch("update empty", _wrap_update)


def _wrap_quantize(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def quantize_impl(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 0 or not getattr(self, _te.REDUCES_AMAX):
            return stock(self, tensor)
        local = stock(_with_group(self, None), tensor)
        _te.inverse_scale_of(local).copy_(_shared_scale(self, _te.amax_group_of(self), tensor))
        return local

    return quantize_impl


def _wrap_update(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def update_quantized(self: Any, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> torch.Tensor:
        group = _te.amax_group_of(dst)
        if src.numel() > 0 or group is None:
            return stock(self, src, dst, **options)
        _te.inverse_scale_of(dst).copy_(_shared_scale(self, group, src))
        return dst

    return update_quantized


def _shared_scale(quantizer: Any, group: Any, like: torch.Tensor) -> torch.Tensor:
    """The inverse scale of the whole weight, to whose amax this rank contributes zero. Collective over ``group``."""
    # Sizes that every kernel takes.
    zeros = torch.zeros((16, 16), dtype=like.dtype, device=like.device)
    return _te.inverse_scale_of(_with_group(quantizer, group).quantize_impl(zeros))


def take_delayed_scale(local: torch.Tensor) -> None:
    """Give an empty delayed-scaling shard the scale with which an update has just quantized the others.

    Local operation: the ranks of a weight have the same scale and history. Nothing to do for shards with rows.
    """
    if local.numel() == 0:
        _te.inverse_scale_of(local).copy_(_te.quantizer_of(local).scale.reciprocal())


def share_scale(local: torch.Tensor, mesh: DeviceMesh, rows: int) -> None:
    """Give ranks without rows of a float8 weight of so many the scale of the first rank, which always has some.

    Collective (broadcast of one float) over the 1-D ``mesh`` if any of its ranks is empty, local otherwise.
    """
    ranks = mesh.size()
    if (ranks - 1) * -(-rows // ranks) >= rows:
        dist.broadcast(_te.inverse_scale_of(local), group_src=0, group=mesh.get_group())


# --- around a step


def quantized_among(
    held: Iterable[tuple[torch.Tensor, ParameterRecord]],
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Label, parameter and local tensor of every quantized weight of a bound module. Local operation."""
    found = [(facts.label, parameter) for parameter, facts in held if facts.label is not None]
    together = zip(found, _torch.local_tensors_of([parameter for _, parameter in found]), strict=True)
    return [(name, given, local) for (name, given), local in together if _te.is_quantized_class(type(local))]


def refuse_unsafe_optimizer(optimizer: Optimizer, label: str) -> None:
    """Raise if an optimizer would update a quantized weight otherwise than through fp32 main weights.

    Local operation; all ranks have the same optimizer and raise the same.

    Raises:
        PrecisionError: Names the weight, and the option or the call that helps.
    """
    if hasattr(optimizer, KEEPS_MAIN_WEIGHTS):
        return
    got, fix = "none", "call te_fsdp.main_weights(model, optimizer) once, before the first step"
    if _te.is_fused_adam(optimizer):
        fused: Any = optimizer
        options = fused.master_weights, fused.master_weight_dtype, fused.store_param_remainders
        if options[0] and options[1] == torch.float32 and not options[2]:
            return
        got = "master_weights={}, master_weight_dtype={}, store_param_remainders={}".format(*options)
        fix = "FusedAdam(..., master_weights=True), master_weight_dtype and store_param_remainders at their defaults"
    raise PrecisionError(
        f"{label}: {type(optimizer).__name__} on a quantized weight",
        expected="fp32 main weights, of which the quantized weight is one quantization",
        got=got,
        why="Updates smaller than the format's step would be rounded away",
        fix=fix,
    )


def restore_optimizer_params(step: Step) -> None:
    """Give the parameters their places in the groups back, if a step that raised has left main weights there."""
    main_parameters = getattr(step.optimizer, KEEPS_MAIN_WEIGHTS, None)
    if main_parameters is not None:
        main_parameters.put_back(step.optimizer)


def refresh_quantized(step: Step) -> None:
    """Give delayed-scaling weights the amax of the whole weight, and drop their transposes.

    Collective over the weight mesh if there are some: one max all-reduce.
    """
    delayed = [(p, local) for _, p, local in quantized_among(step.held) if _te.has_delayed_scale(local)]
    for parameter, local in delayed:
        _te.drop_transpose(local)
        if parameter.requires_grad:
            take_delayed_scale(local)
    reduce_newest_amax(local for _, local in delayed)


# --- writes


#: Largest value of an element type (``tex.DType``) of float8.
_LARGEST = {"kFloat8E4M3": 448.0, "kFloat8E5M2": 57344.0}


class PendingQuantization(NamedTuple):
    """A value that is about to be quantized with one scale, that of the amax of all pieces of its weight.

    ``value`` is this rank's piece in float32, maybe empty; the group's ranks hold the others (``None``: this one all).
    """

    value: torch.Tensor
    quantizer: Any
    group: dist.ProcessGroup | None


@torch.no_grad()
def quantize_into(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Make local tensors their new values, each rounded or quantized once.

    Collective for weights with one scale: one max all-reduce for each group over which an amax is taken, of one float
    per weight; for each NVFP4 weight one more. Amaxes of delayed scaling are left as they are on this rank.

    A weight with a NaN gets scale 1 on all ranks. TE passes over NaN in an amax; which values the others keep beside
    it says nothing.

    Args:
        pairs: Local tensor and float32 value of its shape, in the same order on all ranks.
    """
    current = []
    for target, quantizer, value in _writes(pairs):
        if quantizer is None:
            target.copy_(value)
        elif has_current_scale(type(quantizer)):
            current.append((target, quantizer, value))
        else:
            # A copy has the same scale and history, and does not reduce this weight's amax by itself.
            own = quantizer.copy() if _te.is_delayed_quantizer(quantizer) else quantizer
            own.update_quantized(value, target)
    # Answers with the group of the weight's mark, as TE's own quantization of it would ask.
    requests = [PendingQuantization(value, own, _te.amax_group_of(target)) for target, own, value in current]
    for (target, quantizer, value), scale in zip(current, shared_scales(requests), strict=True):
        cast(value, quantizer, scale, target)


def _writes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[Any, Any, torch.Tensor]]:
    """The quantizations that those of some weights consist of, in TE's order: target, quantizer, value of each."""
    found: list[tuple[Any, Any, torch.Tensor]] = []
    for local, value in pairs:
        quantizer = getattr(local, _te.QUANTIZER, None)
        if quantizer is None or (has_current_scale(type(quantizer)) and not hasattr(local, "experts")):
            found.append((local, quantizer, value))  # most of them
        elif _te.is_grouped(local):
            weight: Any = local
            weight.mark_experts()
            experts = zip(weight.experts, value.detach(), strict=True)
            found += [(expert, quantizer, part) for expert, part in experts]
        elif (
            getattr(quantizer, "columnwise_source", "") == "original"
            and all(quantizer.get_usages().values())
            and len(_te.storage_parts_of(local)) == 2
        ):  # a hybrid one, both parts of which are quantized from the value itself
            parts = zip(_te.storage_parts_of(local), _te.quantizers_of_parts(quantizer), strict=True)
            found += [(part, own, value) for part, own in parts]
        else:
            found.append((local, quantizer, value))
    return found


@functools.cache
def has_current_scale(kind: type) -> bool:
    """Whether a class of quantizers takes one scale, and nothing else, from the amax of the value."""
    return issubclass(kind, _te.quantizer_classes("amax", blocks=False))


def shared_scales(requests: Sequence[PendingQuantization]) -> list[torch.Tensor]:
    """The scale of each value, as TE computes it, from the amax over all pieces of the weight.

    Collective: one max all-reduce for each group, of one float per value; requests in the same order on all ranks.

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
    """Quantize float32, maybe empty, with a scale that is known. Local operation, which nothing waits for.

    ``quantizer`` is TE's ``Float8CurrentScalingQuantizer``, which says into which buffers. Returns ``target``, or a new
    float8 tensor.
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
