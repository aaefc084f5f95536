"""Private names of TransformerEngine, checked with TE 2.18 to 2.20.2. Only files of ``upstream`` import TE.

TE is imported on first use, never at ``import te_fsdp``. Private names used here: a module's
``param_init_meta``, ``quantizers["scaling_fwd"]``, ``primary_weights_in_fp8``,
``preserve_high_precision_init_val``, ``wgrad_store`` and ``fp8_meta``; a quantized tensor's ``_quantizer``,
``_dtype`` and ``amax_reduction_group``; and the buffers that ``get_metadata()`` lists.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from types import MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from te_fsdp.errors import PrecisionError
from te_fsdp.upstream.te_formats import FORMATS, SCALE_SOURCES, Format, row_for, unknown_format

#: Module kinds with placement rules, derived classes first.
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
    """Return ``transformer_engine.pytorch``, imported on first call; raise ImportError with a fix without it."""
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except (ImportError, RuntimeError) as error:  # RuntimeError: TE's meta package without its library
        raise ImportError(
            f"te_fsdp needs TransformerEngine 2.18 to 2.20, whose import failed: {error}. Fix: pip install "
            "'te-fsdp[gpu]' on a machine with an NVIDIA GPU, or pip install 'te-fsdp[emulation]' and call "
            "te_fsdp.emulation.install() before anything imports transformer_engine."
        ) from error


def is_loaded() -> bool:
    """Return whether TE was imported. If not, no model contains TE modules."""
    return "transformer_engine.pytorch" in sys.modules


def recipes() -> ModuleType:
    """Return ``transformer_engine.common.recipe``."""
    return importlib.import_module("transformer_engine.common.recipe")


def recipes_in_use(model: nn.Module) -> list[str]:
    """Return the recipe classes of the latest forward of a model's modules (``fp8``, ``fp8_meta``)."""
    attributes = (module.__dict__ for module in model.modules())
    metas = [attrs["fp8_meta"] for attrs in attributes if attrs.get("fp8") is True and "fp8_meta" in attrs]
    return sorted({type(meta["recipe"]).__name__ for meta in metas if "recipe" in meta})


def module_class(kind: str) -> type[nn.Module]:
    """Return TE's class of one of :data:`KINDS`."""
    return getattr(te(), kind)


def delays_weight_gradients(module: nn.Module) -> bool:
    """Return whether a module was built with ``delay_wgrad_compute=True``."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def base_module_class() -> type[nn.Module]:
    """Return the class with parameter registration and ``reset_parameters`` (``TransformerEngineBaseModule``)."""
    return importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule


def kind_of(module: nn.Module) -> str | None:
    """Return a module's kind; ``None`` for a class outside of TE, ``"unknown"`` for TE modules without rules."""
    return _kind_of_class(type(module)) if is_loaded() else None


@functools.cache
def _kind_of_class(cls: type) -> str | None:
    for kind in KINDS:
        if issubclass(cls, module_class(kind)):
            return kind
    from_te = any(c.__module__.split(".")[0] == "transformer_engine" for c in cls.__mro__)
    return "unknown" if from_te else None


def stock_classes(cls: type) -> list[type]:
    """Return the base classes behind a bound class: those that te_fsdp has neither made nor extended."""
    return [base for base in cls.__mro__ if not any(c.__module__.startswith("te_fsdp") for c in base.__mro__)]


#: Constructor arguments stored under different names (TE 2.18 to 2.20.2: ``module``, ``ops/basic``).
_KEPT_AS = {"bias": "use_bias", "p": "dropout_probability", "scale_bias": "_scale_bias", "shape": "_shape"}


def argument_of(module: nn.Module, name: str, absent: Any = None) -> Any:
    """Return the constructor argument that a module has stored; ``absent`` if it has not stored any."""
    stored = getattr(module, _KEPT_AS.get(name, name), absent)
    return getattr(module, name, absent) if stored is absent else stored


