"""MXFP8: 8-bit data, one power-of-two scale (E8M0) per 32 values along K (rowwise) or M (columnwise).

Buffers of a logical tensor flattened to (M, K): data (..., K) for both directions, not transposed; uint8 scales,
rowwise [up(M, 128), up(K/32, 4)] and columnwise [up(M/32, 4), up(K, 128)], zero where unused. With
``optimize_for_gemm`` the scales are in the tile order that the GEMM reads, in buffers of the same shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation import _state
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.formats import cast

BLOCK = 32


def check_arch(what: str) -> None:
    """Refuse hardware without block-scaled tensor cores.

    Raises:
        EmulationError: emulated architecture below 10.0.
    """
    if _state.arch() < (10, 0):
        raise EmulationError(f"{what} needs architecture 10.0 or later, got {_state.arch_name()}")


def scale_shape(shape: Sequence[int], *, columnwise: bool) -> tuple[int, int]:
    """Return the padded shape of a scale buffer for a logical shape.

    Raises:
        EmulationError: a flattened dim is not a multiple of 32.
    """
    rows, cols = cast.flat_2d(shape)
    if rows % BLOCK or cols % BLOCK:
        raise EmulationError(
            f"MXFP8 needs both flattened dims to be multiples of {BLOCK}, "
            f"got shape {tuple(shape)} = ({rows}, {cols})"
        )
    if columnwise:
        return cast.round_up(rows // BLOCK, 4), cast.round_up(cols, 128)
    return cast.round_up(rows, 128), cast.round_up(cols // BLOCK, 4)


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Allocate an MXFP8Tensor (or its storage): data uninitialized, scales zero.

    Raises:
        EmulationError: a flattened dim is not a multiple of 32.
    """
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    fields: dict[str, Any] = {}
    for name, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        scales = scale_shape(shape, columnwise=name == "columnwise")
        fields[f"{name}_data"] = cast.empty_bytes(shape, device) if used else None
        fields[f"{name}_scale_inv"] = torch.zeros(scales, dtype=torch.uint8, device=device) if used else None
    return cast.construct(
        quantizer,
        MXFP8TensorStorage,
        MXFP8Tensor,
        shape,
        dtype,
        fp8_dtype=quantizer.dtype,
        with_gemm_swizzled_scales=bool(quantizer.optimize_for_gemm),
        **fields,
    )


def coerce(quantizer: Any, output: Any) -> None:
    """Make the buffers of an existing tensor fit the quantizer's usages: drop, allocate and re-type.

    Raises:
        EmulationError: not an MXFP8Tensor, no data at all, or row and column data that disagree.
    """
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    if not isinstance(output, MXFP8TensorStorage):
        raise EmulationError(
            f"quantize: MXFP8Quantizer must write to an MXFP8Tensor, got {type(output).__name__}"
        )
    row, col = output._rowwise_data, output._columnwise_data
    present = col if col is not None else row
    if present is None:
        raise EmulationError("quantize: the output MXFP8Tensor has no data")
    if row is not None and row.shape != present.shape:
        raise EmulationError(
            f"quantize: rowwise {tuple(row.shape)} and columnwise {tuple(present.shape)} data disagree"
        )
    shape, device = list(present.shape), present.device
    for name, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        if not used:
            setattr(output, f"_{name}_data", None)
            setattr(output, f"_{name}_scale_inv", None)
            continue
        if getattr(output, f"_{name}_data") is None:
            setattr(output, f"_{name}_data", cast.empty_bytes(shape, device))
        if getattr(output, f"_{name}_scale_inv") is None:
            scales = scale_shape(shape, columnwise=name == "columnwise")
            setattr(output, f"_{name}_scale_inv", torch.zeros(scales, dtype=torch.uint8, device=device))
    output._fp8_dtype = quantizer.dtype
    output._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)


