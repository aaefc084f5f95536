"""What is to know about each of TE's quantized formats: one row per format, read by all; and TE's pickles of them.

Class names, buffers, options, reconstructors and the entries of delayed scaling's ``_extra_state`` are TE's own,
checked on TE 2.18 to 2.20.2. This file imports no TE: checkpoints are read where there is none.

    weight (M, K)   buffer                 one element covers (rows, columns)
    float8          data                   1 x 1          scale: one for the whole weight
    mxfp8           rowwise data, scale    1 x 1, 1 x 32
                    columnwise data, scale 1 x 1, 32 x 1  (quantized independently of the rowwise ones)
    float8-block    data, scale            1 x 1, 128 x 128, and the same transposed
    nvfp4           data, scale            1 x 2 (two values in a byte), 1 x 16, and transposed; amax of the
    whole weight

Delayed and current scaling are one format, float8: the bytes are the same, only the scale comes from elsewhere.

Pickles are read by a table of names (:mod:`te_fsdp.unpickling`), each with a stand-in that keeps what was stored.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch

from te_fsdp.errors import CheckpointError
from te_fsdp.unpickling import EnumNames, TableUnpickler

#: Rows and columns of the weight that one element of a buffer covers; ``None``: the whole weight.
Block: TypeAlias = tuple[int, int] | None

_FP8 = ("kFloat8E4M3", "kFloat8E5M2")


@dataclass(frozen=True)
class Buffer:
    """A tensor of a quantized weight."""

    name: str  #: TE's name of it in ``get_metadata()``
    block: Block  #: What one element covers
    #: How one element is read as a number; uint8 for the weight's own values, which are in the format's element type,
    #: and of NVFP4 two in a byte.
    number: torch.dtype = torch.uint8
    is_transposed: bool = False  #: Whether TE stores it transposed
    #: Whether TE makes it anew from what was gathered (``fsdp_post_all_gather``: transposes, and scales padded into new
    #: tensors), so that FSDP2, which does not know it, does not free it.
    is_derived: bool = False
    attribute: str = ""  #: TE's attribute of the quantized tensor; empty: the name after an underscore

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
    """A quantized format."""

    name: str  #: As reports, errors and checkpoints say it; of a format that is not known TE's class
    tensor: str = ""  #: Name of TE's class of tensors
    module: str = ""  #: Module of ``transformer_engine.pytorch.tensor`` that holds it
    #: Names of TE's classes that make such tensors -> where the scale comes from: ``"amax"`` of the whole weight when
    #: it is quantized, ``"history"`` of amaxes (delayed scaling), ``"blocks"`` of the weight, the two ``"parts"`` of a
    #: hybrid weight, or ``""`` for none.
    quantizers: Mapping[str, str] = field(default_factory=dict)
    #: Rows (and columns) that one scale spans: a shard must hold whole blocks. 1 for one scale per weight, ``None``
    #: where it is not known.
    block: int | None = None
    elements: tuple[str, ...] = ()  #: Element types that it may have (``tex.DType``)
    available: str = ""  #: TE's function that says whether the device computes in it
    buffers: tuple[Buffer, ...] = ()  #: In the order of files
    #: Options of TE's tensors, each with the value under which ``buffers`` does not hold.
    unknown_options: Mapping[str, bool] = field(default_factory=dict)
    #: Options that change the values without a trace in the buffers, each with the value that is not the usual one: no
    #: checkpoint says that they were on.
    unsaid_options: Mapping[str, bool] = field(default_factory=dict)
    #: Whether rowwise and columnwise data are quantized independently: neither can be made from the other, and a gather
    #: brings one of them. Other formats are sent in row-wise bytes alone.
    independent_directions: bool = False
    #: Buffers that a gather brings first, in its order, and that TE takes off the gathered weight before a backward
    #: (``fsdp_post_all_gather``).
    dropped: tuple[Buffer, ...] = ()
    short_blocks: bool = False  #: Whether a weight may end in a part of a block
    transpose: str = ""  #: Buffer of the values, the last dim first, that may be there instead of ``data``
    #: Arguments of the function by which TE's pickles rebuild such a tensor; the last ones may be missing.
    pickled: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def has_one_scale(self) -> bool:
        """Whether the whole weight has one scale and nothing else, so that shards of any size will do."""
        return self.block == 1

    def derives_columnwise(self, quantizer: Any) -> bool:
        """Return whether TE can compute the columnwise data of a weight from its rowwise data."""
        # One-dimensional blocks have different scales in the two directions.
        two_dim = (
            getattr(quantizer, "with_2d_quantization", True)
            and getattr(quantizer, "block_scaling_dim", 2) == 2
        )
        return two_dim and not self.independent_directions

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
        pickled="data element fp8_scale_inv dtype shape transpose",
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
        pickled="rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv element dtype shape quantizer "
        "with_gemm_swizzled_scales",
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
        pickled="shape rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv element dtype quantizer "
        "is_2D_scaled data_format",
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
        pickled="shape rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv amax_rowwise "
        "amax_columnwise element dtype quantizer with_gemm_swizzled_scales row_scaled_nvfp4 nvfp4_use_4over6 "
        "nvfp4_e4m3_max",
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


# ------------------------------------------------------------------------------------------------------------- pickles

#: TE's enum values (``transformer_engine.pytorch.constants.DType``, TE 2.18 to 2.20).
_DTYPES = {7: "kFloat8E4M3", 8: "kFloat8E5M2", 9: "kFloat8E8M0", 10: "kFloat4E2M1"}


def with_record(tensor: torch.Tensor, record: Any) -> Any:
    """A tensor without data that knows where its storage lies."""
    tensor.record = record  # type: ignore[attr-defined]
    return tensor


@dataclass
class Quantized:
    """One of TE's quantized tensors as it was stored."""

    format: str  #: Name of its format
    dtype: torch.dtype  #: That it stands for
    shape: tuple[int, ...]  #: Of the weight
    element: str  #: TE's name of the element type
    buffers: dict[str, Any]  #: By TE's names in ``get_metadata()``: tensors without data, or places in a file
    options: dict[str, Any]  #: What else was stored about the buffers' layout