# --- parameters


def init_function(module: nn.Module, name: str) -> Callable[[torch.Tensor], Any]:
    """Return TE's init function of a parameter, for the original (unsharded) tensor."""
    # DotProductAttention.__init__ creates zeros without registering an init function
    if name == "softmax_offset":
        return torch.nn.init.zeros_
    return module.param_init_meta[name].init_fn  # type: ignore[index, union-attr]


def weight_quantizer(module: nn.Module, name: str) -> Any | None:
    """Return a quantizer for a quantized weight, configured by TE; ``None`` for high-precision weights.

    It is the module's own quantizer. Callers that set an amax group on it must remove it afterwards.
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
    """Return whether a module was built under ``quantized_model_init(preserve_high_precision_init_val=True)``."""
    return bool(getattr(module, "preserve_high_precision_init_val", False))


def high_precision_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a quantized weight's value before quantization, if TE has kept it (CPU tensor, nominal dtype)."""
    return tensor.__dict__.get("_high_precision_init_val")


#: Attributes that belong to a tensor's data, not to the parameter: the value before quantization (set by TE or
#: :func:`attach_high_precision_value`), TE's amax group, and the attribute set by ``quantized/shards.py``.
DATA_ATTRIBUTES = (
    "_high_precision_init_val",
    "get_high_precision_init_val",
    "clear_high_precision_init_val",
    "amax_reduction_group",
    "new_zeros",
)


def attach_high_precision_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Store ``value`` on a quantized weight under TE's public names."""
    tensor._high_precision_init_val = value  # type: ignore[attr-defined]
    tensor.get_high_precision_init_val = MethodType(high_precision_value, tensor)  # type: ignore[attr-defined]
    tensor.clear_high_precision_init_val = MethodType(drop_high_precision_value, tensor)  # type: ignore[attr-defined]


def drop_high_precision_value(tensor: torch.Tensor) -> None:
    """Drop the value before quantization, which no longer matches the tensor's data."""
    tensor.__dict__.pop("_high_precision_init_val", None)


# --- quantized tensors


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return whether a (local) tensor is one of TE's quantized tensors."""
    return is_quantized_class(type(tensor))


@functools.cache  # called a hundred times per step; the result of a class never changes
def is_quantized_class(cls: type) -> bool:
    """Return whether a class is one of TE's quantized tensors. A cached result needs no Python call."""
    return is_loaded() and issubclass(cls, te().QuantizedTensor)


def is_grouped(tensor: torch.Tensor) -> bool:
    """Return whether a quantized tensor contains all experts of a layer (``te_fsdp.quantized.grouped_weight``)."""
    return hasattr(tensor, "experts")


#: Attributes of a quantized tensor, for callers in every all-gather: quantizer, and inverse scale (float8 only).
QUANTIZER, SCALE = "_quantizer", "_scale_inv"


def quantizer_of(tensor: torch.Tensor) -> Any:
    """Return the quantizer of a quantized tensor, ``None`` for a plain one."""
    return getattr(tensor, QUANTIZER, None)


