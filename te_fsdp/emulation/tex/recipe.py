"""Delayed scaling's bookkeeping: ``common/recipe/delayed_scaling.cu``."""

from __future__ import annotations

from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import DType

FLT_MAX = torch.finfo(torch.float32).max
_FP8_MAX = {int(DType.kFloat8E4M3): 448.0, int(DType.kFloat8E5M2): 57344.0}


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: torch.Tensor,
    amax_histories: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Roll the amax histories by one and derive new scales, in place.

    Shapes: buffer (sum of n,) fp32 holds the reduced newest amax of every tensor, consecutively; each history
    (length, n); each scale (n,). The newest amax enters (the history's own slot 0 where the reduced value is
    0), slot 0 becomes the next write slot and is zeroed. The scale is ``fp8_max / amax / 2**margin`` of the
    most recent or the largest amax (NaN aside), kept where that amax is 0 or not finite; an infinite result
    becomes FLT_MAX. A tensor whose newest amax is 0 has not been used: its history and scale stay as they are.

    Raises:
        EmulationError: unknown algorithm or dtype.
    """
    if amax_compute_algo not in ("max", "most_recent"):
        raise EmulationError(
            f"unknown amax_compute_algo {amax_compute_algo!r}: expected 'max' or 'most_recent'"
        )
    if int(fp8_dtype) not in _FP8_MAX:
        raise EmulationError(f"delayed scaling of dtype {fp8_dtype!r}: expected E4M3 or E5M2")
    scaled_max = _FP8_MAX[int(fp8_dtype)] * 2.0 ** (-margin)
    start = 0
    for history, scale in zip(amax_histories, scales, strict=True):
        count = scale.numel()
        reduced = amax_reduction_buffer[start : start + count]
        start += count
        newest = torch.where(reduced > 0, reduced, history[0])
        rolled = torch.roll(history, -1, 0)
        rolled[-1] = newest
        amax = newest if amax_compute_algo == "most_recent" else rolled.nan_to_num(0.0, torch.inf).amax(0)
        used = newest != 0
        usable = used & torch.isfinite(amax) & (amax > 0)
        # A Python number over a tensor would be its reciprocal times the number, rounded twice.
        fresh = torch.where(usable, torch.full_like(amax, scaled_max) / torch.where(usable, amax, 1.0), scale)
        scale.copy_(torch.where(torch.isinf(fresh), torch.full_like(fresh, FLT_MAX), fresh))
        rolled[0] = 0.0
        history.copy_(torch.where(used, rolled, history))


__all__ = ["FLT_MAX", "fused_amax_and_scale_update_after_reduction"]
