"""The mark on a quantized weight that names the ranks over which its amax is reduced, and that sticks.

TE 2.20 keeps the group as an attribute of the tensor object: every ``detach``, ``clone``, view and
``nn.Parameter`` loses it, every FSDP2 gather overwrites it, and while it is there nobody can pickle or deep
copy the tensor. te_fsdp keeps the *name* of the group on the tensor's quantizer, which TE copies along with
every tensor made from it, and answers TE's question for the group with the group of that name.

Delayed scaling asks no such question: a write leaves this rank's amax in the history, and TE reduces the history
at the end of the next forward, over whatever group ``te.autocast`` was given. Writes into a marked weight reduce
that amax at once, so that the ranks of a weight agree at any time.

FSDP2 cuts rows into pieces of ceil(M / n): small weights leave ranks without any. Such a rank still takes part in the
amax of the whole weight, and reads the gathered bytes with the scale that it holds itself: two places where TE
2.20.2 passes over an empty tensor (its extension returns before the all-reduce, and the other ranks wait for ever;
its Adam kernel for delayed scaling leaves the scale alone).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from te_fsdp import _te, _torch
from te_fsdp._patches import PATCHES, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.distributed.device_mesh import DeviceMesh

_MARK = "_te_fsdp_amax_group"
# Of quantizers whose tensors are cloned with their scales.
_CLONES = "_te_fsdp_clones_scales"
_MARKS = (_MARK, _CLONES)
_ATTRIBUTE = PATCHES["group"].attribute


def mark(tensor: torch.Tensor, group_name: str) -> None:
    """Name the group over which every later quantization into ``tensor``, or into a copy of it, reduces the amax.

    Local operation. Formats without one scale per tensor are left alone.

    Args:
        tensor: One of TE's quantized tensors.
        group_name: ``group.group_name`` of a process group of this process.
    """
    if is_marked(tensor, group_name):
        return
    make_marks_stick()
    drop_group(tensor)
    for quantizer in _te.all_one_scale_quantizers(tensor):
        quantizer.__dict__[_MARK] = group_name


def is_marked(tensor: torch.Tensor, group_name: str | None) -> bool:
    """Whether nothing has changed since a tensor was marked so: asked at every gather. Of hybrids it is not known."""
    quantizer = getattr(tensor, _te.QUANTIZER, None)
    return (
        group_name is not None
        and quantizer is not None
        and quantizer.__dict__.get(_MARK) == group_name
        and _ATTRIBUTE not in tensor.__dict__
        and not getattr(quantizer, _te.REDUCES_AMAX, False)
    )


def drop_group(tensor: torch.Tensor) -> None:
    """Take off the process group that TE's gather has put on a tensor, or on the quantizers of a hybrid one."""
    tensor.__dict__.pop(_ATTRIBUTE, None)
    for quantizer in _te.all_one_scale_quantizers(tensor):
        _te.reduce_amax_over(quantizer, None)


def marked_group(tensor: torch.Tensor) -> str | None:
    """Name of the group that :func:`mark` gave, ``None`` for a tensor without. Local operation."""
    for quantizer in _te.one_scale_quantizers(_te.quantizer_of(tensor)):
        return quantizer.__dict__.get(_MARK)
    return None


def reduce_newest_amax(tensors: Iterable[torch.Tensor]) -> None:
    """Give delayed-scaling weights the amax of the whole weight as the newest of their histories.

    Collective: one max all-reduce for each group that the marks name, of one float per weight. Unmarked tensors
    and those of other formats are left alone.

    Args:
        tensors: Local quantized tensors, the same weights in the same order on all ranks.
    """
    by_group: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        quantizer = _te.quantizer_of(tensor)
        if _te.is_delayed_quantizer(quantizer) and _MARK in quantizer.__dict__:
            by_group.setdefault(quantizer.__dict__[_MARK], []).append(quantizer.amax)
    for name, amaxes in by_group.items():
        largest_of(amaxes, _torch.group_by_name(name))


