"""Matrix products: ``pytorch/csrc/extensions/gemm.cpp``, ``common/gemm/cublaslt_gemm.cu``.

The products accumulate in fp32 whatever the operands are. Which representation of a quantized operand is read follows
the kernels strictly (``formats.operand``): a missing or invalid one is an error, never replaced by the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation import _state
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import formats
from te_fsdp.emulation.tex.activation import dgelu_value, gelu_value
from te_fsdp.emulation.tex.enums import DType, to_torch_dtype
from te_fsdp.emulation.tex.fused import kind


def _is_quantized(tensor: Any) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) and hasattr(tensor, "get_metadata")


def _storage_kind(tensor: Any) -> str:
    names = " ".join(one.__name__ for one in type(tensor).__mro__)
    for name in (
        "Float8BlockwiseQTensorStorage",
        "Float8TensorStorage",
        "MXFP8TensorStorage",
        "NVFP4TensorStorage",
    ):
        if name in names:
            return name
    return type(tensor).__name__


def _matrix(tensor: Any, rowwise: bool) -> torch.Tensor:
    """Return the fp32 (rows, last dim) values of an operand, from the representation that the kernel reads."""
    if _is_quantized(tensor):
        value = formats.operand(tensor, rowwise=rowwise)
    else:
        value = tensor.detach().float()
    return value.reshape(-1, value.shape[-1]) if value.dim() != 2 else value


def _check(a: Any, transa: bool, b: Any, transb: bool, inner: int, m: int, n: int) -> None:
    """Run the argument checks of ``CanonicalizeGemmInput`` for FP8 operands (leading dims, in elements)."""
    if _is_quantized(a) != _is_quantized(b):
        raise EmulationError(
            f"GEMM of a quantized and an unquantized operand: A is {type(a).__name__}, B is "
            f"{type(b).__name__}; no kernel does that"
        )
    if not _is_quantized(a):
        return
    only_tn = not ((10, 0) <= _state.arch() < (12, 0) or _state.arch() >= (13, 0))
    for name, operand, leading in (
        ("A", a, inner if transa or only_tn else m),
        ("B", b, inner if only_tn or not transb else n),
    ):
        which = _storage_kind(operand)
        if which == "Float8TensorStorage" and leading % 16:
            raise EmulationError(
                f"FP8 GEMM: leading dimension of {name} is {leading}, must be a multiple of 16; pad it"
            )
        if which == "Float8BlockwiseQTensorStorage":
            outer = m if name == "A" else n
            if inner % 16:
                raise EmulationError(
                    f"FP8 block-scaling GEMM: inner dimension {inner} must be a multiple of 16; pad it"
                )
            if outer % 8 and (name == "A" or not operand._is_2D_scaled):
                raise EmulationError(
                    f"FP8 block-scaling GEMM: outer dimension of {name} is {outer}, must be a multiple of 8; "
                    "pad it"
                )


def _product(a: Any, transa: bool, b: Any, transb: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fp32 product (rows of op(B), columns of op(A)), and B's matrix."""
    a_matrix, b_matrix = _matrix(a, transa), _matrix(b, not transb)
    left = b_matrix.t() if transb else b_matrix
    right = a_matrix.t() if transa else a_matrix
    if left.shape[1] != right.shape[0]:
        raise EmulationError(
            f"Invalid matrix dimensions for GEMM (A={tuple(a_matrix.shape)}, transa={transa}, "
            f"B={tuple(b_matrix.shape)}, transb={transb})"
        )
    _check(a, transa, b, transb, left.shape[1], right.shape[1], left.shape[0])
    return left @ right, b_matrix


def _check_output(a: Any, b: Any, dtype: torch.dtype, quantizer: Any, gelu: bool) -> None:
    """Reject output dtypes and GELU epilogues that no cuBLASLt kernel supports."""
    if not _is_quantized(a):
        if dtype not in (torch.float32, a.dtype):
            raise EmulationError(f"GEMM of {a.dtype} into {dtype}: cuBLAS writes {a.dtype} or torch.float32")
        return
    if gelu and "Float8BlockwiseQTensorStorage" in (_storage_kind(a), _storage_kind(b)):
        raise EmulationError("FP8 block-scaling GEMM has no GELU epilogue: apply it afterwards")
    writes_e5m2 = quantizer is not None and _fuses_quantization(a, b, quantizer) and _is_e5m2(quantizer.dtype)
    if writes_e5m2 and not (_is_e5m2(a._fp8_dtype) or _is_e5m2(b._fp8_dtype)):
        raise EmulationError("FP8 GEMM of two E4M3 operands cannot write E5M2")


def _is_e5m2(dtype: Any) -> bool:
    return int(dtype) == int(DType.kFloat8E5M2)


