"""A model whose forward is run again in backward, or whose modules are used several times, in every way there is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matrix.models import autocast
from quantization import models as shared
from torch import nn
from torch.utils import checkpoint as of_torch

BLOCKS = 2
SEQUENCE, BATCH = 16, 4
#: Width: full blocks of every format in the shards of two ranks; and of every format but float8-block.
WIDE, NARROW = 256, 128
#: Position of a checkpoint: around each unit, around modules in it, around both units at once, nested, or with
#: torch's selection of what is kept; "own" is TE's LayerNormMLP(checkpoint=True).
PLACES = ("own", "unit", "inside", "units", "nested", "selective")
#: Modules used twice in one forward: a module within a unit, or a unit.
TWICE = ("module", "unit")
#: Library and kind of checkpoint; or activations offloaded to the CPU, by torch or by TE.
KINDS = ("torch", "torch_reentrant", "te", "te_reentrant", "torch_offload", "te_offload")


class Block(nn.Module):
    """A unit: TE modules, called by a module that has its own parameter."""

    def __init__(self, way: Way, recipe: Any, group: Any, hidden: int, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.way, self.recipe, self.group = way, recipe, group
        self.mlp = te.LayerNormMLP(
            hidden, 2 * hidden, set_parallel_mode=True, checkpoint=way.place == "own", **kwargs
        )
        self.pair = shared.LinearPair(hidden, with_norm=True, **kwargs)
        self.scale = nn.Parameter(torch.ones(hidden, dtype=kwargs["params_dtype"], device=kwargs["device"]))

    def reset_parameters(self) -> None:
        """Initialize for `materialize`."""
        nn.init.ones_(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations (sequence, batch, hidden) to the same shape."""
        call = self.way.run if self.way.place in ("inside", "nested") else _plainly
        x = x + call(partial(self._with_recipe, self.mlp), x)
        for _ in range(2 if self.way.twice == "module" else 1):
            x = x + self.scale * call(partial(self._with_recipe, self.pair), x)
        return x

    def _with_recipe(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with autocast(self.recipe, self.group):  # torch's checkpoint does not support TE's autocast
            return module(x)


class Net(nn.Module):
    """Two units."""

    def __init__(self, way: Way, recipe: Any, group: Any = None, *, hidden: int, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.way = way
        if way.kind == "te_offload":
            self.offloading, self.wait = te.get_cpu_offload_context(
                enabled=True, num_layers=BLOCKS - 1, model_layers=BLOCKS
            )
        self.blocks = nn.ModuleList(Block(way, recipe, group, hidden, **kwargs) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations to activations."""
        if self.way.place == "units":
            return self.way.run(self._all, x)
        return self._all(x)

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        around = self.way.place in ("unit", "nested", "selective") or self.way.twice == "unit"
        for block in self.blocks:
            if self.way.kind == "te_offload":
                with self.offloading:
                    x = block(x)
                x = self.wait(x)
                continue
            for _ in range(2 if self.way.twice == "unit" else 1):
                x = self.way.run(block, x) if around else block(x)
        return x


class Way:
    """How forward is run."""

    def __init__(self, place: str = "", kind: str = "", twice: str = "") -> None:
        self.place, self.kind, self.twice = place, kind, twice

    def run(self, call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run through a checkpoint, or without."""
        import transformer_engine.pytorch as te

        if not self.kind:
            return call(x)
        if self.kind == "torch_offload":
            with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
                return call(x)
        if self.kind.startswith("te"):
            return te.checkpoint(call, x, use_reentrant=self.kind == "te_reentrant")
        options: dict[str, Any] = {"use_reentrant": self.kind == "torch_reentrant"}
        if self.place == "selective":
            options["context_fn"] = partial(of_torch.create_selective_checkpoint_contexts, _keep)
        return of_torch.checkpoint(call, x, **options)


def _keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep products of matrices that are not part of TE's own functions."""
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.mul.Tensor)
    policy = of_torch.CheckpointPolicy
    return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE


def _plainly(call: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return call(x)
