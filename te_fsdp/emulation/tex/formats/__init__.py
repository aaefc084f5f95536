"""Operations on TransformerEngine's quantized tensors, in PyTorch.

The functions here replace those of the compiled extension with the same names. They recognize TransformerEngine's own
quantizers by their exact class, as the extension does, and read and write the attributes of its tensor classes, which
are imported only when needed because they import the extension themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex.enums import to_torch_dtype
from te_fsdp.emulation.tex.formats import blockwise, cast, float8, mxfp8, nvfp4
from te_fsdp.emulation.tex.formats.transform import (
    fp8_transpose,
    nvfp4_2d_multi_tensor_transpose,
    nvfp4_2d_scale_transpose,
    nvfp4_data_transpose,
    swizzle_scales_for_gemm_,
)

Fill = Callable[[torch.Tensor, Any, Any, bool], None]

# Exact classes, like the extension's own type check: a subclass of a quantizer is not recognized there either.
_FORMATS: dict[str, tuple[ModuleType, Fill]] = {
    "Float8Quantizer": (float8, float8.fill_delayed),
    "Float8CurrentScalingQuantizer": (float8, float8.fill_current),
    "MXFP8Quantizer": (mxfp8, mxfp8.fill),
    "Float8BlockQuantizer": (blockwise, blockwise.fill),
    "NVFP4Quantizer": (nvfp4, nvfp4.fill),
}
# Formats whose parts one allocation serves in split_quantize; the extension then returns bare storages.
_BULK_ALLOCATED = ("MXFP8Quantizer", "Float8BlockQuantizer", "NVFP4Quantizer")


def _format_of(quantizer: Any) -> tuple[ModuleType, Fill]:
    """Return the module and fill function for a quantizer.

    Raises:
        EmulationError: a class that the extension does not know.
    """
    kind = type(quantizer)
    found = _FORMATS.get(kind.__name__)
    if found is None or not kind.__module__.startswith("transformer_engine.pytorch.tensor."):
        raise EmulationError(
            f"unknown quantizer {kind.__module__}.{kind.__qualname__}: expected exactly one of "
            f"{sorted(_FORMATS)} of transformer_engine.pytorch.tensor (the extension does not recognise "
            "subclasses either)"
        )
    return found


def _storage_format(tensor: Any) -> ModuleType | None:
    """Return the module of a quantized tensor's format, ``None`` for a plain tensor."""
    if hasattr(tensor, "_fp4_dtype"):
        return nvfp4
    if not hasattr(tensor, "_fp8_dtype"):
        return None
    if hasattr(tensor, "_is_2D_scaled"):
        return blockwise
    return mxfp8 if hasattr(tensor, "_with_gemm_swizzled_scales") else float8


def _is_set(noop: torch.Tensor | None) -> bool:
    """Return whether a no-op flag (one float, 1 means skip) is given and set."""
    return noop is not None and not noop.is_meta and float(noop.reshape(-1)[0]) == 1.0


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    pin_memory: bool = False,
) -> Any:
    """Allocate the tensor that a quantizer would make for a logical shape.

    Args:
        quantizer: a stock TE quantizer; its usages decide which buffers exist, ``internal`` whether the result is the
            bare storage class.
        shape: logical shape.
        dtype: nominal dtype.
        device: CPU or meta ("cuda" means the CPU).
        pin_memory: ignored, there is nothing to pin.

    Returns:
        The quantized tensor; data uninitialized, block scales zero.

    Raises:
        EmulationError: unknown quantizer, or a shape that the format cannot hold.
    """
    module, _ = _format_of(quantizer)
    return module.create(quantizer, list(shape), to_torch_dtype(dtype), cast.resolve_device(device))


def _fill(
    tensor: torch.Tensor,
    quantizer: Any,
    output: Any,
    noop: torch.Tensor | None,
    amax: torch.Tensor | None = None,
) -> None:
    """Run a format's fill on plain data; nothing happens on meta."""
    _, fill = _format_of(quantizer)
    buffers = [value for value in vars(output).values() if isinstance(value, torch.Tensor)]
    if tensor.is_meta or any(buffer.is_meta for buffer in buffers):
        return
    cast.check_input(tensor, f"quantize ({type(quantizer).__name__})")
    given = {} if amax is None else {"amax": amax}
    with torch.no_grad():
        fill(tensor.detach().contiguous(), quantizer, output, _is_set(noop), **given)


def quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    output: Any = None,
    noop: torch.Tensor | None = None,
    *,
    amax: torch.Tensor | None = None,
) -> Any:
    """Quantize a tensor (``tex.quantize``).

    Args:
        tensor: float32, float16 or bfloat16, any shape.
        quantizer: a stock TE quantizer; with ``None`` the tensor itself is returned, or copied to ``output``.
        output: quantized tensor to update in place. Its buffers are first made to fit the quantizer's usages.
        noop: one float; if it is 1 the data of ``output`` stays as it is.
        amax: for current scaling and NVFP4, the amax to use instead of the tensor's own (one float32). Not part of the
            extension's function: its fused kernels call the quantizer with the amax that they computed.

    Returns:
        ``output``, or a new quantized tensor. On meta and for an empty input nothing is written.

    Collective: one MAX all-reduce of the amax for current scaling and NVFP4 quantizers with ``with_amax_reduction``.

    Raises:
        EmulationError: anything that the extension refuses.
    """
    if quantizer is None:
        if output is None:
            return tensor
        if not _is_set(noop):
            with torch.no_grad():
                output.copy_(tensor)
        return output
    module, _ = _format_of(quantizer)
    if output is None:
        output = module.create(quantizer, list(tensor.shape), tensor.dtype, tensor.device)
    else:
        module.coerce(quantizer, output)
        _check_shape(tensor, output)
    _fill(tensor, quantizer, output, noop, amax)
    if quantizer.optimize_for_gemm:
        swizzle_scales_for_gemm_(output)
    return output


def _logical_numel(output: Any) -> int:
    """Return the number of values that a quantized tensor holds."""
    if hasattr(output, "_fp4_dtype"):
        data = output._rowwise_data if output._rowwise_data is not None else output._columnwise_data
        return data.numel() * 2
    names = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
    return next(getattr(output, name).numel() for name in names if getattr(output, name, None) is not None)


def _check_shape(tensor: torch.Tensor, output: Any) -> None:
    if tensor.numel() != _logical_numel(output):
        raise EmulationError(
            f"quantize: the input has shape {tuple(tensor.shape)}, but the output {type(output).__name__} "
            f"holds {_logical_numel(output)} values"
        )


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """Return the plain tensor of a quantized one (``tex.dequantize``), computed in float32 and cast.

    Args:
        input: Float8, MXFP8 or NVFP4 tensor or storage.
        otype: a TE dtype or a ``torch.dtype``.

    Returns:
        Tensor of the logical shape.

    Raises:
        EmulationError: not quantized, block-scaled (which TransformerEngine dequantizes in Python), or without the
            data that the kernel reads.
    """
    module = _storage_format(input)
    if module is None:
        raise EmulationError(f"dequantize: {type(input).__name__} is not a quantized tensor")
    with torch.no_grad():
        return module.dequantize(input).to(to_torch_dtype(otype))


