"""A model that is split into stages as in torchtitan. A stage is a copy without the modules of other stages."""

from __future__ import annotations

import contextlib
from typing import Any

import harness
import torch
from torch import nn

HIDDEN, FFN, LAYERS, WORDS, ROWS = 64, 128, 4, 12, 32
SEED = 11


class Model(nn.Module):
    """Embedding, layers of TE under the numbers of the unsharded model, a norm and a head.

    Attributes:
        layers: By number.
        group: Over whom delayed scaling reduces; for TE ``None`` is the world.
    """

    def __init__(
        self, device: Any, layers: range = range(LAYERS), recipe: str = "none", **kwargs: Any
    ) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.recipe, self.group = recipe_of(recipe), None
        quantized, dtype = kwargs.pop("quantized", False), kwargs.pop("dtype", torch.float32)
        first, last = 0 in layers, LAYERS - 1 in layers
        made = te.quantized_model_init(recipe=self.recipe) if quantized else contextlib.nullcontext()
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embedding = nn.Embedding(WORDS, HIDDEN, **options) if first else None
        with made:
            self.layers = nn.ModuleDict(
                {
                    str(i): te.LayerNormMLP(HIDDEN, FFN, device=device, params_dtype=dtype, **kwargs)
                    for i in layers
                }
            )
        self.norm = te.RMSNorm(HIDDEN, **options) if last else None
        self.head = nn.Linear(HIDDEN, WORDS, **options) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        if self.embedding is not None:
            x = self.embedding(x)
        enabled = self.recipe is not None
        with te.autocast(enabled=enabled, recipe=self.recipe, amax_reduction_group=self.group):
            for layer in self.layers.values():
                x = x + layer(x)
            if self.norm is not None:
                x = self.norm(x)
        return x if self.head is None else self.head(x)


def recipe_of(name: str) -> Any:
    """Return TE's recipe object of a name, None for "none"."""
    from transformer_engine.common import recipe

    recipes = {
        "none": lambda: None,
        "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
        "current": recipe.Float8CurrentScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
    }
    return recipes[name]()


def layers_of(stage: int, stages: int) -> range:
    """Return the layers of a stage."""
    each = LAYERS // stages
    return range(stage * each, (stage + 1) * each)


def meshes_of(pp: int, dp: int = 1, tp: int = 1, replicate: int = 1) -> Any:
    """Return the meshes of all ranks."""
    import te_fsdp

    axes = {"pp": pp, "dp_replicate": replicate, "dp_shard": dp, "tp": tp}
    return te_fsdp.Meshes.build(**axes, device_type=harness.device_type())


def stage_of(meshes: Any, number: int, stages: int, recipe: str = "none", **options: Any) -> nn.Module:
    """Return a stage on its meshes, with values that a checkpoint will replace.

    Args:
        meshes: Of this rank's stage.
        number: Of the stage.
        stages: How many there are.
        recipe: Of its forward.
        options: ``quantized``, ``dtype``, or keywords of ``fully_shard``.
    """
    import te_fsdp

    kwargs: dict[str, Any] = {key: options.pop(key) for key in ("quantized", "dtype") if key in options}
    if meshes.size("tp") > 1:
        kwargs |= {"set_parallel_mode": True, **meshes.te_kwargs()}
    model = Model("meta", layers_of(number, stages), recipe, **kwargs)
    te_fsdp.fully_shard(model, meshes, units="layers.*", **options)
    return te_fsdp.materialize(model, seed=SEED + number)


def optimizer_of(model: nn.Module | list[nn.Module], quantized: bool = False) -> torch.optim.Optimizer:
    """Return AdamW of weights and biases, in two groups; TE's FusedAdam over quantized weights.

    Adam divides by the gradient's own size, which makes rounding of a gradient near zero as large as the gradient of
    others: a large eps keeps what is compared proportional to gradients.
    """
    from transformer_engine.pytorch.optimizers import FusedAdam

    parts = model if isinstance(model, list) else [model]
    named = [(n, p) for part in parts for n, p in part.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named if n.endswith("weight")], "lr": 2e-2},
        {"params": [p for n, p in named if not n.endswith("weight")], "lr": 1e-2},
    ]
    if quantized:
        return FusedAdam(groups, eps=1e-2, master_weights=True)
    return torch.optim.AdamW(groups, eps=1e-2)


def batch(step: int, copies: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words and the words that follow: data-parallel ranks x (microbatches * rows)."""
    generator = torch.Generator().manual_seed(100 + step)
    words = torch.randint(WORDS, (2, copies, microbatches * ROWS), generator=generator)
    return words[0].to(harness.device()), words[1].to(harness.device())
