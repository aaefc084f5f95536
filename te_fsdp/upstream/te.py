"""The only file that imports TransformerEngine and knows its private names; checked on TE 2.18 to 2.20.2.

TE is imported on first use, never at ``import te_fsdp``. Private names used here: a module's ``param_init_meta``,
``quantizers["scaling_fwd"]``, ``primary_weights_in_fp8``, ``preserve_high_precision_init_val``, ``wgrad_store`` and
``fp8_meta``, a quantized tensor's ``_quantizer``, ``_dtype`` and ``amax_reduction_group``, and the buffers that
``get_metadata()`` lists.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import re
import sys
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp.errors import PrecisionError
from te_fsdp.upstream.te_formats import FORMATS, SCALE_SOURCES, Format, unknown_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

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


def recipes() -> ModuleType:
    """``transformer_engine.common.recipe``."""
    return importlib.import_module("transformer_engine.common.recipe")


def recipes_in_use(model: nn.Module) -> list[str]:
    """Classes of the recipes under which the modules of a model have last run (``fp8``, ``fp8_meta``)."""
    attributes = (module.__dict__ for module in model.modules())
    metas = [own["fp8_meta"] for own in attributes if own.get("fp8") is True and "fp8_meta" in own]
    return sorted({type(meta["recipe"]).__name__ for meta in metas if "recipe" in meta})


def module_class(kind: str) -> type[nn.Module]:
    """TE's own class of one of :data:`KINDS`."""
    return getattr(te(), kind)


def delays_weight_gradients(module: nn.Module) -> bool:
    """Whether a module was built with ``delay_wgrad_compute=True``."""
    store = getattr(module, "wgrad_store", None)
    return store is not None and store.delay_wgrad_compute()


def base_module_class() -> type[nn.Module]:
    """The class that owns parameter registration and ``reset_parameters`` (``TransformerEngineBaseModule``)."""
    return importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule


def kind_of(module: nn.Module) -> str | None:
    """The kind of a module, ``None`` if TE does not own its class, ``"unknown"`` for TE modules without rules."""
    return _kind_of_class(type(module)) if is_loaded() else None


@functools.cache
def _kind_of_class(cls: type) -> str | None:
    for kind in KINDS:
        if issubclass(cls, module_class(kind)):
            return kind
    from_te = any(c.__module__.split(".")[0] == "transformer_engine" for c in cls.__mro__)
    return "unknown" if from_te else None


#: Attributes that hold arguments of constructors under other names (TE 2.18 to 2.20.2: ``module``, ``ops/basic``).
_KEPT_AS = {"bias": "use_bias", "p": "dropout_probability", "scale_bias": "_scale_bias", "shape": "_shape"}


def argument_of(module: nn.Module, name: str, absent: Any = None) -> Any:
    """What a module keeps of an argument of its constructor; ``absent`` where it keeps none."""
    kept = getattr(module, _KEPT_AS.get(name, name), absent)
    return getattr(module, name, absent) if kept is absent else kept


# --- parameters


def init_function(module: nn.Module, name: str) -> Callable[[torch.Tensor], Any]:
    """TE's initialiser of a parameter, to be run on the original (unsharded) tensor."""
    if name == "softmax_offset":  # registered without one: DotProductAttention.__init__ makes zeros
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


#: Attributes by which TE and :func:`attach_high_precision_value` keep the value from before quantization, and TE's
#: group of the amax: they belong to a tensor's bytes, not to the parameter. So does what ``all_gather.patch_new_zeros``
#: puts there, for one tensor object alone.
OF_THE_BYTES = (
    "_high_precision_init_val",
    "get_high_precision_init_val",
    "clear_high_precision_init_val",
    "amax_reduction_group",
    "new_zeros",
)


def attach_high_precision_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Keep ``value`` on a quantized weight under the names that TE's users read it by."""
    tensor._high_precision_init_val = value  # type: ignore[attr-defined]
    tensor.get_high_precision_init_val = MethodType(high_precision_value, tensor)  # type: ignore[attr-defined]
    tensor.clear_high_precision_init_val = MethodType(drop_high_precision_value, tensor)  # type: ignore[attr-defined]


def drop_high_precision_value(tensor: torch.Tensor) -> None:
    """Drop the value from before quantization, which no longer belongs to the tensor's bytes."""
    tensor.__dict__.pop("_high_precision_init_val", None)


# --- quantized tensors


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a (local) tensor is one of TE's quantized tensors."""
    return is_quantized_class(type(tensor))


