"""FP8 with float32 scales per 1x128 block (1-D) or 128x128 block (2-D).

Buffers of a logical tensor flattened to (M, K): rowwise data (..., K), columnwise data transposed (K, ...).
Inverse scales in float32: 2-D rowwise [c(M/128), up(c(K/128), 4)], columnwise [c(K/128), up(c(M/128), 4)]; 1-D rowwise
[c(K/128), up(M, 4)], columnwise [c(M/128), up(K, 4)], that is with the block dim first. The padding is never written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation import _state
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.formats import cast

BLOCK = 128


def _blocks(size: int) -> int:
    return cast.ceil_div(size, BLOCK)


def scale_shape(shape: Sequence[int], block_dim: int, *, columnwise: bool) -> tuple[int, int]:
    """Return the padded shape of a scale buffer for a logical shape.

    Raises:
        EmulationError: blocks of another number of dims than 1 or 2.
    """
    rows, cols = cast.flat_2d(shape)
    if block_dim == 2:
        first, second = (cols, rows) if columnwise else (rows, cols)
        return _blocks(first), cast.round_up(_blocks(second), 4)
    if block_dim == 1:
        return (
            (_blocks(rows), cast.round_up(cols, 4)) if columnwise else (_blocks(cols), cast.round_up(rows, 4))
        )
    raise EmulationError(f"Float8BlockQuantizer: block_scaling_dim must be 1 or 2, got {block_dim}")


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Allocate a Float8BlockwiseQTensor (or its storage): data uninitialized, scales zero."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    fields: dict[str, Any] = {}
    for name, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        columnwise = name == "columnwise"
        data_shape = cast.transposed_shape(shape) if columnwise else shape
        scales = scale_shape(shape, quantizer.block_scaling_dim, columnwise=columnwise)
        fields[f"{name}_data"] = cast.empty_bytes(data_shape, device) if used else None
        fields[f"{name}_scale_inv"] = (
            torch.zeros(scales, dtype=torch.float32, device=device) if used else None
        )
    return cast.construct(
        quantizer,
        Float8BlockwiseQTensorStorage,
        Float8BlockwiseQTensor,
        shape,
        dtype,
        fp8_dtype=quantizer.dtype,
        is_2D_scaled=quantizer.block_scaling_dim == 2,
        **fields,
    )


def coerce(quantizer: Any, output: Any) -> None:
    """Make the buffers of an existing tensor fit the quantizer's usages: drop and allocate.

    Raises:
        EmulationError: not a Float8BlockwiseQTensor, no data at all, or row and column data that disagree.
    """
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    if not isinstance(output, Float8BlockwiseQTensorStorage):
        raise EmulationError(
            "quantize: Float8BlockQuantizer must write to a Float8BlockwiseQTensor, "
            f"got {type(output).__name__}"
        )
    row, col = output._rowwise_data, output._columnwise_data
    if row is None and col is None:
        raise EmulationError("quantize: the output Float8BlockwiseQTensor has no data")
    col_logical = None if col is None else [*col.shape[1:], *col.shape[:1]]
    shape = col_logical if row is None else list(row.shape)
    if row is not None and col is not None and shape != col_logical:
        raise EmulationError(
            f"quantize: rowwise {tuple(row.shape)} and columnwise {tuple(col.shape)} data disagree"
        )
    device = (row if row is not None else col).device
    for name, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        if not used:
            setattr(output, f"_{name}_data", None)
            setattr(output, f"_{name}_scale_inv", None)
            continue
        columnwise = name == "columnwise"
        if getattr(output, f"_{name}_data") is None:
            data_shape = cast.transposed_shape(shape) if columnwise else shape
            setattr(output, f"_{name}_data", cast.empty_bytes(data_shape, device))
        if getattr(output, f"_{name}_scale_inv") is None:
            scales = scale_shape(shape, quantizer.block_scaling_dim, columnwise=columnwise)
            setattr(output, f"_{name}_scale_inv", torch.zeros(scales, dtype=torch.float32, device=device))


def _fill_2d(flat: torch.Tensor, options: dict[str, Any], output: Any) -> None:
    """Quantize with one scale per 128x128 block, shared by both directions."""
    rows, cols = flat.shape
    mb, kb = _blocks(rows), _blocks(cols)
    magnitude = cast.pad_2d(cast.abs_values(flat), mb * BLOCK, kb * BLOCK)
    scale = cast.scale_from_amax(magnitude.view(mb, BLOCK, kb, BLOCK).amax((1, 3)), **options)
    factor = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    data = cast.cast_fp8(flat * factor, output._fp8_dtype)
    inverse = scale.reciprocal()
    if output._rowwise_data is not None:
        output._rowwise_data.copy_(data.view(output._rowwise_data.shape))
        cast.store_scales(output._rowwise_scale_inv, inverse, "quantize (block, rowwise)", clear=False)
    if output._columnwise_data is not None:
        output._columnwise_data.copy_(data.t().reshape(output._columnwise_data.shape))
        cast.store_scales(
            output._columnwise_scale_inv, inverse.t(), "quantize (block, columnwise)", clear=False
        )


def _fill_1d(flat: torch.Tensor, options: dict[str, Any], output: Any) -> None:
    """Quantize with rowwise scales per 1x128 block and independent columnwise scales per 128x1 block."""
    for name, source in (("rowwise", flat), ("columnwise", flat.t())):
        buffer = getattr(output, f"_{name}_data")
        if buffer is None:
            continue
        lines, length = source.shape  # the blocks run along the second dim
        blocks = _blocks(length)
        magnitude = cast.pad_2d(cast.abs_values(source), lines, blocks * BLOCK)
        scale = cast.scale_from_amax(magnitude.view(lines, blocks, BLOCK).amax(2), **options)
        factor = scale.repeat_interleave(BLOCK, 1)[:, :length]
        buffer.copy_(cast.cast_fp8(source * factor, output._fp8_dtype).reshape(buffer.shape))
        inverse = scale.reciprocal().t()
        cast.store_scales(
            getattr(output, f"_{name}_scale_inv"), inverse, f"quantize (block, {name})", clear=False
        )


def fill(values: torch.Tensor, quantizer: Any, output: Any, noop: bool) -> None:
    """Quantize ``values`` (any shape, flattened to (M, K)) into the tensor's buffers.

    An existing tensor is quantized to the dtype and block shape that it carries, as in the extension.

    Raises:
        EmulationError: scales that need not be powers of two on architecture 10.0 or later, where block scaling runs
            on MXFP8 hardware.
    """
    if values.numel() == 0:
        if not values.shape[-1]:
            raise EmulationError(
                f"quantize: FP8 block scaling of shape {tuple(values.shape)}: the extension divides by a last dim "
                "of 0 and ends the process (signal FPE)"
            )
        return
    if _state.arch() >= (10, 0) and not quantizer.force_pow_2_scales:
        raise EmulationError(
            f"quantize: FP8 block scaling on architecture {_state.arch_name()} runs on MXFP8 hardware, which "
            "needs power-of-two scales: set force_pow_2_scales=True (in the recipe, leave "
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES unset)"
        )
    if noop:
        return
    options = {
        "limit": cast.fp8_max(output._fp8_dtype),
        "epsilon": quantizer.amax_epsilon,
        "power_of_two": quantizer.force_pow_2_scales,
        "value_for_inf": torch.finfo(values.dtype).max,
    }
    flat = values.reshape(cast.flat_2d(values.shape)).float()
    if output._is_2D_scaled:
        _fill_2d(flat, options, output)
    else:
        _fill_1d(flat, options, output)


def _values(tensor: Any, name: str) -> torch.Tensor:
    """Return the float32 (M, K) values of one direction.

    Raises:
        EmulationError: scales of the wrong shape, or not powers of two on architecture 10.0 or later.
    """
    columnwise = name == "columnwise"
    data, scales = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    shape = [*data.shape[1:], *data.shape[:1]] if columnwise else list(data.shape)
    rows, cols = cast.flat_2d(shape)
    expected = scale_shape(shape, 2 if tensor._is_2D_scaled else 1, columnwise=columnwise)
    if scales is None or tuple(scales.shape) != expected:
        got = None if scales is None else tuple(scales.shape)
        raise EmulationError(
            f"block-scaled {name} scales of shape {tuple(shape)}: expected {expected}, got {got}"
        )
    lines, length = (cols, rows) if columnwise else (rows, cols)
    if tensor._is_2D_scaled:
        used = scales[:, : _blocks(length)]
        factor = used.repeat_interleave(BLOCK, 0)[:lines]
    else:
        used = factor = scales[:, :lines].t()
    if _state.arch() >= (10, 0) and not bool((torch.frexp(used).mantissa == 0.5).all()):
        raise EmulationError(
            f"block-scaled {name} scales on architecture {_state.arch_name()} must be powers of two"
        )
    factor = factor.repeat_interleave(BLOCK, 1)[:, :length]
    values = cast.decode_fp8(data, tensor._fp8_dtype).reshape(lines, length) * factor
    return values.t() if columnwise else values


def dequantize(tensor: Any) -> torch.Tensor:
    """Refuse: the extension has no dequantization of this format, TransformerEngine does it in Python.

    Raises:
        EmulationError: always.
    """
    raise EmulationError(
        f"dequantize: the extension does not dequantize {type(tensor).__name__}; "
        "call the tensor's dequantize()"
    )


def operand(tensor: Any, *, rowwise: bool) -> torch.Tensor:
    """Return the float32 (M, K) values that a GEMM reads in the given direction.

    Raises:
        EmulationError: that direction's data is missing, or its scales are wrong for the architecture.
    """
    name = "rowwise" if rowwise else "columnwise"
    if getattr(tensor, f"_{name}_data") is None:
        raise EmulationError(
            f"GEMM operand: {type(tensor).__name__} is read {name}, but _{name}_data is missing"
        )
    return _values(tensor, name)
