"""Models for quantized training: every module kind with GEMM weights, hidden -> hidden, built anywhere.

Sizes fit every format on 8 ranks: block formats need full blocks in each shard (32 rows of MXFP8: 32 x 2 x 4
= 256).
"""

from __future__ import annotations

import functools
from typing import Any

import harness
import torch
from torch import nn

HEADS = 4
SEQUENCE, BATCH = 32, 8
#: Without random numbers.
PLAIN_NVFP4 = {"disable_rht": True, "disable_stochastic_rounding": True}


def recipe_of(name: str) -> Any:
    """Return TE's recipe object of a name."""
    from transformer_engine.common import recipe

    classes = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "mxfp8_2d": lambda: recipe.MXFP8BlockScaling(enable_2d_quantization=True),  # TE 2.19
        "nvfp4": recipe.NVFP4BlockScaling,
        "nvfp4_rows": lambda: recipe.NVFP4BlockScaling(disable_2d_quantization=True, **PLAIN_NVFP4),
        "nvfp4_squares": lambda: recipe.NVFP4BlockScaling(**PLAIN_NVFP4),
    }
    return hybrid_recipe(*name.split("/")) if "/" in name else classes[name]()


def hybrid_recipe(rowwise: str, columnwise: str) -> Any:
    """Return a custom recipe: forward reads weights and inputs in one format, backward in another.

    Args:
        rowwise: "e4m3", "e5m2" (current scaling), "block", "mxfp8" or "bf16".
        columnwise: One of the same.
    """
    from transformer_engine.common.recipe import CustomRecipe

    return CustomRecipe(qfactory=functools.partial(_hybrid_factory, rowwise, columnwise))


def _hybrid_factory(rowwise: str, columnwise: str, role: Any) -> Any:
    """Return a quantizer. At the top level, because TE pickles a recipe with its factory."""
    from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer

    kind = role.tensor_type if role is not None else ""
    if kind != "weight":
        # A GEMM takes two operands of one scaling mode, and no two of E5M2.
        rowwise, columnwise = ("e4m3" if way == "e5m2" else way for way in (rowwise, columnwise))
    # Blocks of a weight are squares, those of its partner rows: cuBLAS takes no two operands with squares.
    dims = 2 if kind == "weight" else 1
    if kind not in ("weight", "input"):
        return _quantizer(columnwise, dims)
    return HybridQuantizer(
        rowwise_quantizer=_quantizer(rowwise, dims), columnwise_quantizer=_quantizer(columnwise, dims)
    )


def _quantizer(name: str, dims: int) -> Any:
    """Return a quantizer of one format, as a user's factory makes it; ``dims`` of the blocks of block scaling."""
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    if name == "bf16":
        return IdentityQuantizer(dtype=torch.bfloat16)
    if name == "mxfp8":
        return te.MXFP8Quantizer(tex.DType.kFloat8E4M3)
    if name == "block":
        options = {"rowwise": True, "columnwise": True, "block_scaling_dim": dims}
        return te.Float8BlockQuantizer(fp8_dtype=tex.DType.kFloat8E4M3, **options)
    dtype = {"e4m3": tex.DType.kFloat8E4M3, "e5m2": tex.DType.kFloat8E5M2}[name]
    return te.Float8CurrentScalingQuantizer(dtype, device=harness.device())


class LinearPair(nn.Module):
    """Column-parallel then row-parallel linear, or norm + linear then linear."""

    def __init__(self, hidden: int, *, with_norm: bool, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        first = te.LayerNormLinear if with_norm else te.Linear
        self.first = first(hidden, 2 * hidden, parallel_mode="column", **kwargs)
        self.second = te.Linear(2 * hidden, hidden, parallel_mode="row", **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Replicated(nn.Module):
    """Two linears that tensor parallelism replicates."""

    def __init__(self, hidden: int, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.first = te.Linear(hidden, hidden, parallel_mode=None, **kwargs)
        self.second = te.Linear(hidden, hidden, parallel_mode=None, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Experts(nn.Module):
    """One grouped linear of two experts over halves of the tokens, without tensor parallelism inside."""

    def __init__(self, hidden: int, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        kwargs = {**kwargs, "bias": False, "tp_group": None, "tp_size": 1, "sequence_parallel": False}
        self.experts = te.GroupedLinear(2, hidden, hidden, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        half = tokens.shape[0] // 2
        return self.experts(tokens, [half, tokens.shape[0] - half]).view(x.shape)


def build(kind: str, hidden: int, device: str | torch.device, **kwargs: Any) -> nn.Module:
    """Return a model of one module kind with bf16 parameters, activations (sequence, batch, hidden) in and out.

    Args:
        kind: ``linear``, ``layernorm_linear``, ``mlp_gelu``, ``mlp_swiglu``, ``attention``, ``transformer``,
            ``grouped``, ``replicated``.
        hidden: Width.
        device: Device of the parameters, ``"meta"`` included.
        **kwargs: ``tp_group``, ``tp_size``, ``sequence_parallel``, ``bias``.
    """
    import transformer_engine.pytorch as te

    common = {"params_dtype": torch.bfloat16, "device": device, "bias": True, **kwargs}
    if kind in ("linear", "layernorm_linear"):
        return LinearPair(hidden, with_norm=kind == "layernorm_linear", **common)
    if kind == "replicated":
        return Replicated(hidden, **common)
    if kind == "grouped":
        return Experts(hidden, **common)
    if kind.startswith("mlp_"):
        return te.LayerNormMLP(hidden, 2 * hidden, activation=kind[4:], set_parallel_mode=True, **common)
    attention = {"attention_dropout": 0.0, "set_parallel_mode": True, "fuse_qkv_params": True}
    if kind == "attention":
        return te.MultiheadAttention(
            hidden, HEADS, attn_mask_type="causal", input_layernorm=True, **attention, **common
        )
    return te.TransformerLayer(
        hidden, 2 * hidden, HEADS, hidden_dropout=0.0, self_attn_mask_type="causal", **attention, **common
    )


def why_no_hybrid_linear() -> str:
    """Return why stock `te.Linear` cannot have hybrid weights here; empty if it can (`docs/upstream.md`).

    On GPUs it asks torch whether its weight is a fake tensor. A hybrid weight names no tensors that it is made of, and
    of nothing torch 2.11 says that all and none of it is fake.
    """
    from torch._subclasses.fake_tensor import is_fake

    class Empty(torch.Tensor):
        def __tensor_flatten__(self):
            return [], None

        @staticmethod
        def __tensor_unflatten__(*given):
            raise AssertionError("not called")

        __torch_dispatch__ = __tensor_unflatten__

    if harness.device_type() == "cpu":
        return ""
    try:
        is_fake(torch.Tensor._make_wrapper_subclass(Empty, (1,)))
    except AssertionError as error:
        return f"te.Linear cannot hold a hybrid weight on a GPU with this torch: {error}"
    return ""
