"""Table of TE's quantized formats."""

# [Note: formats] Class names, buffers, options and reconstructors are TE's, checked with TE 2.18 to 2.20.2.
# This file does not import TE, so checkpoints can be read without it.
#
#     weight (M, K)   buffer                 one element covers (rows, columns)
#     float8          data                   1 x 1          scale: one per weight
#     mxfp8           rowwise data, scale    1 x 1, 1 x 32
#                     columnwise data, scale 1 x 1, 32 x 1  (quantized independently of rowwise data)
#     mxfp8-2d        the same, with one scale for each 32 x 32 block, so that both directions have equal data
#     float8-block    data, scale            1 x 1, 128 x 128, and the same transposed
#     nvfp4           data, scale            1 x 2 (two values per byte), 1 x 16, and transposed; amax of the
#                                            unsharded weight; one scale for each 16 x 16 block
#     nvfp4-1d        the same, with one scale for each 1 x 16 block, and columnwise for each 16 x 1 block
#
# Checkpoints of earlier te_fsdp call both kinds of NVFP4 weights nvfp4.
#
# Delayed and current scaling use one format, float8. Their data is the same, but the scale is computed
# differently.

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

#: Rows and columns of the weight that one buffer element covers; ``None``: the unsharded weight.
Block: TypeAlias = tuple[int, int] | None

#: Names of NVFP4 weights with one scale for each 16 x 16 block, and for each 1 x 16 block.
NVFP4_SQUARES, NVFP4_ROWS = "nvfp4", "nvfp4-1d"
_FP8 = ("kFloat8E4M3", "kFloat8E5M2")


@dataclass(frozen=True)
class Buffer:
    """A buffer of a quantized weight."""

    name: str  #: TE's name in ``get_metadata()``
    block: Block  #: Rows and columns covered by one element
    #: Number type of an element; uint8 for the weight's values, which have the format's element type (NVFP4: two per
    #: byte).
    number: torch.dtype = torch.uint8
    is_transposed: bool = False  #: Whether TE stores it transposed
    #: Whether TE computes it from the gathered data (``fsdp_post_all_gather``: transposes, and padded scales).
    #: FSDP2 does not manage such buffers and does not free them.
    is_derived: bool = False
    attribute: str = ""  #: TE's attribute of the quantized tensor. Default: the name with an underscore

    def __post_init__(self) -> None:
        if not self.attribute:
            object.__setattr__(self, "attribute", f"_{self.name}")

    @property
    def holds_values(self) -> bool:
        """Return whether it contains the weight's values, not scales."""
        return self.number == torch.uint8

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in files: that of numbers of four bytes, else uint8."""
        return self.number if self.number.itemsize > 1 else torch.uint8


@dataclass(frozen=True, eq=False)
class Format:
    """A quantized format."""

    name: str  #: Name in reports, errors and checkpoints; for an unknown format, TE's class name
    tensor: str = ""  #: Name of TE's tensor class
    module: str = ""  #: Module of ``transformer_engine.pytorch.tensor`` with this class
    #: Name of TE's quantizer class -> source of the scale: ``"amax"`` of the unsharded weight at quantization,
    #: ``"history"`` of amaxes (delayed scaling), ``"blocks"`` of the weight, ``"parts"`` of a hybrid weight, or
    #: ``""`` for none.
    quantizers: Mapping[str, str] = field(default_factory=dict)
    #: Rows (and columns) per scale. Shards must consist of complete blocks. 1 for one scale per weight, ``None`` if
    #: unknown.
    block: int | None = None
    elements: tuple[str, ...] = ()  #: Possible element types (``tex.DType``)
    available: str = ""  #: TE's function that checks whether the device supports it
    buffers: tuple[Buffer, ...] = ()  #: In file order
    #: Option of TE's tensors -> value for which ``buffers`` is not valid.
    unknown_options: Mapping[str, bool] = field(default_factory=dict)
    #: Option that changes values without affecting the buffers -> its unusual value. Checkpoints do not record it.
    unrecorded_options: Mapping[str, bool] = field(default_factory=dict)
    #: Whether rowwise and columnwise data are quantized independently, so that neither can be computed from the
    #: other. An all-gather sends one of them. Other formats send rowwise data only.
    independent_directions: bool = False
    #: Name of the row for tensors whose quantizer has ``with_2d_quantization`` (MXFP8: TE 2.19 and later), if they have
    #: one
    two_dim: str = ""
    #: Whether the rowwise data and one scale per block are also the columnwise data. Shards and all-gathers contain
    #: the rowwise data only.
    shares_data: bool = False
    #: Buffers that an all-gather sends first, in order, and that TE removes from the unsharded weight before a
    #: backward (``fsdp_post_all_gather``).
    dropped: tuple[Buffer, ...] = ()
    short_blocks: bool = False  #: Whether a weight may end with an incomplete block
    #: Buffer with the transposed values (last dim first) that may exist instead of ``data``
    transpose: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def has_one_scale(self) -> bool:
        """Return whether the unsharded weight has one scale only, so that shards of any size are valid."""
        return self.block == 1

    @property
    def attributes(self) -> list[str]:
        """Return TE's attributes of a tensor's buffers, including the transpose that TE derives from data."""
        return [buffer.attribute for buffer in self.buffers] + (["_transpose"] if self.transpose else [])

    def derives_columnwise(self, quantizer: Any) -> bool:
        """Return whether TE can compute the columnwise data of a weight from its rowwise data."""
        # One-dimensional blocks have different scales in the two directions.
        two_dim = (
            getattr(quantizer, "with_2d_quantization", True)
            and getattr(quantizer, "block_scaling_dim", 2) == 2
        )
        return two_dim and not self.independent_directions and not self.shares_data

    def directions(self) -> list[dict[str, Block]]:
        """Return the sets of buffers that each contain the weight's values, rowwise first: name -> block."""
        if self.has_one_scale:
            return [{buffer.name: buffer.block for buffer in self.buffers}]
        directions = [
            {buffer.name: buffer.block for buffer in self.buffers if direction in buffer.name}
            for direction in ("rowwise", "columnwise")
        ]
        return [needed for needed in directions if needed]


