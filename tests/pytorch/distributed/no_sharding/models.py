"""A model with everything that may stay unsharded: a frozen encoder, an adapter of TE modules, a single parameter."""

from __future__ import annotations

from typing import Any

import harness
import torch
import torch.utils.checkpoint
from torch import nn

SEQUENCE, BATCH, HIDDEN, FFN = 8, 8, 32, 64
#: Everything that the tests exempt; "position" is a parameter, the others are modules.
PARTS = ("encoder", "adapter", "position")


class Adapter(nn.Module):
    """A column- and a row-parallel TE module, nested, and norms whose gradients are partial over tp."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.up = te.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **kwargs)
        self.inner = nn.ModuleDict({"down": te.Linear(FFN, HIDDEN, parallel_mode="row", **kwargs)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner["down"](self.up(x))


class Model(nn.Module):
    """encoder (frozen) -> + position -> two blocks -> + adapter -> head."""

    recompute: str | None = None

    def __init__(self, device: Any, **kwargs: Any) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        common = {"device": device, "params_dtype": torch.float32, **kwargs}
        self.encoder = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN, device=device),
            nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, device=device)),
        )
        self.encoder.requires_grad_(False)
        self.position = nn.Parameter(torch.empty(HIDDEN, device=device))
        self.blocks = nn.ModuleList(
            te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **common) for _ in range(2)
        )
        self.adapter = Adapter(**common)
        self.head = nn.Linear(HIDDEN, HIDDEN, device=device)
        if kwargs.get("sequence_parallel"):
            for parameter in (self.position, *self.head.parameters()):
                parameter.sequence_parallel = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize its own parameter only."""
        if not self.position.is_meta:
            nn.init.normal_(self.position)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x) + self.position
        for block in self.blocks:
            x = x + self.run(block, x)
        return self.head(x + self.run(self.adapter, x))

    def run(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Run forward on a part, with recomputation if the model has it."""
        if self.recompute is None:
            return module(x)
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=self.recompute == "reentrant")


def exempt(model: nn.Module, parts: tuple[str, ...] = PARTS) -> None:
    """Mark parts of a model: modules, and single parameters."""
    import te_fsdp

    results = [getattr(model, part) for part in parts]
    te_fsdp.fsdp_no_shard(results if len(results) > 1 else results[0])


def seeded(device: Any = None, **kwargs: Any) -> Model:
    """Return the model from seed 5."""
    torch.manual_seed(5)
    model = Model(harness.device() if device is None else device, **kwargs)
    harness.shift_rows_by_rank(model, kwargs.get("tp_group"))
    return model
