"""Conversion of values to a dtype that must represent their magnitudes."""

from __future__ import annotations

import torch

from te_fsdp.checkpoint.manifest import dtype_name
from te_fsdp.errors import CheckpointError


def rounded(name: str, dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor in another dtype, each value rounded once. Local operation.

    Raise CheckpointError for a finite value beyond the range of a ``dtype`` with fewer exponents (FP16), which would
    become infinite. Reads the extremes on the host then.
    """
    result = tensor.to(dtype)
    # Conversions to bf16 are not checked: it lacks only the last 0.4 % of the range of fp32.
    is_narrower = torch.finfo(dtype).tiny > torch.finfo(tensor.dtype).tiny
    # The extremes allocate nothing; elements are compared only if one is infinite or NaN.
    if not is_narrower or not result.numel() or all(one.isfinite() for one in result.aminmax()):
        return result
    if bool((result.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(
            f"{name}: values beyond the range of {dtype_name(dtype)}",
            expected=f"at most {torch.finfo(dtype).max:.6g}",
            got=f"{tensor[tensor.isfinite()].abs().max():.6g}",
            why="They would become infinite",
            fix="another dtype, such as bfloat16",
        )
    return result