def operand(tensor: Any, *, rowwise: bool) -> torch.Tensor:
    """Return the float32 (M, K) values of a GEMM operand, read from exactly the buffer that the kernel would read.

    Args:
        tensor: quantized tensor or storage, or a plain tensor, which passes through (flattened to 2-D, as float32).
        rowwise: read the rowwise data; otherwise the columnwise data, returned in the logical orientation all
            the same.

    Raises:
        EmulationError: that buffer is missing or flagged invalid, or the hardware could not use it.
    """
    module = _storage_format(tensor)
    if module is not None:
        with torch.no_grad():
            return module.operand(tensor, rowwise=rowwise)
    if not isinstance(tensor, torch.Tensor):
        raise EmulationError(f"GEMM operand: expected a tensor, got {type(tensor).__name__}")
    return tensor.detach().float().reshape(cast.flat_2d(tensor.shape))


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the bias gradient and quantized gradient.

    Args:
        input: (..., N).
        quantizer: a stock TE quantizer, or ``None`` to leave the gradient as it is.

    Returns:
        ``[bias_grad (N) in the input's dtype, gradient]``; the sum over rows is formed in float32.
    """
    cols = input.shape[-1]
    with torch.no_grad():
        bias = input.detach().reshape(-1, cols).sum(0, dtype=torch.float32).to(input.dtype)
    if quantizer is None:
        return [bias, input.contiguous()]
    module, _ = _format_of(quantizer)
    output = module.create(quantizer, list(input.shape), input.dtype, input.device)
    if module is mxfp8 and not input.is_meta:
        # The fused kernel takes no options, so it scales 1-D blocks whatever the quantizer says.
        cast.check_input(input, "bgrad_quantize (MXFP8Quantizer)")
        with torch.no_grad():
            mxfp8.fill(input.detach().contiguous(), quantizer, output, False, two_dim=False)
    else:
        _fill(input, quantizer, output, None)
    return [bias, output]


def multi_tensor_quantize(tensor_list: Sequence[torch.Tensor], quantizer_list: Sequence[Any]) -> list[Any]:
    """Quantize each tensor with its own quantizer.

    Raises:
        EmulationError: lists of different lengths.
    """
    if len(tensor_list) != len(quantizer_list):
        raise EmulationError(
            f"multi_tensor_quantize: {len(tensor_list)} tensors but {len(quantizer_list)} quantizers"
        )
    result = []
    for tensor, quantizer in zip(tensor_list, quantizer_list, strict=True):
        module, _ = _format_of(quantizer)
        output = module.create(quantizer, list(tensor.shape), tensor.dtype, tensor.device)
        _fill(tensor, quantizer, output, None)
        result.append(output)
    return result


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split along dim 0 and quantize each part with its own quantizer.

    Args:
        tensor: (sum of sections or more, ...).
        split_sections: rows of each part.
        quantizer_list: one for each part.
        disable_bulk_allocation: allocate the parts one by one; otherwise block formats come as bare storages
            whatever ``internal`` says, as the extension returns them.

    Raises:
        EmulationError: lists of different lengths, or more rows asked for than there are.
    """
    sections = [int(rows) for rows in split_sections]
    if len(sections) != len(quantizer_list):
        raise EmulationError(f"split_quantize: {len(sections)} sections but {len(quantizer_list)} quantizers")
    if not sections:
        return []
    if sum(sections) > tensor.shape[0]:
        raise EmulationError(f"split_quantize: sections {sections} exceed the {tensor.shape[0]} rows")
    parts = torch.split(tensor[: sum(sections)], sections)
    kinds = {type(quantizer).__name__ for quantizer in quantizer_list}
    bulk = not disable_bulk_allocation and len(kinds) == 1 and kinds <= set(_BULK_ALLOCATED)
    result = []
    for part, quantizer in zip(parts, quantizer_list, strict=True):
        module, _ = _format_of(quantizer)
        maker, dtype = quantizer, part.dtype
        if bulk and not quantizer.internal:
            maker = quantizer.copy()
            maker.internal = True
        if bulk:
            dtype = torch.float32  # the nominal dtype is not handed on, so the storage's default holds
        output = module.create(maker, list(part.shape), dtype, part.device)
        output._quantizer.internal = quantizer.internal
        _fill(part, quantizer, output, None)
        result.append(output)
    return result


def compute_amax(input: torch.Tensor, amax: torch.Tensor) -> None:
    """Write the largest magnitude of ``input`` into ``amax`` (float32, one element); NaN is ignored.

    Raises:
        EmulationError: ``amax`` of another dtype or size.
    """
    if amax.dtype != torch.float32 or amax.numel() != 1:
        raise EmulationError(f"compute_amax: expected one float32, got {amax.numel()} of {amax.dtype}")
    if not input.is_meta:
        with torch.no_grad():
            amax.copy_(cast.amax_of(input.detach()).reshape(amax.shape))


__all__ = [
    "bgrad_quantize",
    "compute_amax",
    "create_empty_quantized_tensor",
    "dequantize",
    "fp8_transpose",
    "multi_tensor_quantize",
    "nvfp4_2d_multi_tensor_transpose",
    "nvfp4_2d_scale_transpose",
    "nvfp4_data_transpose",
    "operand",
    "quantize",
    "split_quantize",
    "swizzle_scales_for_gemm_",
]