@functools.cache  # a step asks some hundred times; no class becomes one of TE's when TE is imported later
def is_quantized_class(cls: type) -> bool:
    """Whether it is a class of TE's quantized tensors. Of a class that is known no call of Python's."""
    return is_loaded() and issubclass(cls, te().QuantizedTensor)


def is_grouped(tensor: torch.Tensor) -> bool:
    """Whether a quantized tensor is that of all experts of a layer (``te_fsdp.quantized.grouped_weight``)."""
    return hasattr(tensor, "experts")


#: Attribute of a quantized tensor: its quantizer. For what asks at every gather.
QUANTIZER = "_quantizer"


def quantizer_of(tensor: torch.Tensor) -> Any:
    """The quantizer that a quantized tensor carries, ``None`` for a plain one."""
    return getattr(tensor, QUANTIZER, None)


def inverse_scale_of(tensor: torch.Tensor) -> torch.Tensor:
    """A float8 tensor's inverse scale: one float, the tensor's own buffer."""
    return tensor.get_metadata()["fp8_scale_inv"]  # type: ignore[attr-defined]


#: Attribute of a quantizer with one scale: whether it takes the amax over a process group when it is called.
REDUCES_AMAX = "with_amax_reduction"


def set_quantizer_amax_group(quantizer: Any, group: Any) -> None:
    """Let a quantizer with one scale take the amax over a process group when it is called, or over none (``None``).

    Others have no such attributes, and are left alone.
    """
    if hasattr(quantizer, "with_amax_reduction"):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = group is not None, group


def amax_group_of(thing: Any) -> Any:
    """The process group over which a quantizer, or a write into a tensor, takes the amax; ``None`` for none."""
    return getattr(thing, "amax_reduction_group", None)


def set_write_amax_group(tensor: torch.Tensor, group: Any) -> None:
    """Let writes into a quantized tensor take the amax over a process group (``amax_reduction_group``)."""
    tensor.amax_reduction_group = group  # type: ignore[attr-defined]


def persistent_quantizer_of(quantizer: Any) -> Any:
    """A copy of a quantizer that makes tensors of TE's public classes, with scales in the layout of the format."""
    own = quantizer.copy()
    own.internal = own.optimize_for_gemm = False
    return own


def format_of(tensor: torch.Tensor) -> Format | None:
    """Format of a quantized tensor, ``None`` for a plain one."""
    if not is_quantized_class(type(tensor)):
        return None
    if hasattr(tensor, "experts"):  # is_grouped, without a call: a step asks often
        return format_of_quantizer(quantizer_of(tensor))
    return _format_of_class(type(tensor))


@functools.cache
def _format_of_class(cls: type) -> Format:
    rows = {row.tensor: row for row in FORMATS.values()}
    found = (rows[base.__name__] for base in cls.__mro__ if base.__name__ in rows)
    return next(found, unknown_format(cls.__name__))


def format_of_quantizer(quantizer: Any) -> Format:
    """Format that a quantizer produces."""
    name = type(quantizer).__name__
    return next((row for row in FORMATS.values() if name in row.quantizers), unknown_format(name))


def active_recipe() -> Any | None:
    """The recipe of the enclosing ``te.autocast`` (``FP8GlobalStateManager``), ``None`` outside or when it is off."""
    loaded = sys.modules.get("transformer_engine.pytorch.quantization")
    state = getattr(loaded, "FP8GlobalStateManager", None)
    return state.get_fp8_recipe() if state is not None and state.is_fp8_enabled() else None


def format_recipe(recipe: Any | None) -> str:
    """A recipe with its options, between commas, the same in all processes: addresses of functions are left out."""
    if recipe is None:
        return "no te.autocast"
    options = re.sub(" at 0x[0-9a-f]+", "", " ".join(repr(recipe).split()))
    return f"te.autocast of {type(recipe).__name__}, {options}"


def needs_shared_amax(quantizer: Any) -> bool:
    """Whether a quantizer derives one scale from the amax of the whole tensor at quantization time.

    Current scaling, NVFP4's second-level scale, and hybrids of them. Delayed scaling reduces its history elsewhere.
    """
    return SCALE_SOURCES.get(type(quantizer).__name__) in ("amax", "parts")


def one_scale_quantizers(quantizer: Any) -> list[Any]:
    """The quantizers that give a tensor one scale: the given one, or a hybrid's parts; none for block formats."""
    classes = quantizer_classes("amax", "history")
    if isinstance(quantizer, classes):
        return [quantizer]
    return [part for part in quantizers_of_parts(quantizer) if isinstance(part, classes)]


