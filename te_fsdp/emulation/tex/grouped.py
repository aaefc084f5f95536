"""Grouped tensors: many matrices in one buffer, processed in one call (``GroupedTensor``).

Replaces ``pytorch/csrc/extensions/cast.cpp`` (``group_quantize``) and ``gemm.cpp`` (``..._for_grouped_tensor``,
``..._for_discrete_in``, ``..._for_discrete_out``). Each member is quantized and multiplied exactly as a tensor of its
own; the buffers lie one after the other, each member's scales with the padding of its own shape
(``GroupedTensorStorage.split_into_quantized_tensors``). What the kernels cannot do raises by name: rows of a member
that are not a multiple of 128 (MXFP8), formats that TransformerEngine has no grouped kernels for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fsdp.emulation import _state
from te_fsdp.emulation._errors import EmulationError
from te_fsdp.emulation.tex import formats
from te_fsdp.emulation.tex.formats import cast
from te_fsdp.emulation.tex.fused import kind
from te_fsdp.emulation.tex.gemm import _check_output, _product, _write

#: Field of a grouped tensor -> the member attributes that may hold it.
_FIELDS = {
    "data": ("_rowwise_data", "_data"),
    "columnwise_data": ("_columnwise_data", "_transpose"),
    "scale_inv": ("_rowwise_scale_inv", "_scale_inv"),
    "columnwise_scale_inv": ("_columnwise_scale_inv",),
    "amax": ("_amax_rowwise",),
    "columnwise_amax": ("_amax_columnwise",),
}
_NAMES = {"data": "rowwise_data"}
#: Rows of a member that the grouped MXFP8 kernels insist on (``cast/mxfp8/group_quantize_mxfp8.cuh``).
_MXFP8_ROWS = 128
_GROUPED_KINDS = ("Float8CurrentScalingQuantizer", "MXFP8Quantizer", "Float8BlockQuantizer", "NVFP4Quantizer")


def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return int64 (groups + 1) element offsets of groups of rows."""
    offsets = first_dims.new_zeros(first_dims.numel() + 1)
    offsets[1:] = torch.cumsum(first_dims * logical_last_dim, 0)
    return offsets


def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: Any,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return ``(splits as int64, one tensor of offsets for each stride)``."""
    del device, bulk_allocate
    sizes = torch.tensor(split_sizes.tolist(), dtype=torch.int64)
    outputs = []
    for stride, leading, dtype in zip(strides, include_leading_zero, dtypes, strict=True):
        offsets = splits_to_offsets(sizes, stride).to(dtype)
        outputs.append(offsets if leading else offsets[1:])
    return sizes, outputs


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return the size of an unused workspace in bytes."""
    return 64 * num_tensors


def group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    output: Any = None,
) -> Any:
    """Quantize groups of rows, each as a tensor of its own.

    Args:
        tensor: (rows, K), the groups one after the other; rows behind the last one are ignored.
        quantizer: a stock TE quantizer; ``internal`` decides between ``GroupedTensorStorage`` and ``GroupedTensor``.
        num_tensors: number of groups.
        first_dims: int64 rows of each group; ``None``: all equal.
        last_dims: not emulated.
        tensor_offsets: int64 (groups + 1) element offsets, kept on the result.
        noop_flag: one float; if it is 1 the data of ``output`` stays as it is.
        output: grouped tensor to write into.

    Raises:
        EmulationError: a quantizer or a shape that the kernels do not take.
        NotImplementedError: columns that differ between groups, amax reduction.
    """
    _check_quantizer("group_quantize", quantizer, last_dims)
    cast.check_input(tensor, "group_quantize")
    rows = _rows(tensor, num_tensors, first_dims)
    for count in rows:
        if kind(quantizer) == "MXFP8Quantizer" and count % _MXFP8_ROWS:
            raise EmulationError(
                f"group_quantize (MXFP8Quantizer): first dimension of each tensor in a group must be divisible by "
                f"{_MXFP8_ROWS}, got {rows}"
            )
    parts = _quantize_parts(tensor, rows, quantizer)
    if output is None:
        return _assemble(parts, tensor, rows, quantizer, first_dims, tensor_offsets)
    if noop_flag is None or float(noop_flag.reshape(-1)[0]) != 1.0:
        for field, values in _buffers(parts).items():
            target = getattr(output, _NAMES.get(field, field))
            if target is None or target.numel() != values.numel():
                raise EmulationError(
                    f"group_quantize: the output has no {field} of {values.numel()} elements"
                )
            target.copy_(values)
    return output


