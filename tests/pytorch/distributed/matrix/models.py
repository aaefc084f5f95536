"""Models of the matrix: one module kind each."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from typing import Any

import torch
from harness.tensor_parallel import SumGradientOverTp, SumOverTp
from quantization import models as shared
from torch import nn
from torch.utils.checkpoint import checkpoint

EXPERTS = 2


def recipe_of(name: str) -> Any:
    """Return TE's recipe object of a name; ``None`` for high precision."""
    if name == "none":
        return None
    factories = {
        "hybrid": hybrid_factory,
        "hybrid_untyped": untyped_factory,
        "hybrid_nvfp4": _zoo("mxfp8_fwd_nvfp4_bwd_factory"),
    }
    if name in factories:
        from transformer_engine.common.recipe import CustomRecipe, MMParams

        recipe = CustomRecipe(qfactory=factories[name])
        # Hopper multiplies float8 blocks so or not at all; stock GroupedLinear asks the recipe (docs/upstream.md).
        recipe.fp8_gemm_fprop = MMParams(use_split_accumulator=True)
        return recipe
    return shared.recipe_of(name)


def hybrid_factory(role: Any) -> Any:
    """Return 8-bit blocks forward, high precision backward: MXFP8 where the device has it, float8 blocks elsewhere."""
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.custom_recipes.quantizer_factories import (
        float8_block_scaling_factory,
        mxfp8_factory,
    )
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    blocks = mxfp8_factory if te.is_mxfp8_available() else float8_block_scaling_factory
    kind = role.tensor_type if role is not None else ""
    if kind == "grad_output":
        return IdentityQuantizer()
    if kind in ("input", "weight"):
        # Without a dtype FusedAdam would leave the fp32 main weight itself in the place of the bf16 one.
        precise = IdentityQuantizer(dtype=torch.bfloat16)
        return HybridQuantizer(rowwise_quantizer=blocks(role), columnwise_quantizer=precise)
    return blocks(role)


def untyped_factory(role: Any) -> Any:
    """Return the same, without saying in which dtype the high-precision half is kept."""
    quantizer = hybrid_factory(role)
    if role is not None and role.tensor_type == "weight":
        quantizer.columnwise_quantizer.dtype = None
    return quantizer


def _zoo(name: str) -> Any:
    """Return one of TE's example factories, where this version has them."""
    try:
        zoo = importlib.import_module("transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo")
    except ImportError:
        return None
    return getattr(zoo, name, None)


def autocast(recipe: Any, group: Any = None) -> Any:
    """Return TE's autocast, or nothing without a recipe."""
    import transformer_engine.pytorch as te

    if recipe is None:
        return nullcontext()
    return te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group)


class Experts(nn.Module):
    """Two grouped linears, column- then row-parallel. GroupedLinear communicates nothing over tp: the sums are ours."""

    def __init__(self, hidden: int, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        kwargs["bias"] = False  # TE has none under tensor parallelism
        self.fc1 = te.GroupedLinear(EXPERTS, hidden, 2 * hidden, parallel_mode="column", **kwargs)
        self.fc2 = te.GroupedLinear(EXPERTS, 2 * hidden, hidden, parallel_mode="row", **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        splits = [tokens.shape[0] // EXPERTS] * EXPERTS
        split = self.fc1.tp_size > 1
        if split:
            tokens = SumGradientOverTp.apply(tokens, self.fc1.tp_group)
        output = self.fc2(nn.functional.gelu(self.fc1(tokens, splits)), splits)
        if split:
            output = SumOverTp.apply(output, self.fc1.tp_group)
        return output.view(x.shape)


class Trunk(nn.Module):
    """The module under test, with activation checkpointing if asked for; the recipe holds for its recomputation too."""

    def __init__(self, inner: nn.Module, recipe: Any, checkpointing: str, group: Any = None) -> None:
        super().__init__()
        self.inner, self.recipe, self.checkpointing, self.group = inner, recipe, checkpointing, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations (sequence, batch, hidden) to the same shape."""
        import transformer_engine.pytorch as te

        if self.checkpointing == "te":
            with autocast(self.recipe, self.group):
                output = te.checkpoint(self.inner, x)
        elif self.checkpointing == "torch":
            output = checkpoint(self._run, x, use_reentrant=False)
        else:
            output = self._run(x)
        return output[0] if isinstance(output, tuple) else output

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.recipe, self.group):  # torch's checkpoint does not support TE's autocast
            if self.checkpointing == "own" and not hasattr(self.inner, "checkpoint"):
                return self.inner(x, checkpoint_core_attention=True)
            return self.inner(x)


def width_of(recipe: str, weights: str) -> int:
    """Return the hidden size of which every format finds full blocks in a shard of 8 ranks."""
    block = {"block": 128, "hybrid": 128}.get(recipe, 32)
    return 512 if weights == "quantized" and block == 128 else 256


def build(
    module: str,
    recipe_name: str,
    weights: str,
    device: Any,
    *,
    checkpointing: str = "off",
    group: Any = None,
    hidden: int = 0,
    **kwargs: Any,
) -> Trunk:
    """Return a trunk around one module kind.

    Args:
        module: kind.
        recipe_name: of RECIPES.
        weights: of WEIGHTS.
        device: of the parameters, "meta" included.
        checkpointing: "off", "te", "torch", or "own": what the module itself can run again.
        group: for the reduction of delayed scaling's amaxes; None is the world.
        hidden: size; by default `width_of`.
        **kwargs: tp_group, tp_size, sequence_parallel.
    """
    import transformer_engine.pytorch as te

    recipe, hidden = recipe_of(recipe_name), hidden or width_of(recipe_name, weights)
    kwargs["params_dtype"] = torch.float32 if weights == "fp32" else torch.bfloat16
    quantized = weights == "quantized"
    with te.quantized_model_init(enabled=True, recipe=recipe) if quantized else nullcontext():
        if module == "grouped":
            inner = Experts(hidden, device=device, **kwargs)
        else:
            if checkpointing == "own" and module.startswith("mlp_"):
                kwargs["checkpoint"] = True
            inner = shared.build(module, hidden, device, **kwargs)
    return Trunk(inner, recipe, checkpointing, group)
