"""TransformerEngine's pickles, read without TE and without running anything of them.

An unpickler of Python's is given a table of names, each with a stand-in that keeps what was stored; any other name is
an error. TE's quantized tensors are known under TE's names, and no code of TE or torch runs.

Private names used here: the reconstructors of TE's quantized tensors and their arguments, the values of its ``DType``,
the entries of delayed scaling's ``_extra_state`` (TE 2.18 to 2.20).
"""

from __future__ import annotations

import collections
import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import IO, Any

import torch

from te_fsdp.errors import CheckpointError

_TENSORS = "transformer_engine.pytorch.tensor"
#: TE's enum values (``transformer_engine.pytorch.constants.DType``, TE 2.18 to 2.20).
_DTYPES = {7: "kFloat8E4M3", 8: "kFloat8E5M2", 9: "kFloat8E8M0", 10: "kFloat4E2M1"}
#: Dtypes of torch's classes of storages; that without one tells bytes.
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}


class UnknownNameError(pickle.UnpicklingError):
    """A pickle that wants something of no known name; the text is the name."""


class TableUnpickler(pickle.Unpickler):
    """Knows the names of a table. ``load_storage`` makes what a pickled tensor's bytes are."""

    def __init__(
        self,
        stream: IO[bytes],
        known: Mapping[str, Any],
        load_storage: Callable[[torch.dtype, str], Any] | None = None,
    ) -> None:
        super().__init__(stream)
        self.known, self.load_storage = known, load_storage

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if full in self.known:
            found = self.known[full]
            # A pickle may set attributes of what it names: of a new object each time, not of one of ours.
            if isinstance(found, type) and found.__module__ == __name__:
                return type(name, (found,), {})
            return partial(found) if isinstance(found, FunctionType | partial) else found
        if module in ("torch", "torch.storage"):
            value = getattr(torch, _STORAGES.get(name, name), None)
            if isinstance(value, torch.dtype):
                return value
        raise UnknownNameError(full)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, *_ = pid
        if kind != "storage" or self.load_storage is None or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"an object kept elsewhere ({kind})")
        return self.load_storage(dtype, str(key))


def with_record(tensor: torch.Tensor, record: Any) -> Any:
    """A tensor without data that knows where its storage lies."""
    tensor.record = record  # type: ignore[attr-defined]
    return tensor


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


#: Arguments of TE's reconstructors of quantized tensors, by format; those of TE 2.18 to 2.20.
_REBUILT = {
    "float8": "data element fp8_scale_inv dtype shape transpose",
    "mxfp8": "rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv element dtype shape quantizer "
    "with_gemm_swizzled_scales",
    "float8-block": "shape rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv element dtype quantizer "
    "is_2D_scaled data_format",
    # 4over6 (TE 2.20): another largest scale, which the components do not tell.
    "nvfp4": "shape rowwise_data rowwise_scale_inv columnwise_data columnwise_scale_inv amax_rowwise amax_columnwise "
    "element dtype quantizer with_gemm_swizzled_scales row_scaled_nvfp4 nvfp4_use_4over6 nvfp4_e4m3_max",
}
_OPTIONS = ("with_gemm_swizzled_scales", "is_2D_scaled", "row_scaled_nvfp4", "nvfp4_use_4over6")


def _quantized(kind: str, *args: Any) -> Quantized:
    """Stands for the reconstructor of a format."""
    names = _REBUILT[kind].split()
    if len(args) > len(names):
        raise TypeError(f"{len(args)} arguments for a tensor of {kind}")
    values = dict(zip(names, args, strict=False))  # the last ones are newer than TE 2.18
    transpose = values.pop("transpose", None)
    if kind == "float8" and values["data"] is None:
        # Kept transposed only (TE 2.20): the same bytes, last dim first.
        values["data"] = with_record(torch.movedim(transpose, 0, -1), transpose.record)
    buffers = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    options = {name: bool(values.get(name, False)) for name in _OPTIONS if name in names}
    element = values["element"]
    element = getattr(element, "name", str(element))
    return Quantized(kind, values["dtype"], tuple(values["shape"]), element, buffers, options)


_FLOAT8 = "float8_tensor.Float8Quantizer", "float8_tensor.Float8CurrentScalingQuantizer"
_QUANTIZERS = (*_FLOAT8, "mxfp8_tensor.MXFP8Quantizer", "float8_blockwise_tensor.Float8BlockQuantizer")
#: What stands in pickled state dicts of TE's.
TENSORS: dict[str, Any] = {
    f"{_TENSORS}.float8_tensor._make_float8_tensor_in_reduce_ex": partial(_quantized, "float8"),
    f"{_TENSORS}.mxfp8_tensor._make_mxfp8_tensor_in_reduce_ex": partial(_quantized, "mxfp8"),
    f"{_TENSORS}.float8_blockwise_tensor._make_float8_blockwise_tensor_in_reduce_ex": partial(
        _quantized, "float8-block"
    ),
    f"{_TENSORS}.nvfp4_tensor._make_nvfp4_tensor_in_reduce_ex": partial(_quantized, "nvfp4"),
    "transformer_engine.pytorch.constants.DType": _DType,
    "transformer_engine_torch.DType": _DType,
} | {f"{_TENSORS}.{name}": _Opaque for name in (*_QUANTIZERS, "nvfp4_tensor.NVFP4Quantizer")}

#: Largest forward and backward values of TE's formats (``transformer_engine.common.recipe.Format``).
_FORMATS = {(448.0, 448.0): "E4M3", (57344.0, 57344.0): "E5M2", (448.0, 57344.0): "HYBRID"}
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
    "transformer_engine.common.recipe.Format": lambda largest: largest,
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
        The recipe, as :func:`te_fsdp._te_modules.describe_delayed_recipe` describes it, and the tensors by our names;
        ``None`` where there is no state: no bytes, or a recipe without history.

    Raises:
        CheckpointError: Something else than TE 2's delayed-scaling state, or a damaged pickle.
    """
    if not data:
        return None
    try:
        state = TableUnpickler(io.BytesIO(data), _ENTRIES).load()
        if not isinstance(state, dict) or not isinstance(state.get("recipe"), _Recipe):
            raise pickle.UnpicklingError("no recipe of delayed scaling")
        if "scale_fwd" not in state:
            return None
        return _describe(state), {ours: state[theirs] for ours, theirs in _STATE.items()}
    except Exception as error:
        raise CheckpointError(
            f"{key}: not a state that te_fsdp can read",
            expected="the delayed-scaling state of TransformerEngine 2, or an empty entry",
            got=f"{type(error).__name__}: {error}",
            why="It is a pickle, and nothing in it is run",
            fix="leave these entries out (te-fsdp ckpt convert --extra-state drop); histories then start anew",
        ) from error


def _describe(state: dict[str, Any]) -> dict[str, Any]:
    fields = state["recipe"].fields
    # A dataclass pickles the attributes that differ from the class's own; the rest are TE's defaults.
    algorithm = fields.get("amax_compute_algo", "max")
    return {
        "num_gemms": state["extra_fp8_variables"]["num_gemms"],
        "margin": fields.get("margin", 0),
        "fp8_format": _FORMATS[tuple(fields.get("fp8_format", (448.0, 57344.0)))],
        "amax_history_len": int(state["amax_history_fwd"].shape[0]),
        "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
        "reduce_amax": fields.get("reduce_amax", True),
    }