def _given(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.numel() > 0


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """Return ``D = alpha * op(B) @ op(A) + beta * D`` in row-major terms, with the epilogues of cuBLASLt.

    Shapes: op(A) (K, M), op(B) (N, K), D (leading dims of B, M), or (N, M) when B is transposed. ``grad`` turns
    ``bias`` into a request for the bias gradient (sum of B's rows, or of D's after a GELU backward).

    Returns:
        ``[D, bias gradient, GELU input, extra output]``.

    Raises:
        EmulationError: shapes or representations that the kernel would reject.
        NotImplementedError: communication overlap.
    """
    del workspace, workspace_size, use_split_accumulator, comm_type, bulk_overlap
    if comm_overlap is not None:
        raise NotImplementedError("generic_gemm with comm_overlap is not emulated on the CPU")
    out_dtype = to_torch_dtype(output_dtype) if output_dtype is not None else _dtype_of(A)
    value, b_matrix = _product(A, transA, B, transB)
    _check_output(A, B, out_dtype, quantizer, gelu and not grad)
    shape = [value.shape[0]] if transB else list(B.size())[:-1]
    shape.append(value.shape[1])
    if alpha != 1.0:
        value = value * alpha
    if _given(bias) and not grad:
        value = value + bias.float()
    pre_gelu = bias_grad = None
    if gelu and grad:
        value = value * dgelu_value(gelu_in.float().reshape(value.shape))
    elif gelu:
        gelu_dtype = to_torch_dtype(bias_type) if _is_quantized(A) else out_dtype
        pre_gelu = value.to(gelu_dtype).reshape(shape)
        value = gelu_value(value)
    if bias is not None and grad:
        bias_grad = (value if gelu else b_matrix).sum(0).to(out_dtype)
    fused = _fuses_quantization(A, B, quantizer)
    D = _write(value.reshape(shape), D, out_dtype, quantizer, fused, accumulate, beta)
    return [D, bias_grad, pre_gelu, extra_output]


def _dtype_of(tensor: Any) -> torch.dtype:
    return getattr(tensor, "_dtype", None) or tensor.dtype


def _fuses_quantization(a: Any, b: Any, quantizer: Any) -> bool:
    """Return whether cuBLASLt writes FP8 itself: delayed scaling, and a per-tensor scaled operand (``gemm.cpp``)."""
    per_tensor = "Float8TensorStorage" in (_storage_kind(a), _storage_kind(b))
    return kind(quantizer) == "Float8Quantizer" and per_tensor


def _write(
    value: torch.Tensor,
    out: Any,
    dtype: torch.dtype,
    quantizer: Any,
    fused: bool,
    accumulate: bool,
    beta: float | None,
) -> Any:
    if quantizer is not None:
        if accumulate:
            raise EmulationError("GEMM cannot accumulate into a quantized output")
        if out is None:
            out = formats.create_empty_quantized_tensor(quantizer, list(value.shape), dtype, value.device)
        return formats.quantize(value if fused else value.to(dtype), quantizer, out)
    if out is None:
        if accumulate:
            raise EmulationError("GEMM was asked to accumulate, but has no output to accumulate into")
        return value.to(dtype)
    if tuple(out.shape) != tuple(value.shape):
        raise EmulationError(
            f"GEMM output has invalid dims (expected {tuple(value.shape)}, got {tuple(out.shape)})"
        )
    if accumulate:
        # The product is rounded to the output dtype before the sum is: seen in every bit on an H200.
        value = value.to(out.dtype).float() + (1.0 if beta is None else beta) * out.float()
    out.copy_(value)
    return out


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[torch.Tensor] | None,
    D_type: Any,
    m_splits: Sequence[int] | None,
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[torch.Tensor],
    grad: bool,
    workspace: Any,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Run one GEMM per group; see :func:`generic_gemm` for the single product.

    ``single_output``: ``D[0]`` holds the groups' rows one after the other. A group without rows leaves zeros, or its
    accumulator as it is. ``bias`` is added (forward) or receives the bias gradients (``grad``).

    Returns:
        ``bias``.
    """
    del D_type, bias_type, workspace, workspaceSize, use_split_accumulator, math_sm_count
    if D is None:
        raise EmulationError("grouped GEMM needs its output tensors")
    if single_output and m_splits is None:
        raise EmulationError("grouped GEMM with a single output needs m_splits")
    bias = list(bias)
    start = 0
    for index, (a, b) in enumerate(zip(A, B, strict=True)):
        if single_output:
            out = D[0].reshape(-1, D[0].shape[-1])[start : start + m_splits[index]]
            start += m_splits[index]
        else:
            out = D[index]
        if math.prod(a.size()) == 0 or math.prod(b.size()) == 0:
            if not accumulate:
                out.zero_()
            if _given(bias[index]) and grad:
                bias[index].zero_()
            continue
        value, b_matrix = _product(a, transa, b, transb)
        _check_output(a, b, out.dtype, None, _given(pre_gelu_out[index]) and not grad)
        if _given(bias[index]) and grad:
            bias[index].copy_(b_matrix.sum(0))
        elif _given(bias[index]):
            value = value + bias[index].float()
        if _given(pre_gelu_out[index]):
            if grad:
                value = value * dgelu_value(pre_gelu_out[index].float().reshape(value.shape))
            else:
                pre_gelu_out[index].copy_(value.reshape(pre_gelu_out[index].shape))
                value = gelu_value(value)
        _write(value.reshape(out.shape), out, out.dtype, None, False, accumulate, None)
    return bias


__all__ = ["generic_gemm", "te_general_grouped_gemm"]
