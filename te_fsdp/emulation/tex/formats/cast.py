"""Steps of a quantization that all formats share.

Every function works on plain CPU tensors and mirrors one documented step of the CUDA kernels. What a kernel
leaves undefined (padding, values that no thread writes) is zero here, so that runs are reproducible.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import DType, to_torch_dtype

#: Largest finite value of each 8-bit type.
FP8_MAX = {int(DType.kFloat8E4M3): 448.0, int(DType.kFloat8E5M2): 57344.0}
FLOAT32_MAX = torch.finfo(torch.float32).max

#: High-precision input dtypes of the quantization kernels.
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_NAN_BYTE = 0x7F  # both 8-bit types; the conversion instruction drops the sign of a NaN
_LOOK_UP_FROM = 2048  # elements
_EXPONENT_MASK = -8388608  # 0xFF800000 as a signed 32-bit integer: sign and exponent of a float32

# A scale tensor in the order that block-scaled GEMMs read: tiles of 128 rows by 4 columns, each stored as 32 groups of
# (4 row quarters, 4 columns).
_TILE_ROWS, _TILE_COLS, _QUARTER = 128, 4, 32


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return ceil_div(value, multiple) * multiple


def flat_2d(shape: Sequence[int]) -> tuple[int, int]:
    """Return ``(M, K)`` of a logical shape: all dims but the last flattened. A 0-dim shape is ``(1, 1)``."""
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), int(shape[-1])


def transposed_shape(shape: Sequence[int]) -> list[int]:
    """Return a shape with the last dim moved to the front, as transposed 8-bit buffers have it."""
    return [*shape[-1:], *shape[:-1]]


def check_input(tensor: torch.Tensor, what: str) -> None:
    """Refuse an input whose dtype no quantization kernel takes.

    Raises:
        EmulationError: dtype other than float32, float16 or bfloat16.
    """
    if tensor.dtype not in INPUT_DTYPES:
        raise EmulationError(f"{what}: expected a float32, float16 or bfloat16 input, got {tensor.dtype}")


def fp8_max(dtype: Any) -> float:
    """Return the largest finite value of a TE 8-bit dtype.

    Raises:
        EmulationError: not an 8-bit float.
    """
    result = FP8_MAX.get(int(dtype))
    if result is None:
        raise EmulationError(f"expected an FP8 dtype (kFloat8E4M3 or kFloat8E5M2), got {dtype!r}")
    return result


def cast_fp8(values: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return the bytes (uint8) of float32 ``values``, rounded to nearest even.

    Larger magnitudes and infinities saturate, NaN stays NaN. The clamp comes first because torch's own cast
    would turn an overflow into NaN or infinity.
    """
    limit = fp8_max(dtype)
    out = values.clamp(-limit, limit).to(to_torch_dtype(dtype)).view(torch.uint8)
    # The sign of a NaN goes: takes half the time of masked_fill_.
    return out.sub_((out == 0xFF).view(torch.uint8), alpha=0xFF - _NAN_BYTE)


def decode_fp8(data: torch.Tensor, dtype: Any) -> torch.Tensor:
    """Return the float32 values of 8-bit ``data`` (uint8), scale not applied."""
    fp8_max(dtype)
    stored = to_torch_dtype(dtype)
    if stored is torch.float8_e4m3fn and type(data) is torch.Tensor and data.numel() > _LOOK_UP_FROM:
        return _e4m3_values().index_select(0, data.reshape(-1).int()).view(data.shape)
    return data.contiguous().view(stored).float()


@functools.cache
def _e4m3_values() -> torch.Tensor:
    """Return the value of each byte. A lookup is four times as fast as torch's cast."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def abs_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the float32 magnitudes with NaN as 0: the kernels' maximum ignores NaN (``fmaxf``)."""
    return torch.nan_to_num(tensor.float().abs(), nan=0.0, posinf=math.inf)


def amax_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude as a float32 tensor of shape [1]; NaN is ignored and an empty tensor gives 0."""
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=tensor.device)
    return abs_values(tensor).max().reshape(1)


def scale_from_amax(
    amax: torch.Tensor,
    limit: float,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """Return the quantization scale ``limit / amax`` of each amax, float32 (``compute_scale_from_amax``).

    Args:
        amax: float32, any shape.
        limit: largest finite value of the target type.
        epsilon: floor of amax.
        power_of_two: cut the scale down to a power of two.
        value_for_inf: replaces a quotient that overflows float32.

    Returns:
        Scales of the shape of ``amax``; 1 where amax is 0, infinite or NaN.
    """
    amax = torch.where(amax < epsilon, torch.full_like(amax, epsilon), amax)
    scale = torch.full_like(amax, limit) / amax
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, value_for_inf), scale)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    undefined = torch.isinf(amax) | torch.isnan(amax) | (amax == 0)
    return torch.where(undefined, torch.ones_like(scale), scale)


def e8m0_from_float(values: torch.Tensor) -> torch.Tensor:
    """Return the E8M0 bytes of non-negative float32 values, rounded up: byte ``e`` is ``2 ** (e - 127)``.

    Infinity and what rounds beyond become 0xFE, NaN becomes 0xFF. Zero and everything up to ``2 ** -127`` become byte
    0.
    """
    bits = values.contiguous().view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent < 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    result = exponent + up.to(torch.int32)
    result = torch.where(torch.isinf(values), torch.full_like(result, 0xFE), result)
    result = torch.where(torch.isnan(values), torch.full_like(result, 0xFF), result)
    return result.to(torch.uint8)


def _power_of_two(biased_exponent: torch.Tensor) -> torch.Tensor:
    """Return the float32 ``2 ** (e - 127)`` of int32 exponents: 0 gives the subnormal ``2 ** -127``, 255 NaN."""
    bits = biased_exponent << 23
    bits = torch.where(biased_exponent == 0, torch.full_like(bits, 0x00400000), bits)
    bits = torch.where(biased_exponent == 255, torch.full_like(bits, 0x7FFFFFFF), bits)
    return bits.view(torch.float32)


def e8m0_value(scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 value of E8M0 bytes."""
    return _power_of_two(scales.to(torch.int32))


