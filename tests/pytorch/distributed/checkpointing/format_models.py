"""A model with quantized weights, in any format on any mesh."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
from torch import nn

from checkpointing.models import recipe_of
from checkpointing.token_training import TokenTraining

HEADS, SEQUENCE, BATCH, CLASSES = 8, 32, 4, 8


def width_of(recipe: str) -> int:
    """Return rows and columns of the model's weights: full blocks on each of four ranks, of tp or of FSDP.

    float8-block has blocks of 128 rows and columns, one for each rank; bf16 weights may become such. Blocks of MXFP8
    are small: two or four for each rank. Other formats are sharded anywhere, NVFP4 by 16.
    """
    return {"block": 512, "none": 512, "mxfp8": 256, "mxfp8_2d": 256}.get(recipe, 128)


class Quantized(nn.Module):
    """Fused, stacked QKV and a gated MLP, both quantized when built so; embedding and head are not."""

    def __init__(self, width: int, device: Any, **tp: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.bfloat16, "device": device, "set_parallel_mode": True, **tp}
        self.embedding = nn.Embedding(CLASSES, width, dtype=torch.bfloat16, device=device)
        self.attention = te.MultiheadAttention(
            width,
            HEADS,
            attention_dropout=0.0,
            attn_mask_type="causal",
            fuse_qkv_params=True,
            qkv_weight_interleaved=False,
            **options,
        )
        self.mlp = te.LayerNormMLP(width, width, activation="swiglu", bias=True, **options)
        self.head = nn.Linear(width, CLASSES, dtype=torch.bfloat16, device=device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + self.attention(x)
        return self.head(x + self.mlp(x))


class QuantizedTraining(TokenTraining):
    """The model on a mesh with FusedAdam and fp32 main weights, and steps of it."""

    CLASSES, SHAPE = CLASSES, (SEQUENCE, BATCH)

    def __init__(
        self, recipe: str, axes: dict[str, int] | None, seed: int, *, width: int | None = None
    ) -> None:
        """Build, shard, initialise.

        Args:
            recipe: TE's recipe, in whose format the weights are stored; "none" for bf16.
            axes: The mesh; None for stock TE in one process, without te_fsdp.
            seed: Of the initialisation.
            width: Of the model; by default the recipe's.
        """
        import transformer_engine.pytorch as te

        import te_fsdp

        self.recipe = recipe_of(recipe)
        width = width or width_of(recipe)
        held = te.quantized_model_init(recipe=self.recipe) if self.recipe else contextlib.nullcontext()
        with held:
            if axes is None:
                self.meshes = None
                torch.manual_seed(seed)
                self.model: nn.Module = Quantized(width, harness.device())
            else:
                self.meshes = te_fsdp.Meshes.build(**axes, device_type=harness.device_type())
                self.model = Quantized(width, "meta", **self.meshes.te_kwargs())
                te_fsdp.fully_shard(self.model, self.meshes, units=["mlp"])
                te_fsdp.materialize(self.model, seed=seed)
        from transformer_engine.pytorch.optimizers import FusedAdam

        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-3, master_weights=True)
