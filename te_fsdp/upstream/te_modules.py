"""Private names of TE's modules, checked with TE 2.18 to 2.20.2.

delayed scaling    a module's ``fp8_meta`` and ``init_fp8_meta_tensors``, the fields of its
                   ``DelayedScalingRecipeState``, its pickles in ``_extra_state`` entries
``GroupedLinear``  its grouped kernels, and the methods that read its parameters
attention          backend selection; streams of TE's device
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import io
import logging
import logging.handlers
import pickle
import sys
import warnings
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from te_fsdp.errors import CheckpointError
from te_fsdp.unpickling import TableUnpickler
from te_fsdp.upstream import te as _te
from te_fsdp.upstream.te_formats import has_amax_history
from te_fsdp.upstream.torch_autograd import graph_nodes


def holds_quantized(module: nn.Module) -> bool:
    """Return whether a ``te.ops`` module has, or on meta will have, a quantized weight (``_with_quantized_weight``)."""
    params = [p for p in module._parameters.values() if p is not None]
    return bool(getattr(module, "_with_quantized_weight", False)) or any(map(_te.is_quantized, params))


def has_recipe_state(module: Any) -> bool:
    """Return whether a module is of a class in which recipes store state (``fp8_meta``)."""
    return hasattr(module, "fp8_meta")


def describe_delayed_recipe(module: nn.Module) -> dict[str, Any]:
    """Return plain values from which :func:`make_delayed_states` can create a module's state."""
    recipe = module.fp8_meta["scaling_fwd"].recipe  # type: ignore[index, union-attr]
    algorithm = recipe.amax_compute_algo
    return {
        "num_gemms": module.fp8_meta["num_gemms"],  # type: ignore[index]
        "margin": recipe.margin,
        "fp8_format": recipe.fp8_format.name,
        "amax_history_len": recipe.amax_history_len,
        # A user's function is set again by the recipe of the next forward.
        "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
        "reduce_amax": recipe.reduce_amax,
    }


def make_delayed_states(module: nn.Module, described: dict[str, Any]) -> dict[str, Any]:
    """Create delayed-scaling state of the described shape in a module, as TE's first forward would.

    Local operation. Existing state is kept, with its history truncated or extended. The next forward uses it (TE
    2.20.2 ``TransformerEngineBaseModule.set_meta_tensor``).
    """
    recipes = _te.recipes()
    fields = {**described, "fp8_format": recipes.Format[described["fp8_format"]]}
    # It is a setting of the module, not of the recipe.
    module.fp8_meta["num_gemms"] = fields.pop("num_gemms")  # type: ignore[index]
    recipe = recipes.DelayedScaling(**fields)
    module.fp8_meta.setdefault("recipe", recipe)  # type: ignore[union-attr]
    module.init_fp8_meta_tensors(recipe)  # type: ignore[operator]
    states = _te.delayed_states(module)
    assert states is not None
    # Until a forward sets it, TE would write no state, and a save directly after a load would lose it.
    module.fp8_meta["fp8_checkpoint"] = True  # type: ignore[index]
    return states


def set_delayed_scale(module: nn.Module, name: str, local: torch.Tensor, amax: torch.Tensor) -> None:
    """Set the scale of a weight under delayed scaling from a known amax, as TE's update does.

    Local operation that writes to the module's own state, to which the weight's quantizer refers. ``amax`` has
    one element for the unsharded weight. The scale is not changed if it is zero or infinite, as in TE.
    """
    recipe: Any = module.fp8_meta["recipe"]  # type: ignore[index]
    scale = recipe.fp8_format.value.max_fwd / amax.float().reshape(()) / 2.0 ** getattr(recipe, "margin", 0)
    finite = torch.finfo(torch.float32)
    scale = torch.where(torch.isinf(scale), scale.new_tensor(finite.max), scale)
    if bool(amax > 0) and bool(torch.isfinite(amax)):
        for quantizer in _delayed_quantizers(module, name, local):
            quantizer.scale.copy_(scale.reshape(quantizer.scale.shape))
            quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))


def sync_delayed_scale(module: nn.Module, name: str, local: torch.Tensor) -> None:
    """Set the scale for a weight's next quantization to that of its data (delayed scaling). Local operation."""
    for quantizer in _delayed_quantizers(module, name, local):
        quantizer.scale.copy_(_te.inverse_scale_of(local).reciprocal().reshape(quantizer.scale.shape))


