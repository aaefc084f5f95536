"""Scales of quantized shards without rows ([Note: shards without rows])."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.quantized.quantizer_record import with_group
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.patches import Replacements, wrapping


# [Note: shards without rows] FSDP2 shards rows into chunks of ceil(M / n), so small weights leave ranks
# without rows. These ranks still participate in the amax reduction and read the gathered data with their own
# copy of the scale. TE 2.20.2 skips empty tensors in two places. Its extension returns before the all-reduce,
# so other ranks wait forever. Its Adam kernel for delayed scaling does not update the scale.
@wrapping
def update_quantized(
    self: Any, src: torch.Tensor, dst: torch.Tensor, *, stock: Callable[..., torch.Tensor], **options: Any
) -> torch.Tensor:
    """Quantize into a tensor, if empty as part of the amax reduction of the others. Collective as TE's method."""
    group = _te.amax_group_of(dst)
    # TE skips the amax reduction of an empty tensor. The other ranks of the group would wait for this one.
    if src.numel() > 0 or group is None:
        return stock(self, src, dst, **options)
    _te.inverse_scale_of(dst).copy_(_shared_scale(self, group, src))
    return dst


@wrapping
def quantize_impl(self: Any, tensor: torch.Tensor, *, stock: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Quantize a tensor, if empty as part of the amax reduction of the others. Collective as TE's method."""
    if tensor.numel() > 0 or not getattr(self, _te.REDUCES_AMAX):
        return stock(self, tensor)
    local = stock(with_group(self, None), tensor)
    _te.inverse_scale_of(local).copy_(_shared_scale(self, _te.amax_group_of(self), tensor))
    return local


EMPTY_SHARDS: Replacements = (
    (None, "quantize empty", quantize_impl),
    (None, "update empty", update_quantized),
)


def _shared_scale(quantizer: Any, group: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the inverse scale of the unsharded weight; this rank contributes an amax of 0.

    Collective over ``group``.
    """
    # A size that every kernel supports.
    zeros = torch.zeros((16, 16), dtype=like.dtype, device=like.device)
    return _te.inverse_scale_of(with_group(quantizer, group).quantize_impl(zeros))


def copy_delayed_scale(local: torch.Tensor) -> None:
    """Set the scale of an empty delayed-scaling shard to the one that an update has used on other ranks.

    Local operation, because the ranks of a weight have identical scales and histories. Shards with rows are not
    changed.
    """
    if local.numel() == 0:
        _te.inverse_scale_of(local).copy_(_te.quantizer_of(local).scale.reciprocal())


def share_scale(local: torch.Tensor, mesh: DeviceMesh, rows: int) -> None:
    """Copy the scale of a float8 weight from the first rank, which always has rows, to ranks without rows.

    Collective (broadcast of one float) over the 1-D ``mesh`` if one of its ranks is empty, else local. ``rows``
    is the number of rows of the unsharded weight.
    """
    ranks = mesh.size()
    if (ranks - 1) * -(-rows // ranks) >= rows:
        dist.broadcast(_te.inverse_scale_of(local), group_src=0, group=mesh.get_group())
