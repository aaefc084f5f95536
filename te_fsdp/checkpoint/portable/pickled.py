"""``torch.save`` files read weights-only and without their data, TransformerEngine's tensors included, without TE.

Weights-only loading builds nothing but tensors, plain containers and allow-listed classes. TE's quantized
tensors are allow-listed under TE's names, but with stand-ins that only keep what was stored: no code of TE runs.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import serialization

from te_fsdp import _torch
from te_fsdp.checkpoint.portable.lazy import Lazy, Stored
from te_fsdp.errors import CheckpointError, message

__all__ = ["Quantized", "read_objects", "stored"]

_TENSORS = "transformer_engine.pytorch.tensor"
#: TE's enum values (``transformer_engine.pytorch.constants.DType``, TE 2.18 to 2.20).
_DTYPES = {7: "kFloat8E4M3", 8: "kFloat8E5M2", 9: "kFloat8E8M0", 10: "kFloat4E2M1"}


@dataclass
class Quantized:
    """One of TE's quantized tensors as it was stored.

    Attributes:
        format: Name of its format.
        dtype: The dtype that it stands for.
        shape: Shape of the weight.
        element: TE's name of the element type.
        buffers: TE's buffers by their names in ``get_metadata()``; without data.
        options: What else was stored about the buffers' layout.
    """

    format: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    element: str
    buffers: dict[str, torch.Tensor]
    options: dict[str, Any]


class _Opaque:
    """Stands for an object of TE that is of no use here."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _DType:
    def __init__(self, value: int) -> None:
        self.name = _DTYPES.get(int(value), str(value))


def _quantized(
    name: str, shape: Any, dtype: torch.dtype, element: Any, buffers: dict[str, Any], **options: Any
) -> Quantized:
    kept = {key: value for key, value in buffers.items() if isinstance(value, torch.Tensor)}
    return Quantized(name, dtype, tuple(shape), getattr(element, "name", str(element)), kept, options)


# The signatures are those of TE 2.18 to 2.20, whose reconstructors these stand for.
def _float8(data: Any, element: Any, scale: Any, dtype: Any, shape: Any, transpose: Any = None) -> Quantized:
    buffers = {"data": data, "fp8_scale_inv": scale}
    if data is None:
        # Kept transposed only (TE 2.20): the same bytes, last dim first.
        buffers["data"] = torch.movedim(transpose, 0, -1)
    return _quantized("float8", shape, dtype, element, buffers)


def _mxfp8(
    rowwise: Any, row_scale: Any, columnwise: Any, column_scale: Any, element: Any, dtype: Any, shape: Any,
    quantizer: Any = None, swizzled: bool = False,
) -> Quantized:  # fmt: skip
    buffers = {"rowwise_data": rowwise, "rowwise_scale_inv": row_scale}
    buffers |= {"columnwise_data": columnwise, "columnwise_scale_inv": column_scale}
    return _quantized("mxfp8", shape, dtype, element, buffers, with_gemm_swizzled_scales=swizzled)


def _block(
    shape: Any, rowwise: Any, row_scale: Any, columnwise: Any, column_scale: Any, element: Any, dtype: Any,
    quantizer: Any, two_dims: bool, data_format: Any = None,
) -> Quantized:  # fmt: skip
    buffers = {"rowwise_data": rowwise, "rowwise_scale_inv": row_scale}
    buffers |= {"columnwise_data": columnwise, "columnwise_scale_inv": column_scale}
    return _quantized("float8-block", shape, dtype, element, buffers, is_2D_scaled=two_dims)


def _nvfp4(
    shape: Any, rowwise: Any, row_scale: Any, columnwise: Any, column_scale: Any, row_amax: Any, column_amax: Any,
    element: Any, dtype: Any, quantizer: Any, swizzled: bool = False, row_scaled: bool = False, *more: Any,
) -> Quantized:  # fmt: skip
    buffers = {"rowwise_data": rowwise, "rowwise_scale_inv": row_scale, "amax_rowwise": row_amax}
    buffers |= {
        "columnwise_data": columnwise,
        "columnwise_scale_inv": column_scale,
        "amax_columnwise": column_amax,
    }
    options = {"with_gemm_swizzled_scales": swizzled, "row_scaled_nvfp4": row_scaled}
    # 4over6 (TE 2.20): another largest scale, which the components do not tell.
    options["nvfp4_use_4over6"] = bool(more and more[0])
    return _quantized("nvfp4", shape, dtype, element, buffers, **options)


def _stand_ins() -> list[Any]:
    """Each with the name that it stands for."""
    reconstructors = {
        "float8_tensor._make_float8_tensor_in_reduce_ex": _float8,
        "mxfp8_tensor._make_mxfp8_tensor_in_reduce_ex": _mxfp8,
        "float8_blockwise_tensor._make_float8_blockwise_tensor_in_reduce_ex": _block,
        "nvfp4_tensor._make_nvfp4_tensor_in_reduce_ex": _nvfp4,
    }
    quantizers = (
        "float8_tensor.Float8Quantizer",
        "float8_tensor.Float8CurrentScalingQuantizer",
        "mxfp8_tensor.MXFP8Quantizer",
        "float8_blockwise_tensor.Float8BlockQuantizer",
        "nvfp4_tensor.NVFP4Quantizer",
    )
    found: list[Any] = [(f, f"{_TENSORS}.{n}") for n, f in reconstructors.items()]
    found += [(_Opaque, f"{_TENSORS}.{name}") for name in quantizers]
    found += [
        (_DType, "transformer_engine.pytorch.constants.DType"),
        (_DType, "transformer_engine_torch.DType"),
    ]
    return found


@contextmanager
def _te_stood_in_for() -> Iterator[None]:
    """Weights-only loading takes the stand-ins for TE's names, whether TE is imported or not."""
    before = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    serialization.add_safe_globals(_stand_ins())
    try:
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def read_objects(stream: IO[bytes], where: str) -> Any:
    """The objects of a ``torch.save`` file; tensors without data, TE's tensors as :class:`Quantized`.

    Raises:
        CheckpointError: No such file, an object that weights-only loading refuses, or a damaged file.
    """
    try:
        with _te_stood_in_for():
            return _torch.load_without_data(stream)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        other = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        got = f"an object of {found.group(1)}" if found else other
        raise CheckpointError(
            message(
                f"{where}: cannot be read weights-only",
                expected="tensors, TransformerEngine's quantized tensors and plain containers",
                got=got,
                why="Anything else in a pickle may run code",
                fix="load it with torch and save it with te_fsdp.checkpoint.save"
                if "GroupedTensor" in got
                else "save a plain state_dict() with torch.save",
            )
        ) from error
    except Exception as error:
        raise CheckpointError(
            message(
                f"{where}: not a file that torch.save wrote ({type(error).__name__}: {_first_line(error)})",
                expected="torch.save's zip format",
                fix="the file is truncated or of another kind",
            )
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def stored(
    tensor: torch.Tensor, file: Path, key: str, base: int = 0, like: torch.Tensor | None = None
) -> Lazy:
    """A tensor without data as one that is read from its file.

    Args:
        tensor: From :func:`read_objects`.
        file: The file.
        key: Name, for messages.
        base: Byte at which the ``torch.save`` file begins in ``file``.
        like: The stored tensor of which ``tensor`` is a view; ``None``: itself.
    """
    offset = base + _torch.storage_offset(tensor if like is None else like)
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return Stored(key, file, offset, shape, tensor.dtype, stride, int(tensor.storage_offset()))