def inverse_scale_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float8 tensor's inverse scale: one float, the tensor's own buffer."""
    return tensor.get_metadata()["fp8_scale_inv"]  # type: ignore[attr-defined]


#: Attribute of a quantizer with one scale: whether it reduces the amax over a process group.
REDUCES_AMAX = "with_amax_reduction"


def set_quantizer_amax_group(quantizer: Any, group: Any) -> None:
    """Set the process group over which a quantizer with one scale reduces the amax; ``None`` for no reduction."""
    # Other quantizers do not have these attributes and are not changed.
    if hasattr(quantizer, "with_amax_reduction"):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = group is not None, group


def amax_group_of(quantizer: Any) -> Any:
    """Return the amax group of a quantizer, or of writes to a tensor; ``None`` for no reduction."""
    return getattr(quantizer, "amax_reduction_group", None)


def set_write_amax_group(tensor: torch.Tensor, group: Any) -> None:
    """Set the process group over which writes to a quantized tensor reduce the amax (``amax_reduction_group``)."""
    tensor.amax_reduction_group = group  # type: ignore[attr-defined]


def persistent_quantizer_of(quantizer: Any) -> Any:
    """Return a copy of a quantizer that creates TE's public tensor classes, with scales in the format's layout."""
    copied = quantizer.copy()
    copied.internal = copied.optimize_for_gemm = False
    return copied


def format_of(tensor: torch.Tensor) -> Format | None:
    """Return the format of a quantized tensor, ``None`` for a plain one."""
    if not is_quantized_class(type(tensor)):
        return None
    if hasattr(tensor, "experts"):  # is_grouped without a call, which every step would make often
        return format_of_quantizer(quantizer_of(tensor))
    row = _format_of_class(type(tensor))
    return row_for(row, tensor._quantizer) if row.two_dim else row  # type: ignore[attr-defined]


@functools.cache
def _format_of_class(cls: type) -> Format:
    rows = {row.tensor: row for row in FORMATS.values()}
    formats = (rows[base.__name__] for base in cls.__mro__ if base.__name__ in rows)
    return next(formats, unknown_format(cls.__name__))


def format_of_quantizer(quantizer: Any) -> Format:
    """Return the format that a quantizer produces."""
    name = type(quantizer).__name__
    row_found = next((row for row in FORMATS.values() if name in row.quantizers), unknown_format(name))
    return row_for(row_found, quantizer)


def active_recipe() -> Any | None:
    """Return the recipe of the current ``te.autocast`` (``FP8GlobalStateManager``); ``None`` outside or if disabled."""
    loaded = sys.modules.get("transformer_engine.pytorch.quantization")
    state = getattr(loaded, "FP8GlobalStateManager", None)
    return state.get_fp8_recipe() if state is not None and state.is_fp8_enabled() else None


def format_recipe(recipe: Any | None) -> str:
    """Format a recipe with its options, identically in all processes. Addresses of functions are omitted."""
    if recipe is None:
        return "no te.autocast"
    options = re.sub(" at 0x[0-9a-f]+", "", " ".join(repr(recipe).split()))
    return f"te.autocast of {type(recipe).__name__}, {options}"


def needs_shared_amax(quantizer: Any) -> bool:
    """Return whether a quantizer computes one scale from the amax of the unsharded tensor."""
    # This is true for current scaling, NVFP4's second-level scale, and hybrids of them. Delayed scaling
    # reduces its amax history separately.
    return SCALE_SOURCES.get(type(quantizer).__name__) in ("amax", "parts")


def one_scale_quantizers(quantizer: Any) -> list[Any]:
    """Return the quantizers with one scale per tensor: the given one or a hybrid's parts; none for block formats."""
    classes = quantizer_classes("amax", "history")
    if isinstance(quantizer, classes):
        return [quantizer]
    return [part for part in quantizers_of_parts(quantizer) if isinstance(part, classes)]


def quantizers_of_parts(quantizer: Any) -> list[Any]:
    """Return the two quantizers of a hybrid quantizer, else the quantizer itself."""
    parts = [getattr(quantizer, f"{direction}_quantizer", None) for direction in ("rowwise", "columnwise")]
    return [part for part in parts if part is not None] or [quantizer]


def storage_parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with a quantized tensor's data: itself, or the rowwise and columnwise parts of a hybrid."""
    if not hasattr(tensor, "_rowwise_storage"):
        return [tensor]
    storage: Any = tensor
    return [part for part in (storage._rowwise_storage, storage._columnwise_storage) if part is not None]


def high_precision_part(part: torch.Tensor) -> torch.Tensor | None:
    """Return the values of an unquantized part of a hybrid tensor (``IdentityTensor``); ``None`` for other parts."""
    return getattr(part, "_hp_data", None)