_VALUES = (1, 1)
_FP32, _E8M0, _E4M3 = torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn
_FLOAT8_DATA = Buffer("data", _VALUES)
_BLOCK_ROWWISE = Buffer("rowwise_data", _VALUES), Buffer("rowwise_scale_inv", (128, 128), _FP32)
#: Derived from the rowwise data.
_TRANSPOSED: dict[str, Any] = {"is_transposed": True, "is_derived": True}

#: Its scales are padded after an all-gather, so they are derived.
_MXFP8: dict[str, Any] = {
    "block": 32,
    "elements": _FP8,
    "available": "is_mxfp8_available",
    "unknown_options": {"with_gemm_swizzled_scales": True},
}
_MXFP8_ROWWISE = Buffer("rowwise_data", _VALUES), Buffer("rowwise_scale_inv", (1, 32), _E8M0, is_derived=True)
_MXFP8_COLUMN_SCALE = Buffer("columnwise_scale_inv", (32, 1), _E8M0, is_derived=True)
_NVFP4: dict[str, Any] = {
    "block": 16,
    "elements": ("kFloat4E2M1",),
    "available": "is_nvfp4_available",
    "unknown_options": {"with_gemm_swizzled_scales": True, "row_scaled_nvfp4": True},
    # TE 2.20: scales up to 256 instead of 448.
    "unrecorded_options": {"nvfp4_use_4over6": True},
}
_NVFP4_ROWWISE = Buffer("rowwise_data", (1, 2)), Buffer("rowwise_scale_inv", (1, 16), _E4M3, is_derived=True)
_NVFP4_AMAXES = Buffer("amax_rowwise", None, _FP32), Buffer("amax_columnwise", None, _FP32)

