"""Transformations of quantized buffers: byte transposes, scale reordering, NVFP4 transposes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.formats import cast, mxfp8, nvfp4


def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None) -> torch.Tensor:
    """Return the bytes with the last dim moved to the front, contiguous.

    Args:
        input: uint8 (..., K).
        dtype: TE dtype of the bytes, not used.
        out: destination (K, ...), written in place and returned; new when ``None``.

    Raises:
        EmulationError: ``out`` of another number of elements.
    """
    shape = cast.transposed_shape(input.shape)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=input.device)
    elif out.numel() != input.numel():
        raise EmulationError(f"fp8_transpose: out has shape {tuple(out.shape)}, expected {tuple(shape)}")
    if input.numel() and not input.is_meta:
        flat = input.reshape(cast.flat_2d(input.shape)).view(torch.uint8)
        out.view(torch.uint8).copy_(flat.t().reshape(out.shape))
    return out


def nvfp4_data_transpose(input: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose packed 4-bit data from (M, K/2) to (K, M/2).

    Raises:
        EmulationError: not 2-D, an odd M, or ``out`` of another shape.
    """
    if input.dim() != 2 or input.shape[0] % 2:
        raise EmulationError(
            f"nvfp4_data_transpose: expected packed data (M, K/2) with even M, got {tuple(input.shape)}"
        )
    shape = (input.shape[1] * 2, input.shape[0] // 2)
    if out is None:
        out = torch.empty(shape, dtype=torch.uint8, device=input.device)
    elif tuple(out.shape) != shape:
        raise EmulationError(f"nvfp4_data_transpose: out has shape {tuple(out.shape)}, expected {shape}")
    if input.numel() and not input.is_meta:
        out.copy_(nvfp4.pack(nvfp4.unpack(input).t()))
    return out


def nvfp4_2d_scale_transpose(input: torch.Tensor, output: torch.Tensor, M_tiles: int, K_tiles: int) -> None:
    """Return the columnwise scales of 16x16 tiles from the rowwise ones: ``output[k, m] = input[16 * m, k // 16]``.

    Args:
        input: rowwise scale bytes [up(M, 128), >= K_tiles], each tile's byte repeated over its 16 rows.
        output: columnwise scale bytes [up(K, 128), >= M_tiles]; bytes outside of the tiles become zero.
        M_tiles: tiles along M.
        K_tiles: tiles along K.
    """
    if input.is_meta or output.is_meta:
        return
    tiles = input[: M_tiles * nvfp4.BLOCK : nvfp4.BLOCK, :K_tiles]
    used = tiles.t().repeat_interleave(nvfp4.BLOCK, 0)
    cast.store_scales(output, used, "nvfp4_2d_scale_transpose", clear=True)


def nvfp4_2d_multi_tensor_transpose(
    rowwise_data_list: Sequence[torch.Tensor],
    columnwise_data_list: Sequence[torch.Tensor],
    rowwise_scale_inv_list: Sequence[torch.Tensor],
    columnwise_scale_inv_list: Sequence[torch.Tensor],
    M_list: Sequence[int],
    K_list: Sequence[int],
) -> None:
    """Transpose data and 2-D scales of several NVFP4 tensors from rowwise to columnwise, in place."""
    for data, out, scales, scales_out, rows, cols in zip(
        rowwise_data_list,
        columnwise_data_list,
        rowwise_scale_inv_list,
        columnwise_scale_inv_list,
        M_list,
        K_list,
        strict=True,
    ):
        nvfp4_data_transpose(data.reshape(rows, cols // 2), out=out)
        nvfp4_2d_scale_transpose(
            scales, scales_out, cast.ceil_div(rows, nvfp4.BLOCK), cast.ceil_div(cols, nvfp4.BLOCK)
        )


def swizzle_scales_for_gemm_(tensor: Any) -> None:
    """Reorder a quantized tensor's block scales for the GEMM, in place.

    Other formats and swizzled scales stay as they are. The scale buffers are replaced, not overwritten, as in
    the extension.
    """
    if not hasattr(tensor, "_with_gemm_swizzled_scales") or tensor._with_gemm_swizzled_scales:
        return
    is_mxfp8 = hasattr(tensor, "_fp8_dtype")
    for name in ("rowwise", "columnwise"):
        scales = getattr(tensor, f"_{name}_scale_inv")
        if scales is None:
            continue
        if scales.is_meta:
            pass
        elif is_mxfp8:
            scales = mxfp8.swizzle(scales, columnwise=name == "columnwise")
        else:
            scales = cast.swizzle_scales(scales)
        setattr(tensor, f"_{name}_scale_inv", scales)
    tensor._with_gemm_swizzled_scales = True