def all_one_scale_quantizers(tensor: torch.Tensor) -> list[Any]:
    """Return :func:`one_scale_quantizers` of a tensor and of a hybrid's parts."""
    # Each part has its own copy of the parent's quantizer. The parent's quantizer quantizes but reads the
    # reduction group from the part (TE 2.20.2 ``HybridQuantizer.update_quantized``).
    owners = {id(t): t for t in (tensor, *storage_parts_of(tensor))}
    return [q for t in owners.values() for q in one_scale_quantizers(quantizer_of(t))]


def copy_scale(tensor: torch.Tensor, shard: torch.Tensor) -> None:
    """Set the scale of an unsharded weight to the current scale of its shard. Local operation."""
    # TE passes a per-tensor float8 scale in the first all-gather only (``Float8Tensor.fsdp_post_all_gather``
    # and ``fsdp_assign_gathered``, 2.18 to 2.20.2). Both share one scale tensor until the shard gets a new
    # one.
    if hasattr(shard, "_rowwise_storage"):
        for part, shard_part in zip(storage_parts_of(tensor), storage_parts_of(shard), strict=True):
            copy_scale(part, shard_part)
    elif hasattr(shard, SCALE):
        setattr(tensor, SCALE, getattr(shard, SCALE))


@functools.cache
def quantizer_classes(*sources: str, blocks: bool = True) -> tuple[type, ...]:
    """Return the quantizer classes whose scale comes from one of ``sources`` (see ``Format`` in ``te_formats.py``).

    ``blocks`` includes classes that also have block scales.
    """
    rows = [row for row in FORMATS.values() if blocks or row.has_one_scale]
    names = [(row.module, name) for row in rows for name in row.quantizers if row.quantizers[name] in sources]
    return tuple(tensor_attribute(module, name) for module, name in names)


def tensor_attribute(module: str, name: str) -> type:
    """Return a class of a module of ``transformer_engine.pytorch.tensor``."""
    return getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), name)


def is_fused_adam(optimizer: object) -> bool:
    """Return whether an optimizer is TE's FusedAdam, which can keep main weights itself."""
    return is_fused_adam_class(type(optimizer))


@functools.cache
def is_fused_adam_class(cls: type) -> bool:
    """Return whether a class is TE's FusedAdam or derived from it. A cached result needs no Python call."""
    return is_loaded() and issubclass(cls, te().optimizers.FusedAdam)


def is_stock_fused_adam(optimizer: object) -> bool:
    """Return whether an optimizer is exactly TE's FusedAdam. A subclass may override ``step``."""
    return is_fused_adam_class(type(optimizer)) and type(optimizer) is te().optimizers.FusedAdam


def is_fused_sgd(optimizer: object) -> bool:
    """Return whether an optimizer is TE's FusedSGD."""
    return is_loaded() and isinstance(optimizer, te().optimizers.FusedSGD)


def move_options(optimizer: torch.optim.Optimizer) -> None:
    """Move the options of a FusedAdam with ``capturable=True`` to its parameters' device. Local operation.

    Its kernel reads ``lr`` and ``step`` there. State dicts may contain them on the CPU.
    """
    if not is_fused_adam(optimizer) or not optimizer.capturable:  # type: ignore[missing-attribute]
        return
    for group in optimizer.param_groups:
        for name, value in group.items():
            if group["params"] and isinstance(value, torch.Tensor):
                group[name] = value.to(group["params"][0].device)


def drop_transpose(tensor: torch.Tensor) -> None:
    """Drop a float8 tensor's cached transpose (``_transpose``). TE recomputes it from the rowwise data."""
    if getattr(tensor, "_data", None) is not None and getattr(tensor, "_transpose", None) is not None:
        tensor._transpose = None  # type: ignore[attr-defined]
        tensor._transpose_invalid = True  # type: ignore[attr-defined]