def quantizers_of_parts(quantizer: Any) -> list[Any]:
    """The two quantizers of a hybrid one, any other itself."""
    parts = [getattr(quantizer, f"{way}_quantizer", None) for way in ("rowwise", "columnwise")]
    return [part for part in parts if part is not None] or [quantizer]


def storage_parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What carries a quantized tensor's bytes: itself, or the row-wise and column-wise tensors of a hybrid one."""
    if not hasattr(tensor, "_rowwise_storage"):
        return [tensor]
    both: Any = tensor
    return [part for part in (both._rowwise_storage, both._columnwise_storage) if part is not None]


def high_precision_part(part: torch.Tensor) -> torch.Tensor | None:
    """The values of a part of a hybrid tensor that is not quantized (``IdentityTensor``); ``None`` for any other."""
    return getattr(part, "_hp_data", None)


def all_one_scale_quantizers(tensor: torch.Tensor) -> list[Any]:
    """:func:`one_scale_quantizers` of a tensor, and of a hybrid's parts.

    Each part has a copy of its own of the parent's quantizer for it. The parent's quantizes, but asks the part for the
    reduction group (TE 2.20.2 ``HybridQuantizer.update_quantized``).
    """
    owners = {id(t): t for t in (tensor, *storage_parts_of(tensor))}
    return [q for t in owners.values() for q in one_scale_quantizers(quantizer_of(t))]


def copy_scale(tensor: torch.Tensor, shard: torch.Tensor) -> None:
    """Let a gathered weight be read with the scale that its shard has now. Local operation.

    TE hands a per-tensor float8 scale over with the first gather only (``Float8Tensor.fsdp_post_all_gather`` and
    ``fsdp_assign_gathered``, 2.18 to 2.20.2); it is the same tensor until somebody gives the shard another one.
    """
    if hasattr(shard, "_rowwise_storage"):
        for part, own in zip(storage_parts_of(tensor), storage_parts_of(shard), strict=True):
            copy_scale(part, own)
    elif hasattr(shard, "_scale_inv"):
        tensor._scale_inv = shard._scale_inv  # type: ignore[attr-defined]


@functools.cache
def quantizer_classes(*sources: str, blocks: bool = True) -> tuple[type, ...]:
    """Classes of quantizers whose scale comes from one of ``sources`` (see ``Format`` in ``te_formats.py``).

    ``blocks``: whether those count too that have scales of blocks besides.
    """
    rows = [row for row in FORMATS.values() if blocks or row.has_one_scale]
    found = [(row.module, name) for row in rows for name in row.quantizers if row.quantizers[name] in sources]
    return tuple(tensor_attribute(module, name) for module, name in found)


def is_delayed_quantizer(quantizer: Any) -> bool:
    """Whether a quantizer takes its scale from an amax history."""
    return SCALE_SOURCES.get(type(quantizer).__name__) == "history"


def tensor_attribute(module: str, name: str) -> type:
    """A class of a module of ``transformer_engine.pytorch.tensor``."""
    return getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{module}"), name)


def fused_adam_class() -> list[type]:
    """Return TE's FusedAdam, in a list."""
    return [te().optimizers.FusedAdam]


def is_fused_adam(optimizer: object) -> bool:
    """Whether an optimizer is TE's FusedAdam, which can keep main weights itself."""
    return is_loaded() and isinstance(optimizer, te().optimizers.FusedAdam)


def is_stock_fused_adam(optimizer: object) -> bool:
    """Whether an optimizer is TE's FusedAdam, and of no subclass, which may have another ``step``."""
    return is_loaded() and type(optimizer) is te().optimizers.FusedAdam


def is_fused_sgd(optimizer: object) -> bool:
    """Whether an optimizer is TE's FusedSGD."""
    return is_loaded() and isinstance(optimizer, te().optimizers.FusedSGD)


def drop_transpose(tensor: torch.Tensor) -> None:
    """Drop a float8 tensor's cached transpose (``_transpose``); TE remakes it from the bytes."""
    if getattr(tensor, "_data", None) is not None and getattr(tensor, "_transpose", None) is not None:
        tensor._transpose = None  # type: ignore[attr-defined]
        tensor._transpose_invalid = True  # type: ignore[attr-defined]


