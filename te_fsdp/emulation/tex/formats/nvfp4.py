"""NVFP4: packed 4-bit values (E2M1), one E4M3 scale per 16 values, one float32 amax per direction.

Buffers of a logical tensor flattened to (M, K): rowwise data (..., K/2), columnwise data transposed (K, M/2),
two values a byte with the even index in the low half. Scale bytes rowwise [up(M, 128), up(K/16, 4)] and
columnwise [up(K, 128), up(M/16, 4)], zero where unused. ``_amax_rowwise`` and ``_amax_columnwise`` [1].

The order of the float32 operations is the kernels', because the result depends on it in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import DType
from te_fsdp.emulation.tex.formats import cast
from te_fsdp.emulation.tex.formats.mxfp8 import check_arch

BLOCK = 16
FP4_MAX = 6.0
_E4M3 = DType.kFloat8E4M3

# Magnitudes of the codes 0..7; code 8 + i is the negative of code i.
_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The two values in each byte, the low half first.
_PAIRS = torch.cartesian_prod(torch.cat((_GRID, -_GRID)), torch.cat((_GRID, -_GRID))).flip(1)


def check_variant(quantizer: Any) -> None:
    """Refuse the variants of the format that are not emulated.

    Raises:
        EmulationError: 4over6 or row-scaled.
    """
    if quantizer.nvfp4_use_4over6:
        raise EmulationError("NVFP4Quantizer: nvfp4_use_4over6 is not emulated")
    if quantizer.row_scaled_nvfp4:
        raise EmulationError("NVFP4Quantizer: row_scaled_nvfp4 is not emulated")


def scale_shape(shape: Sequence[int], *, columnwise: bool) -> tuple[int, int]:
    """Return the padded shape of a scale buffer for a logical shape.

    Raises:
        EmulationError: a flattened dim is not a multiple of 16.
    """
    rows, cols = cast.flat_2d(shape)
    if rows % BLOCK or cols % BLOCK:
        raise EmulationError(
            f"NVFP4 needs both flattened dims to be multiples of {BLOCK}, "
            f"got shape {tuple(shape)} = ({rows}, {cols})"
        )
    first, second = (cols, rows) if columnwise else (rows, cols)
    return cast.round_up(first, 128), cast.round_up(second // BLOCK, 4)


def _emits_swizzled(quantizer: Any, shape: Sequence[int]) -> bool:
    """Return whether the quantization kernel itself writes GEMM-ordered scales, so that no separate pass follows."""
    if not quantizer.optimize_for_gemm:
        return False
    rows, cols = cast.flat_2d(shape)
    if quantizer.with_rht:
        return rows % 64 == 0 and cols % 128 == 0
    return bool(quantizer.with_2d_quantization) and rows % 128 == 0 and cols % 128 == 0


def _buffers(shape: Sequence[int], name: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the new data, scale and amax buffers of one direction, keyed by attribute name."""
    rows, cols = cast.flat_2d(shape)
    columnwise = name == "columnwise"
    data_shape = (cols, rows // 2) if columnwise else (*shape[:-1], cols // 2)
    return {
        f"_{name}_data": cast.empty_bytes(data_shape, device),
        f"_{name}_scale_inv": torch.zeros(
            scale_shape(shape, columnwise=columnwise), dtype=torch.uint8, device=device
        ),
        f"_amax_{name}": torch.zeros(1, dtype=torch.float32, device=device),
    }


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Allocate an NVFP4Tensor (or its storage): data uninitialized, scales and amaxes zero.

    Raises:
        EmulationError: a flattened dim is not a multiple of 16, or a variant that is not emulated.
    """
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Tensor
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    check_variant(quantizer)
    scale_shape(shape, columnwise=False)  # alignment, whatever the usages
    fields: dict[str, Any] = {}
    for name, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        made = _buffers(shape, name, device) if used else {}
        for part in (f"{name}_data", f"{name}_scale_inv", f"amax_{name}"):
            fields[part] = made.get(f"_{part}")
    return cast.construct(
        quantizer,
        NVFP4TensorStorage,
        NVFP4Tensor,
        shape,
        dtype,
        fp4_dtype=quantizer.dtype,
        with_gemm_swizzled_scales=_emits_swizzled(quantizer, shape),
        row_scaled_nvfp4=False,
        nvfp4_use_4over6=False,
        nvfp4_e4m3_max=quantizer.nvfp4_e4m3_max,
        **fields,
    )


def coerce(quantizer: Any, output: Any) -> None:
    """Make the buffers of an existing tensor fit the quantizer's usages: drop, allocate and flag.

    Raises:
        EmulationError: not an NVFP4Tensor, no data at all, row and column data that disagree, or a variant that is not
            emulated.
    """
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    check_variant(quantizer)
    if not isinstance(output, NVFP4TensorStorage):
        raise EmulationError(
            f"quantize: NVFP4Quantizer must write to an NVFP4Tensor, got {type(output).__name__}"
        )
    row, col = output._rowwise_data, output._columnwise_data
    if row is None and col is None:
        raise EmulationError("quantize: the output NVFP4Tensor has no data")
    col_logical = None if col is None else [col.shape[-1] * 2, col.shape[0]]
    shape = col_logical if row is None else [*row.shape[:-1], row.shape[-1] * 2]
    if row is not None and col is not None and cast.flat_2d(shape) != tuple(col_logical):
        raise EmulationError(
            f"quantize: rowwise {tuple(row.shape)} and columnwise {tuple(col.shape)} data disagree"
        )
    device = (row if row is not None else col).device
    output._row_scaled_nvfp4 = False
    output._with_gemm_swizzled_scales = _emits_swizzled(quantizer, shape)
    output._nvfp4_use_4over6 = False
    output._nvfp4_e4m3_max = quantizer.nvfp4_e4m3_max
    for name, used in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        for attribute, made in _buffers(shape, name, device).items():
            if not used:
                setattr(output, attribute, None)
            elif getattr(output, attribute) is None:
                setattr(output, attribute, made)


def round_to_nearest(values: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes 0..15 (uint8) of float32 values: nearest, ties to even, saturating at 6; NaN gives +6."""
    magnitude = torch.nan_to_num(values.abs(), nan=FP4_MAX).clamp_(max=FP4_MAX)
    inverse_step, first = _region(magnitude)
    # In a region the codes count steps, and an even count is an even code: torch.round goes to even on ties.
    return _with_sign(torch.round(magnitude * inverse_step) + first, values)


def round_stochastically(values: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes of float32 values, rounded up or down at random in proportion to the distance.

    Takes 8 random bits a value from torch's default CPU generator, as the extension does from the GPU's.
    """
    magnitude = torch.nan_to_num(values.abs(), nan=FP4_MAX).clamp_(max=FP4_MAX)
    noise = torch.randint(0, 256, values.shape, dtype=torch.uint8).float() / 256.0
    # The noise is below one step, so nothing gets past the next region's first value, code included.
    inverse_step, first = _region(magnitude)
    return _with_sign(torch.floor(magnitude * inverse_step + noise) + first, values)


def _region(magnitude: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1/step of the grid at ``magnitude`` (2 below 2.0, 1 below 4.0, else 0.5), and code - step count."""
    middle, upper = (magnitude >= 2.0).float(), (magnitude >= 4.0).float()
    return 2.0 - middle - 0.5 * upper, 2.0 * (middle + upper)


def _with_sign(code: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the codes 0..7 with the sign bit of ``values``; a NaN counts as positive."""
    negative = torch.signbit(values) & ~torch.isnan(values)
    return code.to(torch.uint8) | (negative.to(torch.uint8) << 3)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack two 4-bit codes per byte along the last dim, the even index in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Return the inverse of :func:`pack`."""
    return torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(-2)


def _encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """Return the global factor (448 * 6) / amax, 1 where amax is 0 or infinite."""
    encode = (torch.full_like(amax, 448.0 * FP4_MAX) / amax).clamp(max=cast.FLOAT32_MAX)
    return torch.where((amax == 0) | (encode == 0), torch.ones_like(encode), encode)


def _quantize_lines(
    lines: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed data and scale bytes of (lines, length) float32 values, blocks of 16 along the second dim."""
    encode = _encode_scale(amax.reshape(()))
    sixth = torch.tensor(1.0 / FP4_MAX, dtype=torch.float32)
    block_scale = (block_amax * (encode * sixth)).clamp(max=cast.FLOAT32_MAX)
    scale_bytes = cast.cast_fp8(block_scale, _E4M3)
    factor = (
        (cast.decode_fp8(scale_bytes, _E4M3) * encode.reciprocal()).reciprocal().clamp(max=cast.FLOAT32_MAX)
    )
    scaled = (lines.view(len(lines), -1, BLOCK) * factor[:, :, None]).view(lines.shape)
    codes = round_stochastically(scaled) if stochastic else round_to_nearest(scaled)
    return pack(codes), scale_bytes


def hadamard(lines: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the random Hadamard transform of 16-wide pieces along the second dim, bfloat16 values as float32."""
    mixed = lines.reshape(-1, BLOCK) @ matrix.float()
    return mixed.to(torch.bfloat16).float().reshape(lines.shape)


def _sources(values: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rowwise (M, K) and columnwise (K, M) float32 sources; RHT concerns the columnwise one only.

    Raises:
        EmulationError: an input or an option that the extension refuses.
    """
    flat = values.reshape(cast.flat_2d(values.shape)).float()
    turned = flat.t().contiguous() if quantizer.columnwise_usage else flat.t()
    if not quantizer.with_rht:
        return flat, turned
    if values.dtype != torch.bfloat16:
        raise EmulationError(f"quantize: NVFP4 with RHT takes bfloat16 input only, got {values.dtype}")
    if not quantizer.with_post_rht_amax:
        raise EmulationError("quantize: NVFP4 with RHT needs with_post_rht_amax=True")
    return flat, hadamard(turned, quantizer.rht_matrix) if quantizer.columnwise_usage else turned


def _block_amaxes(lines: torch.Tensor, two_dim: bool) -> torch.Tensor:
    """Return the largest magnitude of every block (lines, length / 16), in 2-D mode of the 16x16 tile, repeated."""
    count, length = lines.shape
    amax = cast.abs_values(lines).reshape(count, length // BLOCK, BLOCK).amax(2)
    if two_dim:
        amax = amax.view(count // BLOCK, BLOCK, length // BLOCK).amax(1).repeat_interleave(BLOCK, 0)
    return amax


def _check_two_dim(values: torch.Tensor, quantizer: Any) -> None:
    """Refuse columnwise-only 16x16 tiles where the extension's fallback kernel writes nothing."""
    rows, cols = cast.flat_2d(values.shape)
    optimized = values.dtype == torch.bfloat16 and rows % 32 == 0 and cols % 32 == 0
    if quantizer.with_2d_quantization and not quantizer.rowwise_usage and not optimized:
        raise EmulationError(
            "quantize: columnwise-only NVFP4 in 16x16 tiles needs bfloat16 input and dims that are multiples "
            f"of 32; got {values.dtype}, ({rows}, {cols}). The extension would leave the output unwritten"
        )


def fill(
    values: torch.Tensor, quantizer: Any, output: Any, noop: bool, amax: torch.Tensor | None = None
) -> None:
    """Quantize ``values`` (any shape, flattened to (M, K)) into the tensor's buffers.

    ``amax`` replaces the amax of the values in both directions (fused kernels bring theirs along).

    Collective: one MAX all-reduce of the rowwise and columnwise amaxes over the quantizer's group when
    ``with_amax_reduction`` is set, also under ``noop``, as the extension does.

    Raises:
        EmulationError: architecture below 10.0, a variant or input that the extension refuses, or an empty input while
            other ranks reduce.
    """
    if values.numel() == 0:
        cast.check_empty_reduction(quantizer)
        return
    check_arch("quantize: NVFP4")
    check_variant(quantizer)
    _check_two_dim(values, quantizer)
    rowwise, columnwise = _sources(values, quantizer)
    used = [("rowwise", rowwise)] if quantizer.rowwise_usage else []
    used += [("columnwise", columnwise)] if quantizer.columnwise_usage else []
    if not noop:
        for name, source in used:
            getattr(output, f"_amax_{name}").copy_(cast.amax_of(source) if amax is None else amax.reshape(1))
    if quantizer.with_amax_reduction:
        amaxes = torch.cat([getattr(output, f"_amax_{name}") for name, _ in used])
        cast.reduce_max(amaxes, quantizer)
        for (name, _), reduced in zip(used, amaxes.split(1), strict=True):
            getattr(output, f"_amax_{name}").copy_(reduced)
    if noop:
        return
    for name, source in used:
        blocks = _block_amaxes(source, bool(quantizer.with_2d_quantization))
        data, scales = _quantize_lines(
            source, blocks, getattr(output, f"_amax_{name}"), bool(quantizer.stochastic_rounding)
        )
        buffer, scale_buffer = getattr(output, f"_{name}_data"), getattr(output, f"_{name}_scale_inv")
        buffer.copy_(data.reshape(buffer.shape))
        if output._with_gemm_swizzled_scales:
            scales = cast.swizzle_scales(cast.pad_2d(scales, *scale_buffer.shape))
        cast.store_scales(scale_buffer, scales, f"quantize (NVFP4, {name})", clear=True)


def _values(tensor: Any, name: str) -> torch.Tensor:
    """Return the float32 lines of one direction: (M, K) rowwise, (K, M) columnwise.

    Raises:
        EmulationError: an emulated-elsewhere variant, or a scale buffer that is not padded as the kernels require.
    """
    if tensor._row_scaled_nvfp4 or tensor._nvfp4_use_4over6:
        raise EmulationError("NVFP4Tensor: row-scaled and 4over6 variants are not emulated")
    data, scales = getattr(tensor, f"_{name}_data"), getattr(tensor, f"_{name}_scale_inv")
    lines, length = cast.flat_2d(data.shape)
    length *= 2
    expected = (cast.round_up(lines, 128), cast.round_up(length // BLOCK, 4))
    if scales is None or tuple(scales.shape) != expected:
        got = None if scales is None else tuple(scales.shape)
        raise EmulationError(
            f"NVFP4 {name} scales of data {tuple(data.shape)}: expected shape {expected}, got {got}"
        )
    if tensor._with_gemm_swizzled_scales:
        scales = cast.unswizzle_scales(scales)
    scales = scales[:lines, : length // BLOCK]
    factor_inv = torch.tensor(1.0 / (FP4_MAX * 448.0), dtype=torch.float32)
    factor = cast.decode_fp8(scales, _E4M3) * getattr(tensor, f"_amax_{name}").reshape(()) * factor_inv
    signed = _PAIRS[data.reshape(lines, length // BLOCK, BLOCK // 2).int()].flatten(2)
    return (signed * factor[:, :, None]).view(lines, length)


def dequantize(tensor: Any) -> torch.Tensor:
    """Return the float32 values in the logical shape, from the rowwise data.

    Raises:
        EmulationError: no rowwise data.
    """
    if tensor._rowwise_data is None:
        raise EmulationError("dequantize: the NVFP4Tensor has no rowwise data")
    shape = [*tensor._rowwise_data.shape[:-1], tensor._rowwise_data.shape[-1] * 2]
    return _values(tensor, "rowwise").reshape(shape)


def operand(tensor: Any, *, rowwise: bool) -> torch.Tensor:
    """Return the float32 (M, K) values that a GEMM reads in the given direction.

    Raises:
        EmulationError: that direction's data is missing, or its scales are wrongly padded.
    """
    check_arch("GEMM operand: NVFP4")
    name = "rowwise" if rowwise else "columnwise"
    if getattr(tensor, f"_{name}_data") is None:
        raise EmulationError(
            f"GEMM operand: {type(tensor).__name__} is read {name}, but _{name}_data is missing"
        )
    values = _values(tensor, name)
    return values if rowwise else values.t()