def gathers_one_direction(tensor: torch.Tensor) -> bool:
    """Return whether an all-gather sends only one of two independent directions of a quantized tensor."""
    row = format_of(tensor)
    return row is not None and row.independent_directions


def value_buffers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the buffers with a quantized tensor's values, without scales, which tensors may share."""
    row = format_of(tensor)
    attributes = [b.attribute for b in row.buffers if b.holds_values] if row is not None else []
    return [value for name in attributes if (value := getattr(tensor, name, None)) is not None]


def clone_scales(tensor: torch.Tensor) -> None:
    """Replace the scales and amaxes of a quantized tensor by copies, because tensors may share them."""
    row = format_of(tensor)
    for buffer in row.buffers if row is not None else ():
        scale = None if buffer.holds_values else getattr(tensor, buffer.attribute, None)
        if scale is not None:
            setattr(tensor, buffer.attribute, scale.detach().clone())


def unchanged_hook_attributes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the attributes of a quantized shard that every all-gather sends unchanged, or none."""
    # Tensors of all experts, and formats that send a different direction in backward, have none.
    row = None if is_grouped(tensor) else format_of(tensor)
    return tuple([buffer.attribute for buffer in row.dropped]) if row is not None else ()


def buffers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with a quantized tensor's data: values, scales, transposes."""
    return [value for value in tensor.get_metadata().values() if isinstance(value, torch.Tensor)]  # type: ignore[attr-defined]


def fsdp_group_of(module: nn.Module) -> Any:
    """Return the parameter group that TE's all-gather hooks read for a module (``_get_module_fsdp_state``)."""
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    return distributed._get_module_fsdp_state(module)._fsdp_param_group


# --- delayed scaling


def has_delayed_scale(tensor: torch.Tensor) -> bool:
    """Return whether a quantized tensor's scale comes from an amax history. Every all-gather calls it."""
    return type(tensor._quantizer).__name__ == "Float8Quantizer"  # type: ignore[attr-defined]


def delayed_states(module: nn.Module) -> dict[str, Any] | None:
    """Return a module's delayed-scaling state: ``scaling_fwd``, ``scaling_bwd`` with ``scale``, ``amax_history``.

    Local operation. ``None`` without state. TE creates it in the first forward, or for quantized weights. Raise
    PrecisionError for delayed scaling in a custom recipe, whose state TE keeps per tensor. The module's quantizers and
    TE's reduction buffers refer to these tensors, so write to them instead of replacing them.
    """
    meta = getattr(module, "fp8_meta", None)
    if not isinstance(meta, dict):
        return None
    states = {key: meta[key] for key in ("scaling_fwd", "scaling_bwd") if key in meta}
    if any(getattr(state, "_has_delayed_scaling", False) for state in states.values()):
        raise PrecisionError(
            f"{type(module).__name__}: delayed scaling inside a custom recipe",
            expected="DelayedScaling, or a recipe without state",
            why="Its state has no fixed shape",
            fix="use a different recipe",
        )
    delayed = {key: s for key, s in states.items() if type(s).__name__ == "DelayedScalingRecipeState"}
    return delayed if len(delayed) == 2 else None


@contextlib.contextmanager
def skip_amax_reduction_after_errors() -> Iterator[None]:
    """Return a context in which an exception in ``te.autocast`` skips delayed scaling's all-reduce."""
    # TE would issue it even after an error. Ranks without the error, or under a different recipe, would not
    # participate. The next ``te.autocast`` reduces again, because entering it resets the changed state.
    try:
        yield
    except Exception:
        loaded: Any = sys.modules.get("transformer_engine.pytorch.quantization")
        arguments = loaded.FP8GlobalStateManager.quantization_state.autocast_arguments if loaded else {}
        for key, (recipe, group) in list(arguments.items()):
            if getattr(recipe, "reduce_amax", False):
                copied = copy.copy(recipe)
                copied.reduce_amax = False
                arguments[key] = copied, group
        raise
