"""Types of the compiled extension, with the values of TransformerEngine's headers.

TransformerEngine checks several of them for completeness while it is imported (``pytorch/constants.py:94`` and
``pytorch/cpp_extensions/fused_attn.py:158`` in 2.20.2), so a drift of these lists stops the import. Values that reach
no kernel here (attention layouts, backends) are kept all the same, because pickles and caches may hold them.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

#: Classes report the module they replace, so that a pickle written here names what real TransformerEngine has.
TEX_MODULE = "transformer_engine_torch"


class DType(enum.IntEnum):
    """Element types, ``transformer_engine.h`` (the members that the Python binding exposes)."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (type(self), (int(self),))


_TORCH_DTYPES: dict[int, torch.dtype] = {
    int(DType.kByte): torch.uint8,
    int(DType.kInt32): torch.int32,
    int(DType.kFloat32): torch.float32,
    int(DType.kFloat16): torch.float16,
    int(DType.kBFloat16): torch.bfloat16,
    int(DType.kFloat8E4M3): torch.float8_e4m3fn,
    int(DType.kFloat8E5M2): torch.float8_e5m2,
}


def to_torch_dtype(dtype: int | torch.dtype) -> torch.dtype:
    """Return the ``torch.dtype`` of a TE dtype (this enum, TransformerEngine's own, an int, a ``torch.dtype``).

    Raises:
        TypeError: TE dtype without a torch counterpart (E2M1 packs two values in a byte).
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    result = _TORCH_DTYPES.get(int(dtype))
    if result is None:
        raise TypeError(f"TransformerEngine dtype {dtype!r} has no torch.dtype")
    return result


def _int_enum(name: str, values: dict[str, int]) -> Any:
    return enum.IntEnum(name, values, module=TEX_MODULE)


def _counted(*names: str) -> dict[str, int]:
    return {name: value for value, name in enumerate(names)}


NVTE_Bias_Type = _int_enum(
    "NVTE_Bias_Type", _counted("NVTE_NO_BIAS", "NVTE_PRE_SCALE_BIAS", "NVTE_POST_SCALE_BIAS", "NVTE_ALIBI")
)
NVTE_Mask_Type = _int_enum(
    "NVTE_Mask_Type",
    _counted(
        "NVTE_NO_MASK",
        "NVTE_PADDING_MASK",
        "NVTE_CAUSAL_MASK",
        "NVTE_PADDING_CAUSAL_MASK",
        "NVTE_CAUSAL_BOTTOM_RIGHT_MASK",
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
    ),
)
NVTE_Softmax_Type = _int_enum(
    "NVTE_Softmax_Type", _counted("NVTE_VANILLA_SOFTMAX", "NVTE_OFF_BY_ONE_SOFTMAX", "NVTE_LEARNABLE_SOFTMAX")
)
NVTE_QKV_Format = _int_enum(
    "NVTE_QKV_Format",
    _counted(
        "NVTE_SBHD",
        "NVTE_BSHD",
        "NVTE_THD",
        "NVTE_BSHD_2SBHD",
        "NVTE_SBHD_2BSHD",
        "NVTE_THD_2BSHD",
        "NVTE_THD_2SBHD",
        "NVTE_BHSD",
        "NVTE_QKV_Format_NOT_SET",
    ),
)
NVTE_QKV_Layout = _int_enum(
    "NVTE_QKV_Layout",
    _counted(
        "NVTE_SB3HD",
        "NVTE_SBH3D",
        "NVTE_SBHD_SB2HD",
        "NVTE_SBHD_SBH2D",
        "NVTE_SBHD_SBHD_SBHD",
        "NVTE_BS3HD",
        "NVTE_BSH3D",
        "NVTE_BSHD_BS2HD",
        "NVTE_BSHD_BSH2D",
        "NVTE_BSHD_BSHD_BSHD",
        "NVTE_T3HD",
        "NVTE_TH3D",
        "NVTE_THD_T2HD",
        "NVTE_THD_TH2D",
        "NVTE_THD_THD_THD",
        "NVTE_SBHD_BSHD_BSHD",
        "NVTE_BSHD_SBHD_SBHD",
        "NVTE_THD_BSHD_BSHD",
        "NVTE_THD_SBHD_SBHD",
        "NVTE_Paged_KV_BSHD_BSHD_BSHD",
        "NVTE_Paged_KV_BSHD_SBHD_SBHD",
        "NVTE_Paged_KV_SBHD_BSHD_BSHD",
        "NVTE_Paged_KV_SBHD_SBHD_SBHD",
        "NVTE_Paged_KV_THD_BSHD_BSHD",
        "NVTE_Paged_KV_THD_SBHD_SBHD",
        "NVTE_BHSD_BHSD_BHSD",
        "NVTE_QKV_Layout_NOT_SET",
    ),
)
NVTE_Fused_Attn_Backend = _int_enum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
)
NVTEScalingMode = _int_enum(
    "NVTEScalingMode",
    {
        "NVTE_DELAYED_TENSOR_SCALING": 0,
        "NVTE_MXFP8_1D_SCALING": 1,
        "NVTE_BLOCK_SCALING_1D": 2,
        "NVTE_BLOCK_SCALING_2D": 3,
        "NVTE_NVFP4_1D_SCALING": 4,
        "NVTE_INVALID_SCALING": 100,
    },
)
NVTERoutingMapFormat = _int_enum("NVTERoutingMapFormat", _counted("BYTEMAP", "BITMAP_U8"))
NVTEQBHistogramMode = _int_enum("NVTEQBHistogramMode", _counted("TWO_KERNEL", "FUSED_ATOMIC"))
FP8FwdTensors = _int_enum(
    "FP8FwdTensors",
    _counted(*[f"GEMM{i}_{part}" for i in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")]),
)
FP8BwdTensors = _int_enum(
    "FP8BwdTensors", _counted(*[f"GRAD_{part}{i}" for i in (1, 2, 3) for part in ("OUTPUT", "INPUT")])
)
CommOverlapType = _int_enum("CommOverlapType", _counted("RS", "AG"))
CommOverlapAlgo = _int_enum(
    "CommOverlapAlgo",
    _counted(
        "BULK_OVERLAP_AG",
        "BULK_OVERLAP_RS",
        "SPLIT_PIPELINED_AG_P2P",
        "SPLIT_PIPELINED_RS",
        "SPLIT_PIPELINED_RS_P2P",
        "ATOMIC_GEMM_RS",
        "ATOMIC_GEMM_AG_P2P",
        "ATOMIC_GEMM_RS_P2P",
        "EXTERNAL_BULK_OVERLAP_AG",
    ),
)
Float8BlockScaleTensorFormat = _int_enum("Float8BlockScaleTensorFormat", _counted("GEMM_READY", "COMPACT"))


class FP8TensorMeta:
    """Delayed scaling's per-tensor state; TransformerEngine assigns the three tensors itself."""

    def __init__(self) -> None:
        self.scale: torch.Tensor = torch.Tensor()
        self.scale_inv: torch.Tensor = torch.Tensor()
        self.amax_history: torch.Tensor = torch.Tensor()