def largest_of(amaxes: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give tensors of one element the largest value that the ranks of a group have, in place.

    Collective: one max all-reduce over ``group``.
    """
    newest = torch.cat([amax.reshape(1) for amax in amaxes])
    dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=group)
    for amax, value in zip(amaxes, newest, strict=True):
        amax.copy_(value)


def make_marks_stick() -> None:
    """Teach TE's classes about the mark; once per process, later calls do nothing.

    Tensors without a mark, those of models that te_fsdp does not know, behave as before.
    """
    install("copy", _wrap_copy)
    install("deepcopy", lambda stock: _deepcopy)
    install("pickle", _wrap_getstate)
    install("group", lambda stock: property(_get_group, _set_group))
    install("delayed", _wrap_update_delayed)
    install("clone", _wrap_clone)


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


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """A copy in this process keeps the mark, and never takes a process group along."""
    new = self.copy()
    _te.reduce_amax_over(new, None)
    return new


# --- clones


def clone_scales_too(tensor: torch.Tensor) -> None:
    """Let clones of a quantized weight, and of those, have scales of their own. Local operation.

    TE's clones share them (2.18 to 2.20.2). Who keeps ``parameter.detach().clone()`` or a cloned state dict (the best
    weights so far, values to be put back) would find new scales under old bytes after the next step.
    """
    for part in (tensor, *_te.parts_of(tensor)):
        quantizer = _te.quantizer_of(part)
        if quantizer is not None and _CLONES not in quantizer.__dict__:
            make_marks_stick()  # TE copies it for every tensor made from this one
            quantizer.__dict__[_CLONES] = True


def _wrap_clone(stock: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(stock)
    def clone(self: Any) -> Any:
        new, quantizer = stock(self), _te.quantizer_of(self)
        if quantizer is not None and _CLONES in quantizer.__dict__:
            _te.take_own_scales(new)
        return new

    return clone


# --- shards without rows


def patch_empty_shards() -> None:
    """Let empty tensors take part in current scaling's amax reductions; once per process.

    Quantizations without a reduction, and those of tensors with elements, go their old way.
    """
    install("quantize empty", _wrap_quantize)
    install("update empty", _wrap_update)


def _wrap_quantize(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def quantize_impl(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 0 or not getattr(self, _te.REDUCES_AMAX):
            return stock(self, tensor)
        local = stock(_with_group(self, None), tensor)
        _te.inverse_scale_of(local).copy_(_shared_scale(stock, self, _te.amax_group_of(self), tensor))
        return local

    return quantize_impl


def _wrap_update(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def update_quantized(self: Any, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> torch.Tensor:
        group = _te.amax_group_of(dst)
        if src.numel() > 0 or group is None:
            return stock(self, src, dst, **options)
        _te.inverse_scale_of(dst).copy_(_shared_scale(type(self).quantize_impl, self, group, src))
        return dst

    return update_quantized


def _shared_scale(
    quantize: Callable[..., torch.Tensor], quantizer: Any, group: Any, like: torch.Tensor
) -> torch.Tensor:
    """The inverse scale of the whole weight, to whose amax this rank contributes zero. Collective over ``group``."""
    # Sizes that every kernel takes.
    zeros = torch.zeros((16, 16), dtype=like.dtype, device=like.device)
    return _te.inverse_scale_of(quantize(_with_group(quantizer, group), zeros))


def _with_group(quantizer: Any, group: Any) -> Any:
    """A copy of a quantizer that reduces over ``group``, or over none."""
    new = quantizer.copy()
    _te.reduce_amax_over(new, group)
    return new


def take_delayed_scale(local: torch.Tensor) -> None:
    """Give an empty delayed-scaling shard the scale with which an update has just quantized the others.

    Local operation: the ranks of a weight have the same scale and history. Nothing to do for shards with rows.
    """
    if local.numel() == 0:
        _te.inverse_scale_of(local).copy_(_te.quantizer_of(local).scale.reciprocal())


def share_scale(local: torch.Tensor, mesh: DeviceMesh, rows: int) -> None:
    """Give ranks without rows the scale of the first rank, which always has some.

    Collective (broadcast of one float) over ``mesh`` if any of its ranks is empty, local otherwise.

    Args:
        local: This rank's float8 shard.
        mesh: 1-D FSDP shard mesh.
        rows: Rows of the unsharded weight.
    """
    ranks = mesh.size()
    if (ranks - 1) * -(-rows // ranks) >= rows:
        dist.broadcast(_te.inverse_scale_of(local), group_src=0, group=mesh.get_group())