class _Opaque:
    """Stands for an object of TE that is of no use here."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _DType:
    def __init__(self, value: int) -> None:
        self.name = _DTYPES.get(int(value), str(value))


def _quantized(row: Format, *args: Any) -> Quantized:
    """Stands for the reconstructor of a format."""
    names = row.pickled.split()
    if len(args) > len(names):
        raise TypeError(f"{len(args)} arguments for a tensor of {row}")
    values = dict(zip(names, args, strict=False))  # the last ones are newer than TE 2.18
    transpose = values.pop("transpose", None)
    if "transpose" in names and values["data"] is None:
        # Kept transposed only (TE 2.20): the same bytes, last dim first.
        values["data"] = with_record(torch.movedim(transpose, 0, -1), transpose.record)
    buffers = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    options = {name: bool(values.get(name)) for name in (*row.unknown_options, *row.unsaid_options)}
    element = getattr(values["element"], "name", str(values["element"]))
    return Quantized(row.name, values["dtype"], tuple(values["shape"]), element, buffers, options)


_TENSORS = "transformer_engine.pytorch.tensor"
_PICKLED = [row for row in _ROWS if row.pickled]
#: What stands in pickled state dicts of TE's.
TENSORS: dict[str, Any] = (
    {f"{_TENSORS}.{row.module}._make_{row.module}_in_reduce_ex": partial(_quantized, row) for row in _PICKLED}
    | {f"{_TENSORS}.{row.module}.{name}": _Opaque for row in _PICKLED for name in row.quantizers}
    | dict.fromkeys(
        ("transformer_engine.pytorch.constants.DType", "transformer_engine_torch.DType"),
        EnumNames(_DType, {name: _DType(value) for value, name in _DTYPES.items()}),
    )
)

#: Largest forward and backward values of TE's formats (``transformer_engine.common.recipe.Format``).
_RANGES = {(448.0, 448.0): "E4M3", (57344.0, 57344.0): "E5M2", (448.0, 57344.0): "HYBRID"}
_STATE = {
    "scaling_fwd.scale": "scale_fwd",
    "scaling_fwd.amax_history": "amax_history_fwd",
    "scaling_bwd.scale": "scale_bwd",
    "scaling_bwd.amax_history": "amax_history_bwd",
}


class _Recipe:
    """Stands for TE's recipe; its attributes are the pickled ones."""

    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> _Recipe:
        made = super().__new__(cls)
        made.fields = {}
        return made

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields.update(state)