def _delayed_quantizers(module: nn.Module, name: str, local: torch.Tensor) -> list[Any]:
    """Return the delayed quantizers of a weight: the module's, and possibly a second one of the local tensor."""
    both = _te.quantizer_of(local), _te.weight_quantizer(module, name)
    return [quantizer for quantizer in both if has_amax_history(type(quantizer))]


@contextlib.contextmanager
def amax_reduced_over(group: Any) -> Iterator[None]:
    """Return a context in which delayed scaling reduces over ``group`` instead of the group of ``te.autocast``."""
    # A nested ``te.autocast`` would reset the flag of the region's first module. TE would then update the
    # backward's scales twice (2.20.2 ``set_autocast_state``).
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    state = manager.quantization_state
    recipe, before = manager.get_fp8_recipe(), manager.get_fp8_group()
    state.autocast_arguments[manager.get_unique_autocast_key(recipe, group)] = (recipe, group)
    state.fp8_distributed_group = group
    try:
        yield
    finally:
        state.fp8_distributed_group = before


def is_graph_consumed(node: Any) -> bool:
    """Return whether a backward has run through a function of TE in the graph of a node."""
    # TE then frees the tensors that it has saved (``ctx.tensor_objects``).
    return any(getattr(inner, "tensor_objects", inner) is None for inner in graph_nodes(node))


def keep_cast_weight(module: nn.Module) -> None:
    """Let a module with high-precision weights keep the weight that a recipe quantizes until backward."""
    # Under FSDP2 TE quantizes it again in backward. LayerNormLinear then finds no ``main_grad`` and raises (2.20.2).
    module._is_fsdp2 = False  # type: ignore[bad-argument-type]


def cache_is_fsdp2(module: nn.Module) -> None:
    """Set the answer of TE's ``is_fsdp2`` for a module in a unit of FSDP2."""
    # TE's first forward searches all units. ``torch.compile`` would trace that, and fails if a unit is compiled.
    if hasattr(type(module), "is_fsdp2"):
        module.__dict__.setdefault("_is_fsdp2", True)


def is_casting() -> bool:
    """Return whether ``torch.autocast`` is enabled and TE's modules compute without a recipe."""
    casts = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return casts and _te.active_recipe() is None


def cached_weights(module: nn.Module) -> dict[str, Any]:
    """Return the quantized weights that TE keeps between microbatches (``is_first_microbatch``), by name.

    TE drops them when the type of the recipe changes (``_fp8_workspaces``).
    """
    return module.__dict__.get("_fp8_workspaces", {})


def rename_parameters(module: nn.Module, names: dict[str, str]) -> None:
    """Add registered names to TE's records of parameters (``param_init_meta``).

    ``names`` maps TE's name to a new one.
    """
    records: dict[str, Any] = module.param_init_meta  # type: ignore[assignment]
    records.update({new: records[old] for old, new in names.items() if old in records})


def random_generators() -> list[torch.Generator]:
    """Return the generators of TE's ``CudaRNGStatesTracker``, used by dropout under tp; empty before TE runs."""
    if not _te.is_loaded():
        return []
    states = importlib.import_module("transformer_engine.pytorch.distributed").get_all_rng_states()
    return [state for state in states.values() if isinstance(state, torch.Generator)]


def supports_all_gemm_layouts() -> bool:
    """Return whether float8 GEMMs of the device support all layouts (``is_non_tn_fp8_gemm_supported``)."""
    # On Hopper they do not, so tensors used in forward and backward are stored in two layouts.
    return importlib.import_module("transformer_engine.pytorch.utils").is_non_tn_fp8_gemm_supported()


#: Minimum cuBLASLt version of TE (2.20.2 ``is_module_grouped_tensor_path_supported``).
_NEEDED = {"hopper": 130400, "hopper current": 130500, "hopper block": 130600, "blackwell": 130300}


