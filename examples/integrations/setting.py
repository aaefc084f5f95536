"""The common setting of the examples of this folder.

Losses are those of the full batch, so they are equal on every mesh up to the order of sums.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import nn
from transformer_engine.common.recipe import Float8CurrentScaling

import te_fsdp

HIDDEN, SEQUENCE, BATCH, MICROBATCHES = 64, 16, 8, 2
RECIPE = Float8CurrentScaling()


@dataclass
class Options:
    """Command line of each example.

    Attributes:
        tp: Tensor-parallel ranks; FSDP2 shards over all others.
        steps: Train until this step.
        save: Where a checkpoint is written at the end.
        resume: The checkpoint to go on from, of any mesh.
    """

    tp: int = 1
    steps: int = 6
    save: Path | None = None
    resume: Path | None = None


class Model(nn.Module):
    """Two transformer layers that learn to turn sequences around."""

    def __init__(self, meshes: te_fsdp.Meshes) -> None:
        super().__init__()
        with te.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
            self.layers = nn.ModuleList(
                te.TransformerLayer(
                    HIDDEN,
                    2 * HIDDEN,
                    4,
                    set_parallel_mode=True,
                    fuse_qkv_params=True,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    params_dtype=torch.bfloat16,
                    device="meta",
                    **meshes.te_kwargs(),
                )
                for _ in range(2)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(sequence, batch, hidden)`` to the same."""
        with te.autocast(enabled=True, recipe=RECIPE):
            for layer in self.layers:
                x = layer(x)
        return x


def whole_batch(step: int) -> torch.Tensor:
    """The data of one step: (sequence, batch, hidden)."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).bfloat16()


def microbatches(meshes: te_fsdp.Meshes, step: int) -> list[torch.Tensor]:
    """This rank's part of the data of one step: tensors (sequence, batch, hidden)."""
    own = whole_batch(step).chunk(meshes.data_size, dim=1)[meshes.data_rank]
    return list(own.to(meshes.device).chunk(MICROBATCHES, dim=1))


def loss_of(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Mean over this rank's part of a microbatch."""
    return (output.float() - batch.flip(0).float()).square().mean()


def mean(meshes: te_fsdp.Meshes, losses: list[torch.Tensor]) -> float:
    """A step's loss over all microbatches and ranks. Collective over the world."""
    total = torch.stack([loss.detach() for loss in losses]).mean().double()
    dist.all_reduce(total)
    return total.item() / meshes.device_mesh.size()


def options() -> Options:
    """From the command line."""
    parser = argparse.ArgumentParser()
    for name, kind in (("tp", int), ("steps", int), ("save", Path), ("resume", Path)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Options, name))
    return Options(**vars(parser.parse_args()))


def show(losses: list[float]) -> None:
    """Print the losses of a run, once, and end the process group."""
    if os.environ.get("RANK", "0") == "0":
        print("losses", *(f"{loss:.6f}" for loss in losses))
    dist.destroy_process_group()
