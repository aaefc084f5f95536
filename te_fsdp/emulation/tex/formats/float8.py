"""FP8 with one scale per tensor, by delayed or current scaling.

Buffers of a logical tensor (..., K): ``_data`` (..., K) and ``_transpose`` (K, ...), both uint8, and ``_scale_inv``
[1] in float32. Where the hardware multiplies 8-bit operands in any layout (architecture 10.0) ``_data`` serves both
directions and always exists, and ``_transpose`` is never made. On 9.0 rowwise usage means ``_data`` and columnwise
usage ``_transpose``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation import _state
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.formats import cast


def data_serves_both_directions() -> bool:
    """Return whether 8-bit GEMMs take operands in any layout (``nvte_is_non_tn_fp8_gemm_supported``)."""
    arch = _state.arch()
    return (10, 0) <= arch < (12, 0) or arch >= (13, 0)


def _needed(quantizer: Any) -> tuple[bool, bool]:
    """Return (data, transpose): whether the quantizer's usages need each buffer."""
    both = data_serves_both_directions()
    return bool(quantizer.rowwise_usage or both), bool(quantizer.columnwise_usage and not both)


def create(quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """Allocate a Float8Tensor (or its storage) with uninitialized data and scale."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    need_data, need_transpose = _needed(quantizer)
    return cast.construct(
        quantizer,
        Float8TensorStorage,
        Float8Tensor,
        shape,
        dtype,
        data=cast.empty_bytes(shape, device) if need_data else None,
        fp8_scale_inv=torch.empty(1, dtype=torch.float32, device=device),
        fp8_dtype=quantizer.dtype,
        data_transpose=cast.empty_bytes(cast.transposed_shape(shape), device) if need_transpose else None,
    )


def coerce(quantizer: Any, output: Any) -> None:
    """Make the buffers of an existing tensor fit the quantizer's usages: drop, allocate, flag and re-type.

    Raises:
        EmulationError: not a Float8Tensor, no usage, no data at all, or data and transpose that disagree.
    """
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    name = type(quantizer).__name__
    if not isinstance(output, Float8TensorStorage):
        raise EmulationError(f"quantize: {name} must write to a Float8Tensor, got {type(output).__name__}")
    need_data, need_transpose = _needed(quantizer)
    if not (need_data or need_transpose):
        raise EmulationError(f"quantize: {name} has neither rowwise nor columnwise usage")
    data, transpose = output._data, output._transpose
    if data is None and transpose is None:
        raise EmulationError("quantize: the output Float8Tensor has no data")
    shape = list(data.shape) if transpose is None else [*transpose.shape[1:], *transpose.shape[:1]]
    if data is not None and list(data.shape) != shape:
        raise EmulationError(
            f"quantize: data {tuple(data.shape)} and transpose {tuple(transpose.shape)} disagree"
        )
    device = (data if data is not None else transpose).device
    if not need_data:
        output._data = None
    elif data is None:
        output._data = cast.empty_bytes(shape, device)
    if not need_transpose:
        output._transpose = None
    elif transpose is None:
        output._transpose = cast.empty_bytes(cast.transposed_shape(shape), device)
    output._transpose_invalid = not need_transpose
    output._fp8_dtype = quantizer.dtype


def _write(values: torch.Tensor, scale: torch.Tensor, quantizer: Any, output: Any) -> None:
    """Cast ``values * scale`` into the buffers and store ``1 / scale``."""
    if output._data is None:
        raise NotImplementedError(
            f"{type(quantizer).__name__}: columnwise-only per-tensor FP8 quantization is not implemented by "
            "the extension either: its kernel needs rowwise output storage"
        )
    data = cast.cast_fp8(values.float() * scale, quantizer.dtype)
    output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        rows, cols = cast.flat_2d(values.shape)
        output._transpose.copy_(data.view(rows, cols).t().reshape(output._transpose.shape))
    output._scale_inv.copy_(scale.reciprocal().reshape(output._scale_inv.shape))


def fill_delayed(values: torch.Tensor, quantizer: Any, output: Any, noop: bool) -> None:
    """Quantize with the quantizer's own scale and raise ``quantizer.amax`` to the amax of ``values``.

    An amax without elements is kept nowhere: the kernel sees a null pointer.
    """
    if noop or values.numel() == 0:
        return
    _write(values, quantizer.scale.reshape(()), quantizer, output)
    if quantizer.amax.numel() == 0:
        return
    quantizer.amax.copy_(torch.maximum(quantizer.amax, cast.amax_of(values).reshape(quantizer.amax.shape)))


def fill_current(
    values: torch.Tensor, quantizer: Any, output: Any, noop: bool, amax: torch.Tensor | None = None
) -> None:
    """Quantize with the scale of the tensor's own amax, or of the given one (fused kernels bring theirs).

    Collective: one MAX all-reduce of the amax over the quantizer's group when ``with_amax_reduction`` is set,
    also under ``noop``, as the extension does.

    Raises:
        EmulationError: empty input while other ranks reduce.
    """
    if values.numel() == 0:
        cast.check_empty_reduction(quantizer)
        return
    if output._data is None:
        _write(values, torch.ones(()), quantizer, output)  # raises before any collective, like the extension
    if noop:
        amax = torch.zeros(1)
    else:
        amax = cast.amax_of(values) if amax is None else amax.reshape(1).clone()
    cast.reduce_max(amax, quantizer)
    if noop:
        return
    scale = cast.scale_from_amax(
        amax,
        cast.fp8_max(quantizer.dtype),
        epsilon=quantizer.amax_epsilon,
        power_of_two=quantizer.force_pow_2_scales,
    )
    _write(values, scale.reshape(()), quantizer, output)


def dequantize(tensor: Any) -> torch.Tensor:
    """Return the float32 values in the logical shape, from ``_data``.

    Raises:
        EmulationError: no ``_data``.
    """
    if tensor._data is None:
        raise EmulationError("dequantize: the Float8Tensor has no rowwise data")
    return cast.decode_fp8(tensor._data, tensor._fp8_dtype) * tensor._scale_inv.reshape(())


def operand(tensor: Any, *, rowwise: bool) -> torch.Tensor:
    """Return the float32 (M, K) values that a GEMM reads in the given direction.

    Raises:
        EmulationError: the buffer that the kernel would read is missing or flagged invalid.
    """
    both = data_serves_both_directions()
    has_transpose = tensor._transpose is not None and not tensor._transpose_invalid
    if tensor._data is not None and (rowwise or both):
        values = cast.decode_fp8(tensor._data, tensor._fp8_dtype)
        values = values.reshape(cast.flat_2d(tensor._data.shape))
    elif has_transpose and (both or not rowwise):
        values = cast.decode_fp8(tensor._transpose, tensor._fp8_dtype)
        values = values.reshape(tensor._transpose.shape[0], -1).t()
    else:
        if rowwise:
            state = "_data is missing"
        elif tensor._transpose is None:
            state = "_transpose is missing"
        else:
            state = "_transpose is flagged invalid"
        raise EmulationError(
            f"GEMM operand: {type(tensor).__name__} is read {'rowwise' if rowwise else 'columnwise'} on "
            f"architecture {_state.arch_name()}, but {state}"
        )
    return values * tensor._scale_inv.reshape(())
