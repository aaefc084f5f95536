"""Models of the random search: residual blocks of several module kinds, mixtures of experts among them."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import torch
from experts.model import ROWS, Mixture
from torch import nn

from matrix.configurations import MESHES, Configuration
from matrix.models import Trunk, build, recipe_of, width_of

EXPERTS = 4


class Routed(nn.Module):
    """A mixture of experts for (sequence, batch, hidden). `Stack` sets each token's expert before forward."""

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.chosen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.chosen is not None
        return self.mixture(x.reshape(-1, x.shape[-1]), self.chosen).view(x.shape)


class Block(nn.Module):
    """A trunk, and optionally an fp32 vector that scales its output."""

    def __init__(self, trunk: Trunk, width: int, device: Any, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.inner = trunk
        self.gain = nn.Parameter(torch.empty(width, device=device)) if width else None
        if self.gain is not None:
            self.gain.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set a different factor for each feature."""
        if self.gain is not None and self.gain.device.type != "meta":
            with torch.no_grad():
                self.gain.copy_(torch.linspace(0.5, 1.5, self.gain.shape[0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if self.gain is None else (y.float() * self.gain).to(y.dtype)


class Stack(nn.Module):
    """Residual blocks of several module kinds; `side` is computed, and in the loss only where a step uses it.

    Args:
        drawn: The configuration.
        device: Of the parameters, "meta" included.
        meshes: The job's meshes; ``None`` for one process.
        group: For the reduction of delayed scaling's amaxes; ``None`` is the world.
        weights: Weights other than the drawn ones.
    """

    def __init__(
        self, drawn: Configuration, device: Any, meshes: Any = None, group: Any = None, weights: str = ""
    ) -> None:
        super().__init__()
        self.route = drawn.route
        kinds = [*drawn.modules, *(["linear"] if drawn.side != "none" else [])]
        width = width_of(drawn.recipe, drawn.weights)
        built = []
        for place, kind in enumerate(kinds):
            trunk = _trunk(kind, drawn, weights or drawn.weights, device, meshes, group)
            options = {"sequence_parallel": drawn.sequence_parallel}
            built.append(Block(trunk, width if drawn.vector and place == 0 else 0, device, **options))
        side = built.pop() if drawn.side != "none" else None
        self.blocks, self.side = nn.ModuleList(built), side  # in the order in which they were drawn
        if drawn.frozen:
            self.get_submodule(drawn.frozen).requires_grad_(False)

    def forward(self, x: torch.Tensor, use_side: bool = False) -> torch.Tensor:
        for module in self.modules():
            if isinstance(module, Routed):
                module.chosen = _chosen(x, self.route)
        for block in self.blocks:
            x = x + block(x)
        if self.side is None:
            return x
        side = self.side(x)
        return x + side if use_side else x


def _chosen(x: torch.Tensor, route: str) -> torch.Tensor:
    """Return each token's expert: from bits of the model's input, which are the same on every mesh."""
    signs = (x.detach().reshape(-1, x.shape[-1])[:, :2] > 0).long()
    chosen = signs[:, 0] * 2 + signs[:, 1]
    return chosen if route == "every" else chosen % (EXPERTS // 2)


def _trunk(kind: str, drawn: Configuration, weights: str, device: Any, meshes: Any, group: Any) -> Trunk:
    kwargs = {} if meshes is None else meshes.te_kwargs()
    if kind == "experts":
        trunk = _experts(drawn, weights, device, meshes, group, **kwargs)
    else:
        if meshes is not None:
            kwargs["sequence_parallel"] = drawn.sequence_parallel
        options = {"checkpointing": drawn.checkpointing, "group": group, **kwargs}
        options["hidden"] = width_of(drawn.recipe, drawn.weights)
        trunk = build(kind, drawn.recipe, weights, device, **options)
    if drawn.recipe == "nvfp4":  # stock TE rounds gradients at random: two runs of it differ
        # TE reads the option when it creates the recipe.
        trunk.recipe = dataclasses.replace(recipe_of("nvfp4"), disable_stochastic_rounding=True)
    return trunk


def _experts(
    drawn: Configuration, weights: str, device: Any, meshes: Any, group: Any, **kwargs: Any
) -> Trunk:
    import transformer_engine.pytorch as te

    recipe = recipe_of(drawn.recipe)
    options = {
        "params_dtype": torch.float32 if weights == "fp32" else torch.bfloat16,
        "device": device,
        "rows": 128 if drawn.recipe == "hybrid" else ROWS.get(drawn.recipe, 16),
        "bias": "tp" not in MESHES[drawn.mesh],  # TE has none under tensor parallelism
        "single": False,
        **kwargs,
    }
    hidden = width_of(drawn.recipe, drawn.weights)
    with te.quantized_model_init(enabled=True, recipe=recipe) if weights == "quantized" else nullcontext():
        inner = Routed(Mixture(hidden, EXPERTS, meshes=meshes, **options))
    return Trunk(inner, recipe, drawn.checkpointing, group)