class _Largest(tuple):
    """Stands for the format's pair of largest values, a named tuple."""

    def __new__(cls, *values: float) -> _Largest:
        return super().__new__(cls, values)


def _load_from_bytes(data: bytes) -> Any:
    """Stands for torch's own, which would load any pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _rebuild_whole(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any
) -> torch.Tensor:
    """Stands for torch's function of the same use."""
    with warnings.catch_warnings():
        # The pickle holds storages with a dtype, which torch has deprecated; it reads them still.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        whole = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.untyped())  # type: ignore[no-matching-overload]
    return whole.as_strided(size, stride, offset).clone()


_ENTRIES = {
    "transformer_engine.common.recipe.DelayedScaling": _Recipe,
    "transformer_engine.common.recipe.Format": EnumNames(
        lambda largest: largest, {name: largest for largest, name in _RANGES.items()}
    ),
    "transformer_engine.common.recipe._FormatHelper": _Largest,
    "torch._utils._rebuild_tensor_v2": _rebuild_whole,
    "torch.storage._load_from_bytes": _load_from_bytes,
    "collections.OrderedDict": collections.OrderedDict,
}


def read_extra_state(data: bytes, key: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """What an ``_extra_state`` entry holds: delayed scaling's state, a pickle in a tensor.

    Args:
        data: The tensor's bytes.
        key: Its name in the state dict, for messages.

    Returns:
        The recipe, as :func:`te_fsdp.upstream.te_modules.describe_delayed_recipe` describes it, and the tensors by
        our names;
        ``None`` where there is no state: no bytes, or a recipe without history.

    Raises:
        CheckpointError: Something else than TE 2's delayed-scaling state, or a damaged pickle.
    """
    if not data:
        return None
    try:
        state = TableUnpickler(data, _ENTRIES).load()
        if not isinstance(state, dict) or not isinstance(state.get("recipe"), _Recipe):
            raise pickle.UnpicklingError("no recipe of delayed scaling")
        if "scale_fwd" not in state:
            return None
        return _describe(state), {ours: state[theirs] for ours, theirs in _STATE.items()}
    except Exception as error:
        expected = "the delayed-scaling state of TransformerEngine 2, or an empty entry"
        got, why = f"{type(error).__name__}: {error}", "It is a pickle, and nothing in it is run"
        raise unreadable_state(key, expected, got, why=why) from error


def unreadable_state(key: str, expected: str, got: str, *, why: str = "") -> CheckpointError:
    """The error of an ``_extra_state`` entry that holds something else than delayed scaling's state."""
    return CheckpointError(
        f"{key}: not a state that te_fsdp can read",
        expected=expected,
        got=got,
        why=why,
        fix="leave these entries out (te-fsdp ckpt convert --extra-state drop); histories then start anew",
    )


def _describe(state: dict[str, Any]) -> dict[str, Any]:
    fields = state["recipe"].fields
    # A dataclass pickles the attributes that differ from the class's own; the rest are TE's defaults.
    algorithm = fields.get("amax_compute_algo", "max")
    return {
        "num_gemms": state["extra_fp8_variables"]["num_gemms"],
        "margin": fields.get("margin", 0),
        "fp8_format": _RANGES[tuple(fields.get("fp8_format", (448.0, 57344.0)))],
        "amax_history_len": int(state["amax_history_fwd"].shape[0]),
        "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
        "reduce_amax": fields.get("reduce_amax", True),
    }