def e8m0_reciprocal(scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 reciprocal of E8M0 bytes; byte 254 gives the subnormal ``2 ** -127``, NaN stays NaN."""
    exponent = scales.to(torch.int32)
    return _power_of_two(torch.where(exponent == 255, exponent, 254 - exponent))


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the padded row scales (multiples of 128 rows and 4 columns) in GEMM tile order; the shape stays."""
    rows, cols = scales.shape
    tiles = scales.reshape(rows // _TILE_ROWS, 4, _QUARTER, cols // _TILE_COLS, _TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols)


def unswizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the inverse of :func:`swizzle_scales`."""
    rows, cols = scales.shape
    tiles = scales.reshape(rows // _TILE_ROWS, cols // _TILE_COLS, _QUARTER, 4, _TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, cols)


def pad_2d(tensor: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Return ``tensor`` extended with zeros at the bottom and on the right to ``(rows, cols)``."""
    missing = (0, cols - tensor.shape[1], 0, rows - tensor.shape[0])
    return tensor if missing == (0, 0, 0, 0) else torch.nn.functional.pad(tensor, missing)


def store_scales(buffer: torch.Tensor, values: torch.Tensor, what: str, *, clear: bool) -> None:
    """Write the used part of a scale tensor into its upper left corner, in place.

    Args:
        buffer: destination, at least as large as ``values``.
        values: used scales, 2-D.
        what: name for the error.
        clear: zero the padding first; otherwise it keeps what it held.

    Raises:
        EmulationError: the buffer is too small; a kernel would write out of bounds.
    """
    if buffer.dim() != 2 or buffer.shape[0] < values.shape[0] or buffer.shape[1] < values.shape[1]:
        raise EmulationError(
            f"{what}: scale buffer of shape {tuple(buffer.shape)} cannot hold {tuple(values.shape)} scales; "
            "allocate it with the quantizer's get_scale_shape()"
        )
    if clear:
        buffer.zero_()
    buffer[: values.shape[0], : values.shape[1]].copy_(values)


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return the device that buffers are made on: "cuda" means the CPU here, meta stays meta."""
    device = torch.device("cpu" if device is None else device)
    return torch.device("cpu") if device.type == "cuda" else device


def empty_bytes(shape: Iterable[int], device: torch.device) -> torch.Tensor:
    """Return an uninitialized uint8 buffer, like the extension's own allocation."""
    return torch.empty(tuple(shape), dtype=torch.uint8, device=device)


def construct(
    quantizer: Any,
    storage_class: type,
    tensor_class: type,
    shape: Sequence[int],
    dtype: torch.dtype,
    **fields: Any,
) -> Any:
    """Return TE's tensor object around buffers: the bare storage if the quantizer is internal, else the tensor."""
    if quantizer.internal:
        return storage_class(quantizer=quantizer, fake_dtype=dtype, **fields)
    shape = list(shape)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    buffers = [value for value in fields.values() if isinstance(value, torch.Tensor)]
    return tensor_class(
        shape=shape, stride=strides, dtype=dtype, quantizer=quantizer, device=buffers[0].device, **fields
    )


def reduce_max(amaxes: torch.Tensor, quantizer: Any) -> None:
    """Run a MAX all-reduce of ``amaxes`` in place over the quantizer's group, if it requests one.

    Collective: one all-reduce over the quantizer's canonical amax group.
    """
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)


def check_empty_reduction(quantizer: Any) -> None:
    """Refuse an empty input where the other ranks of the group reduce an amax.

    The compiled extension returns before its all-reduce on an empty input (``csrc/quantizer.cpp``: both the current
    scaling and the NVFP4 quantizer), so on GPUs the ranks that hold data would wait for this one forever.

    Raises:
        EmulationError: ``with_amax_reduction`` over a group of more than one rank.
    """
    if not quantizer.with_amax_reduction:
        return
    size = torch.distributed.get_world_size(quantizer._canonicalized_amax_reduction_group())
    if size > 1:
        raise EmulationError(
            f"{type(quantizer).__name__}: empty input with amax reduction over {size} ranks. The compiled "
            "extension skips the all-reduce on an empty input, so on GPUs the other ranks hang. Reduce the "
            "amax outside, or give every rank a non-empty shard"
        )
