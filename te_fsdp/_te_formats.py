"""What is to know about each of TE's quantized formats: one row per format, read by all.

Class names, buffers and options are TE's own, checked on TE 2.18 to 2.20.2. This file imports no TE: checkpoints are
read where there is none.

    weight (M, K)   buffer                 one element covers (rows, columns)
    float8          data                   1 x 1          scale: one for the whole weight
    mxfp8           rowwise data, scale    1 x 1, 1 x 32
                    columnwise data, scale 1 x 1, 32 x 1  (quantized independently of the rowwise ones)
    float8-block    data, scale            1 x 1, 128 x 128, and the same transposed
    nvfp4           data, scale            1 x 2 (two values in a byte), 1 x 16, and transposed; amax of the
    whole weight

Delayed and current scaling are one format, float8: the bytes are the same, only the scale comes from elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

#: Rows and columns of the weight that one element of a buffer covers; ``None``: the whole weight.
Block: TypeAlias = tuple[int, int] | None

_FP8 = ("kFloat8E4M3", "kFloat8E5M2")


@dataclass(frozen=True)
class Buffer:
    """A tensor of a quantized weight.

    Attributes:
        name: TE's name of it in ``get_metadata()``.
        block: What one element covers.
        number: How one element is read as a number; uint8 for the weight's own values, which are in the format's
            element type, and of NVFP4 two in a byte.
        is_transposed: Whether TE stores it transposed.
        is_derived: Whether TE makes it anew from what was gathered (``fsdp_post_all_gather``: transposes, and scales
            padded into new tensors), so that FSDP2, which does not know it, does not free it.
        attribute: TE's attribute of the quantized tensor; empty: the name after an underscore.
    """

    name: str
    block: Block
    number: torch.dtype = torch.uint8
    is_transposed: bool = False
    is_derived: bool = False
    attribute: str = ""

    def __post_init__(self) -> None:
        if not self.attribute:
            object.__setattr__(self, "attribute", f"_{self.name}")

    @property
    def holds_values(self) -> bool:
        """Whether it holds the weight's values, and not scales."""
        return self.number == torch.uint8

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in files: that of numbers of four bytes, else bytes."""
        return self.number if self.number.itemsize > 1 else torch.uint8


@dataclass(frozen=True, eq=False)
class Format:
    """A quantized format.

    Attributes:
        name: As reports, errors and checkpoints say it; TE's class name for a format that is not known here.
        tensor: Name of TE's class of tensors.
        module: Module of ``transformer_engine.pytorch.tensor`` that holds it.
        quantizers: Names of TE's classes that make such tensors -> where the scale comes from: ``"amax"`` of the whole
            weight when it is quantized, ``"history"`` of amaxes (delayed scaling), ``"blocks"`` of the weight, the two
            ``"parts"`` of a hybrid weight, or ``""`` for none.
        block: Rows (and columns) that one scale spans: a shard must hold whole blocks. 1 for one scale per weight,
            ``None`` where it is not known.
        elements: Element types that it may have (``tex.DType``).
        available: TE's function that says whether the device computes in it.
        buffers: In the order of files.
        unknown_options: Options of TE's tensors, each with the value under which ``buffers`` does not hold.
        unsaid_options: Options that change the values without a trace in the buffers, each with the value that is not
            the usual one: no checkpoint says that they were on.
        independent_directions: Whether rowwise and columnwise data are quantized independently: neither can be made
            from the other, and a gather brings one of them. Other formats are sent in row-wise bytes alone.
        dropped: Buffers that a gather brings first, in its order, and that TE takes off the gathered weight before a
            backward (``fsdp_post_all_gather``).
        short_blocks: Whether a weight may end in a part of a block.
        transpose: Buffer of the values with the last dim first, which a weight may have instead of ``data``.
    """

    name: str
    tensor: str = ""
    module: str = ""
    quantizers: Mapping[str, str] = field(default_factory=dict)
    block: int | None = None
    elements: tuple[str, ...] = ()
    available: str = ""
    buffers: tuple[Buffer, ...] = ()
    unknown_options: Mapping[str, bool] = field(default_factory=dict)
    unsaid_options: Mapping[str, bool] = field(default_factory=dict)
    independent_directions: bool = False
    dropped: tuple[Buffer, ...] = ()
    short_blocks: bool = False
    transpose: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def has_one_scale(self) -> bool:
        """Whether the whole weight has one scale and nothing else, so that shards of any size will do."""
        return self.block == 1

    def block_or_largest(self) -> int:
        """``block``; of a format that is not known the largest that there is."""
        return self.block or max(row.block or 1 for row in FORMATS.values())

    def directions(self) -> list[dict[str, Block]]:
        """Sets of buffers that each give the weight's values alone, row-wise first: name -> block."""
        if self.has_one_scale:
            return [{buffer.name: buffer.block for buffer in self.buffers}]
        found = [
            {buffer.name: buffer.block for buffer in self.buffers if direction in buffer.name}
            for direction in ("rowwise", "columnwise")
        ]
        return [needed for needed in found if needed]


