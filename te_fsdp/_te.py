"""The only file that imports TransformerEngine and knows its private names; checked on TE 2.18 to 2.20.2.

TE is imported on first use, never at ``import te_fsdp``. Private names used here: a module's
``param_init_meta``, ``quantizers["scaling_fwd"]``, ``primary_weights_in_fp8``, ``preserve_high_precision_init_val``,
``wgrad_store``, a quantized tensor's ``_quantizer``, ``_dtype`` and ``amax_reduction_group``, and the buffers
that ``get_metadata()`` lists.
"""

from __future__ import annotations

import functools
import importlib
import sys
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = [
    "KINDS",
    "attach_high_precision_value",
    "base_module_class",
    "format_of",
    "forget_transpose",
    "gathering_tensor_classes",
    "high_precision_value",
    "init_function",
    "is_loaded",
    "is_quantized",
    "kind_of",
    "module_class",
    "needs_shared_amax",
    "quantizer_of",
    "te",
    "weight_quantizer",
]

#: Module kinds that te_fsdp has rules for; the more derived class first.
KINDS = (
    "LayerNormLinear",
    "LayerNormMLP",
    "GroupedLinear",
    "Linear",
    "LayerNorm",
    "RMSNorm",
    "DotProductAttention",
    "MultiheadAttention",
    "TransformerLayer",
)


@functools.cache
def te() -> ModuleType:
    """``transformer_engine.pytorch``, imported on first call.

    Raises:
        ImportError: TE is not installed, or its compiled part does not load; says how to get it or the
            emulation.
    """
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        raise ImportError(
            f"te_fsdp needs TransformerEngine 2.18 to 2.20, whose import failed: {error}. Fix: pip install "
            "'te-fsdp[gpu]' on a machine with an NVIDIA GPU, or pip install 'te-fsdp[emulation]' and call "
            "te_fsdp.emulation.install() before anything imports transformer_engine."
        ) from error


def is_loaded() -> bool:
    """Whether TE was imported by anyone; a model without TE then needs none of it."""
    return "transformer_engine.pytorch" in sys.modules


def module_class(kind: str) -> type[nn.Module]:
    """TE's own class of one of :data:`KINDS`."""
    return getattr(te(), kind)


def base_module_class() -> type[nn.Module]:
    """The class that owns parameter registration and ``reset_parameters`` (``TransformerEngineBaseModule``)."""
    return importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module, ``None`` if TE does not own its class, ``"unknown"`` for TE modules without rules."""
    if not is_loaded():
        return None
    for kind in KINDS:
        if isinstance(module, module_class(kind)):
            return kind
    from_te = any(c.__module__.split(".")[0] == "transformer_engine" for c in type(module).__mro__)
    return "unknown" if from_te else None


# --- parameters
# ---------------------------------------------------------------------------------------------------


def init_function(module: nn.Module, name: str) -> Callable[[torch.Tensor], Any]:
    """TE's initialiser of a parameter, to be run on the original (unsharded) tensor.

    ``softmax_offset`` is registered without one; its constructor value is zero
    (``DotProductAttention.__init__``).
    """
    if name == "softmax_offset":
        return torch.nn.init.zeros_
    return module.param_init_meta[name].init_fn  # type: ignore[index, union-attr]


def weight_quantizer(module: nn.Module, name: str) -> Any | None:
    """A quantizer for a weight that TE holds quantized, set up as TE does; ``None`` for high-precision ones.

    The quantizer is the module's own: callers that put an amax group on it must take it off again.
    """
    if not getattr(module, "primary_weights_in_fp8", False):
        return None
    meta = module.param_init_meta.get(name)  # type: ignore[union-attr]
    if meta is None or meta.fp8_meta_index is None:
        return None
    quantizer: Any = module.quantizers["scaling_fwd"][meta.fp8_meta_index]  # type: ignore[index]
    quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
    quantizer.internal = False
    return quantizer


def keeps_high_precision_value(module: nn.Module) -> bool:
    """Whether the module was built under ``quantized_model_init(preserve_high_precision_init_val=True)``."""
    return bool(getattr(module, "preserve_high_precision_init_val", False))


def high_precision_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value a quantized weight had before quantization, if TE kept it (CPU tensor, nominal dtype)."""
    return tensor.__dict__.get("_high_precision_init_val")