class GroupedWeightAccess:
    """Mixin in front of TE's class that controls which weights and biases TE reads and creates."""

    def is_adopted(self) -> bool:
        """Return whether te_fsdp stores the parameters as ordinary tensors instead of a ``GroupedTensor``."""
        return False

    def tensors_for_te(self, name: str, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that TE reads as ``weight`` or ``bias``."""
        return list(tensors)

    def make_grouped_weights(self, defer_init: bool = False) -> None:
        """Convert the experts' parameters into one (TE), unless te_fsdp stores them."""
        if self.is_adopted():
            self.set_tensor_parallel_attributes(defer_init=defer_init)  # type: ignore[attr-defined]
        else:
            super().make_grouped_weights(defer_init=defer_init)  # type: ignore[misc]

    def _make_grouped_biases(self) -> None:
        if not self.is_adopted():
            super()._make_grouped_biases()  # type: ignore[misc]

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return self.tensors_for_te("weight", super()._get_weight_tensors())  # type: ignore[misc]

    def _get_bias_tensors(self) -> list[torch.Tensor]:
        tensors = super()._get_bias_tensors()  # type: ignore[misc]
        # Return a bias that the forward returns to the user as registered.
        return tensors if self.return_bias else self.tensors_for_te("bias", tensors)  # type: ignore[attr-defined]


def grouped_path_problem(recipe: Any | None) -> str:
    """Return why TE's grouped kernels do not support ``GroupedLinear`` under a recipe (``None``: bf16), or "".

    Local.
    """
    linear = _te.te().module.grouped_linear
    if linear.is_module_grouped_tensor_path_supported(recipe, torch.bfloat16):
        return ""
    capability, version = linear.get_device_compute_capability(), linear.tex.get_cublasLt_version()
    where = f"compute capability {capability[0]}.{capability[1]}"
    if not (9, 0) <= capability <= (11, 0):
        return f"TransformerEngine has grouped kernels for Hopper and Blackwell, not for {where}"
    key = "blackwell" if capability >= (10, 0) else "hopper"
    if key == "hopper" and recipe is not None:
        kind = (
            "block" if recipe.float8_block_scaling() else "current" if recipe.float8_current_scaling() else ""
        )
        key = f"{key} {kind}".strip()
    if version < _NEEDED[key]:
        return (
            f"TransformerEngine needs cuBLASLt {_readable(_NEEDED[key])} or later for its grouped kernels on "
            f"{where}, found {_readable(version)}"
        )
    return f"TransformerEngine has no grouped kernels for {type(recipe).__name__} on {where}"


def _readable(version: int) -> str:
    """Format a version: 130400 -> 13.4."""
    return f"{version // 10000}.{version // 100 % 100}"


def new_stream() -> Any:
    """Create a stream of TE's device, with TE's own ``torch``, which the emulation replaces."""
    module = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.context_parallel"
    )
    return module.torch.cuda.Stream()


def attention_backend_for(*, heads: int, groups: int, head_dim: int, sequence: int) -> dict[str, Any]:
    """Return the backend of TE's ``DotProductAttention`` in bf16 with a causal mask, and TE's reasons.

    Local operation. ``heads`` counts the query heads, ``groups`` the key and value heads. ``sequence`` is in tokens.

    Returns:
        ``backend`` ("flash", "fused", "unfused" or "none"), ``reasons`` (TE's log lines), and ``taken``: whether TE
        uses each installed distribution of FlashAttention.

    Raises:
        ImportError, AttributeError, TypeError: This TE version selects backends differently.
    """
    module = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    params = module.AttentionParams(
        qkv_dtype=torch.bfloat16,
        qkv_layout="bshd_bshd_bshd",
        num_heads=heads,
        num_gqa_groups=groups,
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        max_seqlen_q=sequence,
        max_seqlen_kv=sequence,
        attn_mask_type="causal",
        window_size=(-1, 0),
    )
    handler, logger = logging.handlers.BufferingHandler(sys.maxsize), logging.getLogger("DotProductAttention")
    logs = module.AttentionLogging
    level, propagate = logs._log_level, logger.propagate
    logger.addHandler(handler)
    logs._log_level = logging.DEBUG  # the selection resets its logger to this level in each call
    logger.propagate = False
    try:
        backends = module.get_attention_backend(params)
    finally:
        logger.removeHandler(handler)
        logs._log_level = level
        logger.propagate = propagate
    # (flash, flash version, fused, fused version, unfused, all available): TE 2.18 and later
    names = {"flash": backends[0], "fused": backends[2], "unfused": backends[4]}
    flags = {
        "flash-attn": "is_installed",
        "flash-attn-3": "v3_is_installed",
        "flash-attn-4": "v4_is_installed",
    }
    taken = {name: bool(getattr(module.FlashAttentionUtils, flag, False)) for name, flag in flags.items()}
    backend = next((name for name, chosen in names.items() if chosen), "none")
    messages = [record.getMessage() for record in handler.buffer]
    # that line repeats the request
    reasons = [line for line in messages if not line.startswith("Running with config")]
    return {"backend": backend, "reasons": reasons, "taken": taken}