def _block_scales(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the E8M0 scale of each block amax: the smallest power of two not below ``amax / limit``."""
    return cast.e8m0_from_float(amax * torch.tensor(1.0 / limit, dtype=torch.float32))


def _store(output: Any, name: str, scales: torch.Tensor) -> None:
    """Write compact scales of one direction, swizzled if the tensor is flagged so. Padding becomes zero."""
    buffer = getattr(output, f"_{name}_scale_inv")
    if output._with_gemm_swizzled_scales:
        scales = swizzle(cast.pad_2d(scales, *buffer.shape), columnwise=name == "columnwise")
    cast.store_scales(buffer, scales, f"quantize (MXFP8, {name})", clear=True)


def swizzle(scales: torch.Tensor, *, columnwise: bool) -> torch.Tensor:
    """Return padded compact scales in GEMM order; columnwise scales use the layout of the transposed tensor."""
    if columnwise:
        return cast.swizzle_scales(scales.t()).reshape(scales.shape)
    return cast.swizzle_scales(scales)


def unswizzle(scales: torch.Tensor, *, columnwise: bool) -> torch.Tensor:
    """Return the inverse of :func:`swizzle`."""
    if columnwise:
        return cast.unswizzle_scales(scales.reshape(scales.shape[1], scales.shape[0])).t()
    return cast.unswizzle_scales(scales)


def fill(
    values: torch.Tensor, quantizer: Any, output: Any, noop: bool, *, two_dim: bool | None = None
) -> None:
    """Quantize ``values`` (any shape, flattened to (M, K)) into the tensor's buffers.

    With ``two_dim`` (by default what the quantizer says) one scale per 32x32 tile serves both directions.

    Raises:
        EmulationError: architecture below 10.0, or a scale buffer that is too small.
    """
    if noop or values.numel() == 0:
        return
    check_arch("quantize: MXFP8")
    rows, cols = cast.flat_2d(values.shape)
    flat = values.reshape(rows, cols).float()
    magnitude = cast.abs_values(flat)
    limit = cast.fp8_max(quantizer.dtype)
    if two_dim is None:
        two_dim = getattr(quantizer, "with_2d_quantization", False)  # since TransformerEngine 2.19
    if two_dim:
        tiles = magnitude.view(rows // BLOCK, BLOCK, cols // BLOCK, BLOCK).amax((1, 3))
        tile_scales = _block_scales(tiles, limit)
        row_scales = tile_scales.repeat_interleave(BLOCK, 0)
        col_scales = tile_scales.repeat_interleave(BLOCK, 1)
    else:
        row_scales = _block_scales(magnitude.view(rows, cols // BLOCK, BLOCK).amax(2), limit)
        col_scales = _block_scales(magnitude.view(rows // BLOCK, BLOCK, cols).amax(1), limit)
    if output._rowwise_data is not None:
        scaled = flat.view(rows, cols // BLOCK, BLOCK) * cast.e8m0_reciprocal(row_scales)[:, :, None]
        output._rowwise_data.copy_(cast.cast_fp8(scaled, quantizer.dtype).view(output._rowwise_data.shape))
        _store(output, "rowwise", row_scales)
    if output._columnwise_data is not None:
        scaled = flat.view(rows // BLOCK, BLOCK, cols) * cast.e8m0_reciprocal(col_scales)[:, None, :]
        data = cast.cast_fp8(scaled, quantizer.dtype)
        output._columnwise_data.copy_(data.view(output._columnwise_data.shape))
        _store(output, "columnwise", col_scales)


def _values(tensor: Any, name: str) -> torch.Tensor:
    """Return the float32 (M, K) values of one direction.

    Raises:
        EmulationError: a scale buffer that is not padded as the kernels require.
    """
    columnwise = name == "columnwise"
    data, scales = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    rows, cols = cast.flat_2d(data.shape)
    expected = scale_shape(data.shape, columnwise=columnwise)
    if scales is None or tuple(scales.shape) != expected:
        got = None if scales is None else tuple(scales.shape)
        raise EmulationError(
            f"MXFP8 {name} scales of data {tuple(data.shape)}: expected shape {expected}, got {got}"
        )
    if tensor._with_gemm_swizzled_scales:
        scales = unswizzle(scales, columnwise=columnwise)
    factor = cast.e8m0_value(scales)
    if columnwise:
        factor = factor[: rows // BLOCK, :cols].repeat_interleave(BLOCK, 0)
    else:
        factor = factor[:rows, : cols // BLOCK].repeat_interleave(BLOCK, 1)
    return cast.decode_fp8(data, tensor._fp8_dtype).reshape(rows, cols) * factor


def dequantize(tensor: Any) -> torch.Tensor:
    """Return the float32 values in the logical shape, from the rowwise data, or else the columnwise data.

    Raises:
        EmulationError: architecture below 10.0, no data, or wrongly padded scales.
    """
    check_arch("dequantize: MXFP8")
    if tensor._rowwise_data is not None:
        return _values(tensor, "rowwise").reshape(tensor._rowwise_data.shape)
    if tensor._columnwise_data is not None:
        return _values(tensor, "columnwise").reshape(tensor._columnwise_data.shape)
    raise EmulationError("dequantize: the MXFP8Tensor has no data")


def operand(tensor: Any, *, rowwise: bool) -> torch.Tensor:
    """Return the float32 (M, K) values that a GEMM reads in the given direction.

    Raises:
        EmulationError: that direction's data is missing, or its scales are wrongly padded.
    """
    check_arch("GEMM operand: MXFP8")
    name = "rowwise" if rowwise else "columnwise"
    if getattr(tensor, f"_{name}_data") is None:
        raise EmulationError(
            f"GEMM operand: {type(tensor).__name__} is read {name}, but _{name}_data is missing"
        )
    return _values(tensor, name)