def attach_high_precision_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Keep ``value`` on a quantized weight under the names that TE's users read it by."""

    def get(self: torch.Tensor) -> torch.Tensor | None:
        return high_precision_value(self)

    def clear(self: torch.Tensor) -> None:
        self.__dict__.pop("_high_precision_init_val", None)

    tensor._high_precision_init_val = value  # type: ignore[attr-defined]
    tensor.get_high_precision_init_val = MethodType(get, tensor)  # type: ignore[attr-defined]
    tensor.clear_high_precision_init_val = MethodType(clear, tensor)  # type: ignore[attr-defined]


# --- quantized tensors
# --------------------------------------------------------------------------------------------


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a (local) tensor is one of TE's quantized tensors."""
    return is_loaded() and isinstance(tensor, te().QuantizedTensor)


def quantizer_of(tensor: torch.Tensor) -> Any:
    """The quantizer that a quantized tensor carries."""
    return tensor._quantizer  # type: ignore[attr-defined]


_FORMATS = {
    "Float8Tensor": "float8",
    "MXFP8Tensor": "mxfp8",
    "Float8BlockwiseQTensor": "float8-block",
    "NVFP4Tensor": "nvfp4",
    "HybridQuantizedTensor": "hybrid",
    "IdentityTensor": "identity",
}


def format_of(tensor: torch.Tensor) -> str | None:
    """Format name of a quantized tensor, ``None`` for a plain one."""
    if not is_quantized(tensor):
        return None
    for cls in type(tensor).__mro__:
        if cls.__name__ in _FORMATS:
            return _FORMATS[cls.__name__]
    return type(tensor).__name__


def format_of_quantizer(quantizer: Any) -> str:
    """Format that a quantizer produces."""
    names = {
        "Float8Quantizer": "float8",
        "Float8CurrentScalingQuantizer": "float8",
        "MXFP8Quantizer": "mxfp8",
    }
    names |= {"Float8BlockQuantizer": "float8-block", "NVFP4Quantizer": "nvfp4", "HybridQuantizer": "hybrid"}
    return names.get(type(quantizer).__name__, type(quantizer).__name__)


def needs_shared_amax(quantizer: Any) -> bool:
    """Whether a quantizer derives one scale from the amax of the whole tensor at quantization time.

    Current scaling, NVFP4's second-level scale, and hybrids of them. Delayed scaling reduces its history
    elsewhere.
    """
    return type(quantizer).__name__ in ("Float8CurrentScalingQuantizer", "NVFP4Quantizer", "HybridQuantizer")


def forget_transpose(tensor: torch.Tensor) -> None:
    """Drop a float8 tensor's cached transpose (``_transpose``); TE remakes it from the bytes."""
    if getattr(tensor, "_data", None) is not None and getattr(tensor, "_transpose", None) is not None:
        tensor._transpose = None  # type: ignore[attr-defined]
        tensor._transpose_invalid = True  # type: ignore[attr-defined]


def gathering_tensor_classes() -> list[type[torch.Tensor]]:
    """Quantized tensor classes that have FSDP2's all-gather hooks in this TE version."""
    module = importlib.import_module("transformer_engine.pytorch.tensor")
    classes = [getattr(module, name, None) for name in _FORMATS]
    return [c for c in classes if c is not None and hasattr(c, "fsdp_pre_all_gather")]


def buffers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that hold a quantized tensor's data: bytes, scales, transposes."""
    return [value for value in tensor.get_metadata().values() if isinstance(value, torch.Tensor)]  # type: ignore[attr - defined]