_ROWS = (
    Format(
        name="float8",
        tensor="Float8Tensor",
        module="float8_tensor",
        quantizers={"Float8CurrentScalingQuantizer": "amax", "Float8Quantizer": "history"},
        block=1,
        elements=_FP8,
        available="is_fp8_available",
        buffers=(_FLOAT8_DATA, Buffer("fp8_scale_inv", None, _FP32, attribute="_scale_inv")),
        dropped=(_FLOAT8_DATA,),
        transpose="data_transpose",
    ),
    Format(
        name="mxfp8",
        tensor="MXFP8Tensor",
        module="mxfp8_tensor",
        quantizers={"MXFP8Quantizer": "blocks"},
        buffers=(*_MXFP8_ROWWISE, Buffer("columnwise_data", _VALUES), _MXFP8_COLUMN_SCALE),
        independent_directions=True,
        two_dim="mxfp8-2d",
        **_MXFP8,
    ),
    # Tensors and quantizers are those of mxfp8.
    Format(
        name="mxfp8-2d",
        buffers=(*_MXFP8_ROWWISE, Buffer("columnwise_data", _VALUES, is_derived=True), _MXFP8_COLUMN_SCALE),
        shares_data=True,
        **_MXFP8,
    ),
    Format(
        name="float8-block",
        tensor="Float8BlockwiseQTensor",
        module="float8_blockwise_tensor",
        quantizers={"Float8BlockQuantizer": "blocks"},
        block=128,
        elements=_FP8,
        available="is_fp8_block_scaling_available",
        buffers=(
            *_BLOCK_ROWWISE,
            Buffer("columnwise_data", _VALUES, **_TRANSPOSED),
            Buffer("columnwise_scale_inv", (128, 128), _FP32, **_TRANSPOSED),
        ),
        # Blocks of 1 x 128 (activations) use a different scale layout.
        unknown_options={"is_2D_scaled": False},
        dropped=_BLOCK_ROWWISE,
        short_blocks=True,
    ),
    Format(
        name=NVFP4_SQUARES,
        buffers=(
            *_NVFP4_ROWWISE,
            Buffer("columnwise_data", (2, 1), **_TRANSPOSED),
            Buffer("columnwise_scale_inv", (16, 1), _E4M3, **_TRANSPOSED),
            *_NVFP4_AMAXES,
        ),
        **_NVFP4,
    ),
    # TE cannot compute the columnwise data of rows from the rowwise data.
    Format(
        name=NVFP4_ROWS,
        tensor="NVFP4Tensor",
        module="nvfp4_tensor",
        # First-level scales belong to blocks, the second-level scale to the unsharded weight.
        quantizers={"NVFP4Quantizer": "amax"},
        buffers=(
            *_NVFP4_ROWWISE,
            Buffer("columnwise_data", (2, 1), is_transposed=True),
            Buffer("columnwise_scale_inv", (16, 1), _E4M3, is_transposed=True),
            *_NVFP4_AMAXES,
        ),
        two_dim=NVFP4_SQUARES,
        **_NVFP4,
    ),
    # Each direction has its own format. Only the parts have buffers.
    Format("hybrid", "HybridQuantizedTensor", "hybrid_tensor", quantizers={"HybridQuantizer": "parts"}),
    # An unquantized part of a hybrid weight.
    Format("identity", "IdentityTensor", "identity_tensor", quantizers={"IdentityQuantizer": ""}),
)

#: Rows by name.
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
#: Quantizer class name -> source of the scale, see :class:`Format`.
SCALE_SOURCES: dict[str, str] = {name: source for row in _ROWS for name, source in row.quantizers.items()}


def row_for(row: Format, quantizer: Any) -> Format:
    """Return the row of a tensor's format, given the row of its class and its quantizer."""
    is_two_dim = row.two_dim and getattr(quantizer, "with_2d_quantization", False)
    return FORMATS[row.two_dim] if is_two_dim else row


@functools.cache  # a cached result costs no call of a Python function, and each step needs one per weight
def has_amax_history(kind: type) -> bool:
    """Return whether a class of quantizers computes scales from an amax history."""
    return SCALE_SOURCES.get(kind.__name__) == "history"


#: Buffers of a ``GroupedTensor``, each with the data of all experts: attribute -> argument of its constructor.
#: ``scale`` is a workspace of the quantization.
GROUPED_BUFFERS = {"rowwise_data": "data"} | {
    name: name
    for name in ("columnwise_data", "scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax", "scale")
}


#: Return the row of an unknown format, which contains only a name.
unknown_format = functools.cache(Format)
