"""Buffers that a quantized tensor derives from its other ones: transposes, padded scales, shared columnwise data."""

# [Note: 2-D MXFP8] With ``MXFP8BlockScaling(enable_2d_quantization=True)`` (TE 2.19 and later) all values of
# a 32 x 32 block of a weight have one scale. TE does not transpose MXFP8 data, so the rowwise and the
# columnwise data are the same bytes. The columnwise scales repeat the scale of each block along its columns,
# as the rowwise scales do along its rows. te_fsdp stores and all-gathers the rowwise data only. After an
# all-gather the columnwise data is the same tensor, and its scales are copied from the rowwise ones. TE's
# hooks do not use this (2.20.2): they send both directions, or one in forward and the other in backward.

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from te_fsdp.upstream import te as _te
from te_fsdp.upstream.te_formats import Format


def drop_derived_buffers(tensor: torch.Tensor, row: Format) -> None:
    """Drop the buffers that were derived from a gathered weight: transposes, padded scales, shared data."""
    if getattr(tensor, "_transpose", None) is not None:
        _te.drop_transpose(tensor)
    for buffer in row.buffers:
        if buffer.is_derived:
            setattr(tensor, buffer.attribute, None)


def derive_columnwise_usage(tensor: Any) -> None:
    """Let TE compute the data for backward GEMMs from that for forward GEMMs, if the format can. Local operation."""
    with suppress(RuntimeError):
        tensor.update_usage(columnwise_usage=True)


def derive_transpose(tensor: torch.Tensor) -> None:
    """Recompute a float8 tensor's transpose from its rowwise data, in the existing buffer if there is one."""
    buffers = tensor.get_metadata()  # type: ignore[attr-defined]
    data, transpose = buffers.get("data"), buffers.get("data_transpose")
    if data is not None and transpose is not None:
        transpose.copy_(data.movedim(-1, 0))


def derive_columnwise(tensor: Any, block: int) -> None:
    """Let a 2-D MXFP8 tensor read its rowwise data in both directions ([Note: 2-D MXFP8]). Local operation.

    ``block`` is the number of rows and columns per scale.
    """
    rows, columns = tensor.shape
    scales = tensor._rowwise_scale_inv[:rows:block, : columns // block]
    size = tensor._quantizer.get_scale_shape((rows, columns), columnwise=True)
    repeated = scales.new_zeros(size)
    repeated[: rows // block, :columns].unflatten(1, (-1, block)).copy_(scales.unsqueeze(2))
    tensor._columnwise_data, tensor._columnwise_scale_inv = tensor._rowwise_data, repeated
    tensor._quantizer.set_usage(columnwise=True)