def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Return ``(grouped tensor, bias gradients (groups, K) in the input's dtype)``, sums over rows formed in float32.

    Raises:
        EmulationError: a format whose kernel does not sum.
    """
    if kind(quantizer) not in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        raise EmulationError(
            f"bgrad_group_quantize takes MXFP8 and block quantizers, got {type(quantizer).__name__}"
        )
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, tensor_offsets=tensor_offsets)
    rows = _rows(tensor, num_tensors, first_dims)
    sums = [part.float().sum(0) for part in tensor.detach()[: sum(rows)].split(rows)]
    return grouped, torch.stack(sums).to(tensor.dtype)


def _check_quantizer(what: str, quantizer: Any, last_dims: torch.Tensor | None) -> None:
    which = kind(quantizer)
    if which not in _GROUPED_KINDS:
        raise EmulationError(
            f"{what}: TransformerEngine has no grouped kernel for {type(quantizer).__name__}"
        )
    if last_dims is not None:
        raise NotImplementedError(f"{what} with last_dims is not emulated on the CPU")
    if getattr(quantizer, "with_amax_reduction", False):
        raise NotImplementedError(f"{what} with amax reduction is not emulated on the CPU")
    if which == "Float8BlockQuantizer" and _state.arch() >= (10, 0):
        raise EmulationError(f"{what}: grouped block-scaling kernels exist on architecture 9.0 only")
    if which in ("MXFP8Quantizer", "NVFP4Quantizer") and _state.arch() < (10, 0):
        raise EmulationError(f"{what}: {which} needs architecture 10.0")


def _rows(tensor: torch.Tensor, groups: int, first_dims: torch.Tensor | None) -> list[int]:
    """Return the number of rows of each group."""
    if tensor.dim() != 2:
        raise EmulationError(f"grouped tensors are made of matrices, got shape {tuple(tensor.shape)}")
    if first_dims is None:
        if tensor.shape[0] % groups:
            raise EmulationError(f"{tensor.shape[0]} rows do not divide into {groups} groups")
        return [tensor.shape[0] // groups] * groups
    rows = [int(count) for count in first_dims.tolist()]
    if len(rows) != groups or sum(rows) > tensor.shape[0]:
        raise EmulationError(f"{groups} groups of {rows} rows do not fit {tensor.shape[0]} rows")
    return rows


def _quantize_parts(tensor: torch.Tensor, rows: Sequence[int], quantizer: Any) -> list[Any]:
    """Return each group as a bare quantized storage."""
    maker = quantizer.copy()
    maker.internal, maker.optimize_for_gemm = True, bool(quantizer.optimize_for_gemm)
    only_columns = kind(quantizer) == "Float8CurrentScalingQuantizer" and not quantizer.rowwise_usage
    if only_columns:  # one at a time the kernel needs its rows; here they are dropped afterwards
        maker.set_usage(rowwise=True)
    parts = [formats.quantize(part, maker) for part in tensor.detach()[: sum(rows)].split(list(rows))]
    for part in parts if only_columns else ():
        if part._transpose is not None:
            part._data = None
    return parts


def _buffers(parts: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the members' buffers, flat and one after the other, by field of the grouped tensor."""
    found: dict[str, torch.Tensor] = {}
    for field, names in _FIELDS.items():
        for name in names:
            pieces = [getattr(part, name, None) for part in parts]
            if pieces and pieces[0] is not None:
                found[field] = torch.cat([piece.reshape(-1) for piece in pieces])
                break
    return found


def _assemble(
    parts: Sequence[Any],
    tensor: torch.Tensor,
    rows: Sequence[int],
    quantizer: Any,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
) -> Any:
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor, GroupedTensorStorage

    fields: dict[str, Any] = _buffers(parts)
    if kind(quantizer) == "Float8CurrentScalingQuantizer" and "columnwise_data" in fields:
        fields["columnwise_scale_inv"] = fields["scale_inv"]
    columns = int(tensor.shape[1])
    if first_dims is None:
        fields["shapes"] = [(count, columns) for count in rows]
        fields["offsets"] = [index * rows[0] * columns for index in range(len(rows) + 1)]
    else:
        offsets = splits_to_offsets(first_dims, columns) if tensor_offsets is None else tensor_offsets
        fields.update(first_dims=first_dims, tensor_offsets=offsets)
    storage = GroupedTensorStorage if quantizer.internal else GroupedTensor
    swizzled = bool(quantizer.optimize_for_gemm) and kind(quantizer) in ("MXFP8Quantizer", "NVFP4Quantizer")
    return storage(
        (int(tensor.shape[0]), columns),
        tensor.dtype,
        num_tensors=len(rows),
        quantizer=quantizer,
        with_gemm_swizzled_scales=swizzled,
        **fields,
    )


# --- products


def _members(grouped: Any) -> list[Any]:
    """Return the matrices of a grouped tensor, or of a list."""
    if isinstance(grouped, list | tuple):
        return list(grouped)
    if getattr(grouped, "row_scaled_nvfp4", False):
        raise NotImplementedError("row-scaled NVFP4 grouped tensors are not emulated on the CPU")
    members = grouped.split_into_quantized_tensors()
    for member in members:  # TransformerEngine reads the quantizer, whose usages may have changed since
        if hasattr(member, "_with_gemm_swizzled_scales"):
            member._with_gemm_swizzled_scales = grouped._with_gemm_swizzled_scales
    return members


def _multiply(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    bias: Any,
    bias_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    *_workspaces: Any,
) -> Any:
    """Return ``D[i] = alpha * op(B[i]) @ op(A[i]) + beta * D[i]``, then ``+ bias[i]`` in a kernel of its own.

    Empty products leave ``beta * D``: zeros, or what was there.
    """
    if bias_scale is not None:
        raise NotImplementedError("grouped GEMM with bias_scale is not emulated on the CPU")
    if float(alpha.min()) != 1.0 or float(alpha.max()) != 1.0:
        raise NotImplementedError("grouped GEMM with alpha other than 1 is not emulated on the CPU")
    accumulate = float(beta.min()) != 0.0
    biases = [None] * len(_members(D)) if bias is None else _members(bias)
    for a, b, out, one_bias in zip(_members(A), _members(B), _members(D), biases, strict=True):
        if 0 in a.size() or 0 in b.size():
            if not accumulate:
                out.zero_()
            continue
        value, _ = _product(a, transa, b, transb)
        _check_output(a, b, out.dtype, None, False)
        _write(value.reshape(out.shape), out, out.dtype, None, False, accumulate, None)
        if one_bias is not None:  # the product was rounded before (``nvte_grouped_bias_add``)
            out.copy_(out.float() + one_bias.float().reshape(1, -1))
    return D


def te_general_grouped_gemm_for_grouped_tensor(*args: Any) -> Any:
    """Multiply grouped tensors; see :func:`_multiply`."""
    return _multiply(*args)


def te_general_grouped_gemm_for_discrete_in(*args: Any) -> Any:
    """Multiply a list of matrices A; see :func:`_multiply`."""
    return _multiply(*args)


def te_general_grouped_gemm_for_discrete_out(*args: Any) -> Any:
    """Multiply into a list of matrices D; see :func:`_multiply`."""
    return _multiply(*args)


__all__ = [
    "bgrad_group_quantize",
    "get_grouped_gemm_setup_workspace_size",
    "group_quantize",
    "splits_to_offsets",
    "splits_to_offsets_multi",
    "te_general_grouped_gemm_for_discrete_in",
    "te_general_grouped_gemm_for_discrete_out",
    "te_general_grouped_gemm_for_grouped_tensor",
]
