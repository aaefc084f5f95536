"""Shards of per-tensor float8 weights without a single row.

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

from te_fsdp import _te

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["mend_empty", "share_scale", "take_delayed_scale"]

_MENDED = "_te_fsdp_mends_empty"


def mend_empty() -> None:
    """Let empty tensors take part in current scaling's amax reductions; once per process.

    Quantizations without a reduction, and those of tensors with elements, go their old way.
    """
    for cls in _te.amax_quantizer_classes():
        # NVFP4's shards hold whole blocks, so that none is empty.
        if cls.__name__ == "Float8CurrentScalingQuantizer" and _MENDED not in cls.__dict__:
            cls.quantize_impl = _wrap_quantize(cls.quantize_impl)  # type: ignore[attr-defined]
            cls.update_quantized = _wrap_update(cls.update_quantized)  # type: ignore[attr-defined]
            setattr(cls, _MENDED, True)


def _wrap_quantize(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def quantize_impl(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 0 or not self.with_amax_reduction:
            return stock(self, tensor)
        local = stock(_with_group(self, None), tensor)
        _scale(local).copy_(_shared_scale(stock, self, self.amax_reduction_group, tensor))
        return local

    return quantize_impl


def _wrap_update(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(stock)
    def update_quantized(self: Any, src: torch.Tensor, dst: torch.Tensor, **options: Any) -> torch.Tensor:
        group = getattr(dst, "amax_reduction_group", None)
        if src.numel() > 0 or group is None:
            return stock(self, src, dst, **options)
        _scale(dst).copy_(_shared_scale(type(self).quantize_impl, self, group, src))
        return dst

    return update_quantized


def _shared_scale(
    quantize: Callable[..., torch.Tensor], quantizer: Any, group: Any, like: torch.Tensor
) -> torch.Tensor:
    """The inverse scale of the whole weight, to whose amax this rank contributes zero. Collective over ``group``."""
    # Sizes that every kernel takes.
    zeros = torch.zeros((16, 16), dtype=like.dtype, device=like.device)
    return _scale(quantize(_with_group(quantizer, group), zeros))


def _scale(local: torch.Tensor) -> torch.Tensor:
    """A float8 tensor's inverse scale: one float, the tensor's own buffer."""
    return local.get_metadata()["fp8_scale_inv"]  # type: ignore[attr-defined]


def _with_group(quantizer: Any, group: Any) -> Any:
    """A copy of a quantizer that reduces over ``group``, or over none."""
    new = quantizer.copy()
    new.with_amax_reduction, new.amax_reduction_group = group is not None, group
    return new


def take_delayed_scale(local: torch.Tensor) -> None:
    """Give an empty delayed-scaling shard the scale with which an update has just quantized the others.

    Local operation: the ranks of a weight have the same scale and history. Nothing to do for shards with rows.
    """
    if local.numel() == 0:
        _scale(local).copy_(_te.quantizer_of(local).scale.reciprocal())


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
        dist.broadcast(_scale(local), group_src=0, group=mesh.get_group())