class _NotEmulated:
    """Base of classes that exist by name only (annotations, isinstance) and can't be constructed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"transformer_engine_torch.{type(self).__name__} is not emulated on the CPU"
        )


class CommOverlapBase(_NotEmulated):
    """Userbuffers communication overlap."""


class CommOverlapP2PBase(_NotEmulated):
    """Userbuffers point-to-point overlap."""


class CommOverlapHelper(_NotEmulated):
    """Userbuffers bootstrap."""


class CommOverlap(CommOverlapBase):
    """Userbuffers collective overlap."""


class CommOverlapP2P(CommOverlapP2PBase):
    """Userbuffers ring-exchange overlap."""


class FusedAttnHelper(_NotEmulated):
    """Fused attention."""


class EpLayerConfig(_NotEmulated):
    """Expert parallelism of the extension."""


CLASSES = (
    DType,
    FP8TensorMeta,
    CommOverlapBase,
    CommOverlapP2PBase,
    CommOverlapHelper,
    CommOverlap,
    CommOverlapP2P,
    FusedAttnHelper,
    EpLayerConfig,
)
for _class in CLASSES:
    _class.__module__ = TEX_MODULE

ENUMS = (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Fused_Attn_Backend,
    NVTEScalingMode,
    NVTERoutingMapFormat,
    NVTEQBHistogramMode,
    FP8FwdTensors,
    FP8BwdTensors,
    CommOverlapType,
    CommOverlapAlgo,
    Float8BlockScaleTensorFormat,
)

__all__ = [one.__name__ for one in CLASSES + ENUMS] + ["CLASSES", "ENUMS", "TEX_MODULE", "to_torch_dtype"]
