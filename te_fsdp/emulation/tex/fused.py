"""How the fused kernels (normalization, activation, bias gradient) hand their fp32 result to quantization.

The order of rounding is the kernels' own, format by format
(``pytorch/csrc/extensions/{normalization,activation,bias}.cpp`` and ``common/util/vectorized_pointwise.h``,
``common/cast/mxfp8/*.cuh``):

* no quantizer: rounded once to the output dtype;
* Float8, delayed scaling: one kernel quantizes the fp32 value and records the amax of the fp32 value;
* Float8, current scaling, and NVFP4 without the post-RHT amax: the value is written in the output dtype, then
  quantized with an amax that the first kernel found. Activations take it from the fp32 value (``fmaxf(fabsf(temp),
  max)`` before the store), so the rounded value may exceed it; normalizations take it from the rounded value
  (``rmsnorm_fwd_kernels.cuh``);
* MXFP8 (whose fused kernels round to the input dtype before they look for block maxima), Float8 blocks and
  everything else: rounded to the output dtype, then quantized like any tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from te_fsdp.emulation.tex import formats


def kind(quantizer: Any) -> str:
    """Return the name of a quantizer's class, ``""`` for none; subclasses count as their TransformerEngine base."""
    if quantizer is None:
        return ""
    names = [one.__name__ for one in type(quantizer).__mro__]
    for name in (
        "Float8CurrentScalingQuantizer",
        "Float8Quantizer",
        "MXFP8Quantizer",
        "Float8BlockQuantizer",
        "NVFP4Quantizer",
    ):
        if name in names:
            return name
    return names[0]


def _takes_amax(quantizer: Any) -> bool:
    which = kind(quantizer)
    if which == "Float8CurrentScalingQuantizer":
        return True
    if which == "NVFP4Quantizer":
        row_scaled = bool(getattr(quantizer, "row_scaled_nvfp4", False))
        return not row_scaled and not (quantizer.with_rht and quantizer.with_post_rht_amax)
    return False


def finish(
    value: torch.Tensor, dtype: torch.dtype, quantizer: Any, output: Any = None, *, amax_of_fp32: bool = False
) -> Any:
    """Round, quantize if asked, and write the fp32 result of a fused kernel.

    Args:
        value: fp32, in the logical shape of the result.
        dtype: nominal (unquantized) dtype of the result.
        quantizer: TransformerEngine quantizer, or ``None``.
        output: tensor to write into (quantized if ``quantizer`` is given), or ``None`` for a new one.
        amax_of_fp32: the kernel is an activation, see above.

    Returns:
        ``output`` or a new tensor.
    """
    if quantizer is None:
        if output is None:
            return value.to(dtype)
        output.copy_(value)
        return output
    if kind(quantizer) == "Float8Quantizer":
        if output is None:
            output = formats.create_empty_quantized_tensor(quantizer, list(value.shape), dtype, value.device)
        return formats.quantize(value, quantizer, output)
    rounded = value.to(dtype)
    if amax_of_fp32 and value.numel() and _takes_amax(quantizer):
        return formats.quantize(rounded, quantizer, output, amax=formats.cast.amax_of(value))
    return formats.quantize(rounded, quantizer, output)


__all__ = ["finish", "kind"]