def drop_derived_buffers(tensor: torch.Tensor, row: Format) -> None:
    """Drop what TE has made of the gathered bytes of a weight of a format: transposes, and scales with padding."""
    if getattr(tensor, "_transpose", None) is not None:
        drop_transpose(tensor)
    for buffer in row.buffers:
        if buffer.is_derived:
            setattr(tensor, buffer.attribute, None)


def derive_transpose(tensor: torch.Tensor) -> None:
    """Make a float8 tensor's transpose anew from its bytes, in the buffer that it has, if it keeps one."""
    buffers = tensor.get_metadata()  # type: ignore[attr-defined]
    data, transpose = buffers.get("data"), buffers.get("data_transpose")
    if data is not None and transpose is not None:
        transpose.copy_(data.movedim(-1, 0))


def gathers_one_direction(tensor: torch.Tensor) -> bool:
    """Whether a gather brings one of two directions of a quantized tensor, neither of which gives the other."""
    row = format_of(tensor)
    return row is not None and row.independent_directions


def value_buffers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Buffers that hold a quantized tensor's values; not scales, which it may share with another."""
    row = format_of(tensor)
    found = [b.attribute for b in row.buffers if b.holds_values] if row is not None else []
    return [value for name in found if (value := getattr(tensor, name, None)) is not None]


def clone_scales(tensor: torch.Tensor) -> None:
    """Give a quantized tensor copies of the scales, and of the amaxes, that it may share with another."""
    row = format_of(tensor)
    for buffer in row.buffers if row is not None else ():
        scale = None if buffer.holds_values else getattr(tensor, buffer.attribute, None)
        if scale is not None:
            setattr(tensor, buffer.attribute, scale.detach().clone())


def unchanged_hook_attributes(tensor: torch.Tensor) -> tuple[str, ...]:
    """Attributes of a quantized shard that its all-gather hooks send unchanged, the same in every gather; or none.

    Those of a tensor of all experts, and of formats that send another direction before a backward, differ.
    """
    row = None if is_grouped(tensor) else format_of(tensor)
    return tuple([buffer.attribute for buffer in row.dropped]) if row is not None else ()


def buffers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors that hold a quantized tensor's data: bytes, scales, transposes."""
    return [value for value in tensor.get_metadata().values() if isinstance(value, torch.Tensor)]  # type: ignore[attr-defined]


def fsdp_group_of(module: nn.Module) -> Any:
    """The parameter group that TE's all-gather hooks ask about a module's weights (``_get_module_fsdp_state``)."""
    distributed = importlib.import_module("transformer_engine.pytorch.distributed")
    return distributed._get_module_fsdp_state(module)._fsdp_param_group


# --- delayed scaling


def has_delayed_scale(tensor: torch.Tensor) -> bool:
    """Whether a quantized tensor's scale comes from an amax history (delayed scaling). Every gather asks."""
    return type(tensor._quantizer).__name__ == "Float8Quantizer"  # type: ignore[attr-defined]


def delayed_states(module: nn.Module) -> dict[str, Any] | None:
    """A module's delayed-scaling state: ``scaling_fwd``, ``scaling_bwd`` with ``scale``, ``amax_history``.

    Local operation. ``None`` where there is none (yet: TE makes it in the first forward, or with quantized weights).
    The module's quantizers and TE's reduction buffers refer to the tensors: write into them, never replace them.

    Raises:
        PrecisionError: A custom recipe that mixes delayed scaling in, whose state TE keeps per tensor.
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
            fix="use another recipe",
        )
    found = {key: s for key, s in states.items() if type(s).__name__ == "DelayedScalingRecipeState"}
    return found if len(found) == 2 else None


@contextlib.contextmanager
def skip_amax_reduction_after_errors() -> Iterator[None]:
    """An error in the context leaves ``te.autocast`` without delayed scaling's all-reduce, which TE issues even then.

    Ranks that have not raised, or run under another recipe, would not come to it. The next ``te.autocast`` reduces
    again: entering one writes what is changed here anew.
    """
    try:
        yield
    except Exception:
        loaded = sys.modules.get("transformer_engine.pytorch.quantization")
        manager = getattr(loaded, "FP8GlobalStateManager", None)
        known = getattr(getattr(manager, "quantization_state", manager), "autocast_arguments", {})
        for key, (recipe, group) in list(known.items()):
            if getattr(recipe, "reduce_amax", False):
                alone = copy.copy(recipe)
                alone.reduce_amax = False
                known[key] = alone, group
        raise