_VALUES = (1, 1)
_FP32, _E8M0, _E4M3 = torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn
_FLOAT8_DATA = Buffer("data", _VALUES)
_BLOCK_ROWWISE = Buffer("rowwise_data", _VALUES), Buffer("rowwise_scale_inv", (128, 128), _FP32)
#: Made from the row-wise bytes.
_TURNED: dict[str, Any] = {"is_transposed": True, "is_derived": True}

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
        block=32,
        elements=_FP8,
        available="is_mxfp8_available",
        buffers=(
            Buffer("rowwise_data", _VALUES),
            Buffer("rowwise_scale_inv", (1, 32), _E8M0, is_derived=True),
            Buffer("columnwise_data", _VALUES),
            Buffer("columnwise_scale_inv", (32, 1), _E8M0, is_derived=True),
        ),
        unknown_options={"with_gemm_swizzled_scales": True},
        independent_directions=True,
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
            Buffer("columnwise_data", _VALUES, **_TURNED),
            Buffer("columnwise_scale_inv", (128, 128), _FP32, **_TURNED),
        ),
        # Blocks of 1 x 128 (activations) have scales in another layout.
        unknown_options={"is_2D_scaled": False},
        dropped=_BLOCK_ROWWISE,
        short_blocks=True,
    ),
    Format(
        name="nvfp4",
        tensor="NVFP4Tensor",
        module="nvfp4_tensor",
        # First-level scales belong to blocks, the second-level one to the whole weight.
        quantizers={"NVFP4Quantizer": "amax"},
        block=16,
        elements=("kFloat4E2M1",),
        available="is_nvfp4_available",
        buffers=(
            Buffer("rowwise_data", (1, 2)),
            Buffer("rowwise_scale_inv", (1, 16), _E4M3, is_derived=True),
            Buffer("columnwise_data", (2, 1), **_TURNED),
            Buffer("columnwise_scale_inv", (16, 1), _E4M3, **_TURNED),
            Buffer("amax_rowwise", None, _FP32),
            Buffer("amax_columnwise", None, _FP32),
        ),
        unknown_options={"with_gemm_swizzled_scales": True, "row_scaled_nvfp4": True},
        # TE 2.20: scales go up to 256 instead of 448.
        unsaid_options={"nvfp4_use_4over6": True},
    ),
    # Each direction in a format of its own: the parts are what has buffers.
    Format("hybrid", "HybridQuantizedTensor", "hybrid_tensor", quantizers={"HybridQuantizer": "parts"}),
    # A part of a hybrid weight that is not quantized.
    Format("identity", "IdentityTensor", "identity_tensor", quantizers={"IdentityQuantizer": ""}),
)

#: Rows by name.
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
#: Name of a quantizer's class -> where the scale comes from, see :class:`Format`.
SCALE_SOURCES: dict[str, str] = {name: source for row in _ROWS for name, source in row.quantizers.items()}
#: Buffers of a ``GroupedTensor``, whose tensors of all experts lie in one: attribute -> argument of its constructor.
#: Where two are one, it goes by the first name. ``scale`` is a workspace of the quantization.
GROUPED_BUFFERS = {
    "rowwise_data": "data",
    "columnwise_data": "columnwise_data",
    "scale_inv": "scale_inv",
    "columnwise_scale_inv": "columnwise_scale_inv",
    "amax": "amax",
    "columnwise_amax": "columnwise_amax",
    "scale": "scale",
}


@functools.cache
def unknown_format(name: str) -> Format:
    """The row of a format that is not known here: a name, and no facts."""
    return Format(name)