# --- pickles of delayed scaling's state, read without TE by a table of names, each with a substitute

#: Largest forward and backward values of TE's formats (``transformer_engine.common.recipe.Format``).
_RANGES = {"E4M3": (448.0, 448.0), "E5M2": (57344.0, 57344.0), "HYBRID": (448.0, 57344.0)}
_STATE = {
    "scaling_fwd.scale": "scale_fwd",
    "scaling_fwd.amax_history": "amax_history_fwd",
    "scaling_bwd.scale": "scale_bwd",
    "scaling_bwd.amax_history": "amax_history_bwd",
}


class _Recipe:
    """Substitute for TE's recipe. ``fields`` contains the pickled attributes."""

    fields: dict[str, Any]

    def __new__(cls, *args: Any) -> _Recipe:
        recipe = super().__new__(cls)
        recipe.fields = {}
        return recipe

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.fields.update(state)


class _Largest(tuple):
    """Substitute for the format's pair of largest values, a named tuple."""

    def __new__(cls, *values: float) -> _Largest:
        return super().__new__(cls, values)


def _load_from_bytes(data: bytes) -> Any:
    """Substitute for torch's function, which would load any pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _rebuild_whole(
    storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any
) -> torch.Tensor:
    with warnings.catch_warnings():
        # The pickle contains typed storages, which torch has deprecated but still reads.
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        full = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage.untyped())  # type: ignore[no-matching-overload]
    return full.as_strided(size, stride, offset).clone()


ENTRIES = {
    "transformer_engine.common.recipe.DelayedScaling": _Recipe,
    "transformer_engine.common.recipe._FormatHelper": _Largest,
    "torch._utils._rebuild_tensor_v2": _rebuild_whole,
    "torch.storage._load_from_bytes": _load_from_bytes,
    "collections.OrderedDict": collections.OrderedDict,
}


def read_extra_state(data: bytes, key: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Parse the bytes of an ``_extra_state`` entry: delayed scaling's state as a pickle in a tensor.

    Return the recipe in the form of :func:`describe_delayed_recipe`, and the tensors by te_fsdp's names; ``None``
    without state: no bytes, or a recipe without history. Raise CheckpointError, which names ``key``, if the data is
    not TE 2's delayed-scaling state, or the pickle is damaged.
    """
    if not data:
        return None
    try:
        # A new enum each time, because a pickle may change the members.
        allowed = {**ENTRIES, "transformer_engine.common.recipe.Format": Enum("Format", _RANGES)}
        state = TableUnpickler(data, allowed, "the state of delayed scaling").load()
        if not isinstance(state, dict) or not isinstance(state.get("recipe"), _Recipe):
            raise pickle.UnpicklingError("it has no recipe of delayed scaling")
        if "scale_fwd" not in state:
            return None
        return _describe(state), {ours: state[theirs] for ours, theirs in _STATE.items()}
    except Exception as error:
        raise unreadable_state(
            key,
            "the delayed-scaling state of TransformerEngine 2, or an empty entry",
            f"{type(error).__name__}: {error}",
            why="It is a pickle, and te_fsdp does not execute its contents",
        ) from error


def unreadable_state(key: str, expected: str, got: str, *, why: str = "") -> CheckpointError:
    """Return the error for an ``_extra_state`` entry that is not delayed scaling's state."""
    return CheckpointError(
        f"{key}: te_fsdp cannot read this state",
        expected=expected,
        got=got,
        why=why,
        fix="omit these entries (te-fsdp ckpt convert --extra-state drop); amax histories then start empty",
    )


def _describe(state: dict[str, Any]) -> dict[str, Any]:
    fields = state["recipe"].fields
    # A dataclass pickles attributes that differ from the class's own. Others have TE's defaults.
    algorithm = fields.get("amax_compute_algo", "max")
    return {
        "num_gemms": state["extra_fp8_variables"]["num_gemms"],
        "margin": fields.get("margin", 0),
        "fp8_format": fields["fp8_format"].name if "fp8_format" in fields else "HYBRID",
        "amax_history_len": int(state["amax_history_fwd"].shape[0]),
        "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
        "reduce_amax": fields.get("reduce_amax", True),
    }
