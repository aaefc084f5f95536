"""Delayed scaling's state in TE's modules.

Private names used here: a module's ``fp8_meta`` and ``init_fp8_meta_tensors``, the fields of its
``DelayedScalingRecipeState``.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp.errors import PrecisionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = [
    "amax_reduced_over",
    "delayed_states",
    "describe_delayed_recipe",
    "follow_scale",
    "has_recipe_state",
    "make_delayed_states",
    "set_delayed_scale",
]


def has_recipe_state(module: Any) -> bool:
    """Whether a module is one that recipes keep state in (``fp8_meta``), of whatever recipe."""
    return hasattr(module, "fp8_meta")


def delayed_states(module: nn.Module) -> dict[str, Any] | None:
    """A module's delayed-scaling state: ``scaling_fwd``, ``scaling_bwd`` with ``scale``, ``amax_history``.

    Local operation. ``None`` where there is none (yet: TE makes it in the first forward, or with quantized
    weights). The tensors are those that the module's quantizers and TE's reduction buffers refer to: write
    into them, never replace them.

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


def describe_delayed_recipe(module: nn.Module) -> dict[str, Any]:
    """What :func:`make_delayed_states` needs to make a module's state again, as plain values."""
    recipe = module.fp8_meta["scaling_fwd"].recipe  # type: ignore[index, union-attr]
    algorithm = recipe.amax_compute_algo
    return {
        "num_gemms": module.fp8_meta["num_gemms"],  # type: ignore[index]
        "margin": recipe.margin,
        "fp8_format": recipe.fp8_format.name,
        "amax_history_len": recipe.amax_history_len,
        # A function of the user's comes back with the recipe of the next forward.
        "amax_compute_algo": algorithm if isinstance(algorithm, str) else "max",
        "reduce_amax": recipe.reduce_amax,
    }


def make_delayed_states(module: nn.Module, described: dict[str, Any]) -> dict[str, Any]:
    """Give a module delayed-scaling state of the described shape, as TE's own first forward would.

    Local operation. State that is there is kept, its history cut or extended. The next forward takes it up (TE
    2.20.2 ``TransformerEngineBaseModule.set_meta_tensor``).
    """
    recipes = _te.recipes()
    fields = {**described, "fp8_format": recipes.Format[described["fp8_format"]]}
    module.fp8_meta["num_gemms"] = fields.pop("num_gemms")  # type: ignore[index]
    recipe = recipes.DelayedScaling(**fields)
    module.fp8_meta.setdefault("recipe", recipe)  # type: ignore[union-attr]
    module.init_fp8_meta_tensors(recipe)  # type: ignore[operator]
    states = delayed_states(module)
    assert states is not None
    return states


def set_delayed_scale(module: nn.Module, name: str, local: torch.Tensor, amax: torch.Tensor) -> None:
    """Give a weight under delayed scaling the scale of a known amax, as TE's update from a history of it would.

    Local operation; writes into the module's own state, which the weight's quantizer refers to.

    Args:
        module: Owner of the weight.
        name: The weight's name.
        local: Its quantized local tensor.
        amax: One element, of the whole weight. Zero or infinite: the scale is left, as TE leaves it.
    """
    recipe: Any = module.fp8_meta["recipe"]  # type: ignore[index]
    scale = recipe.fp8_format.value.max_fwd / amax.float().reshape(()) / 2.0 ** getattr(recipe, "margin", 0)
    finite = torch.finfo(torch.float32)
    scale = torch.where(torch.isinf(scale), scale.new_tensor(finite.max), scale)
    quantizers: list[Any] = [_te.quantizer_of(local), _te.weight_quantizer(module, name)]
    for quantizer in quantizers:
        if _te.is_delayed_quantizer(quantizer) and bool(amax > 0) and bool(torch.isfinite(amax)):
            quantizer.scale.copy_(scale.reshape(quantizer.scale.shape))
            quantizer.amax.copy_(amax.reshape(quantizer.amax.shape))


def follow_scale(module: nn.Module, name: str, local: torch.Tensor) -> None:
    """Give a weight under delayed scaling the scale that its bytes have, for the next quantization. Local operation.

    Args:
        module: Owner of the weight.
        name: The weight's name.
        local: Its quantized local tensor.
    """
    inverse = _te.inverse_scale_of(local)
    quantizers: list[Any] = [_te.quantizer_of(local), _te.weight_quantizer(module, name)]
    for quantizer in quantizers:
        if _te.is_delayed_quantizer(quantizer):
            quantizer.scale.copy_(inverse.reciprocal().reshape(quantizer.scale.shape))


@contextlib.contextmanager
def amax_reduced_over(group: Any) -> Iterator[None]:
    """Within the context delayed scaling reduces over ``group`` instead of that of the enclosing ``te.autocast``.

    A nested ``te.autocast`` would say the same, but forget that the first module of the region has run, so that TE
    would update the backward's scales twice (2.20.2 ``set_autocast_state``). ``quantization_state`` is the manager's
    class itself in older TE.
    """
    manager = importlib.import_module("transformer_engine.pytorch.quantization").FP8GlobalStateManager
    state = getattr(manager, "quantization_state", manager)
    attribute = (
        "fp8_distributed_group" if hasattr(state, "fp8_distributed_group") else "FP8_DISTRIBUTED_GROUP"
    )
    recipe, before = manager.get_fp8_recipe(), manager.get_fp8_group()
    state.autocast_arguments[manager.get_unique_autocast_key(recipe, group)] = (recipe, group)
    setattr(state, attribute, group)
    try:
        yield
    finally:
        setattr(state, attribute, before)
