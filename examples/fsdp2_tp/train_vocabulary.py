"""Train the byte-level language model of train.py with a vocabulary-parallel head, on FSDP2 x TP.

Each tensor-parallel rank computes the logits of its part of the vocabulary. The loss over all parts is computed without
gathering the logits, by torch (`loss_parallel`) or by TransformerEngine (`parallel_cross_entropy`). Without GPUs, first
`export TE_FSDP_EMULATION=10.0 OMP_NUM_THREADS=1` (TransformerEngine is emulated: losses are meaningful, speed is not):

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train_vocabulary.py --tp 2 --loss torch --steps 20
    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tp/train_vocabulary.py --tp 2 --loss te --steps 20

This file contains what the head adds. Text, the rest of the model, optimizer and log are imported from train.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import train
import tyro
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from train import RANK, RECIPES, te  # TransformerEngine: real, or emulated where the environment says so

import te_fsdp


@dataclass(frozen=True)
class Options(train.Options):
    """Train a byte-level language model with a vocabulary-parallel head with te_fsdp."""

    loss: Literal["torch", "te"] = "torch"
    """torch: loss_parallel. te: parallel_cross_entropy."""
    out: Path = Path("out/fsdp2_tp_vocabulary")
    """Folder of metrics.jsonl and loss.png."""


class ByteModel(train.ByteModel):
    """The model of train.py, whose head is sharded over tp by rows, that is by bytes of the vocabulary."""

    def __init__(self, options: Options, meshes: te_fsdp.Meshes, dtype: torch.dtype) -> None:
        super().__init__(options, meshes, dtype)
        with te.quantized_model_init(enabled=False):
            self.head = te.Linear(
                options.hidden,
                256,
                bias=False,
                parallel_mode="column",
                # The head gathers the sequence, so each rank has the logits of all positions.
                sequence_parallel=options.sequence_parallel and meshes.size("tp") > 1,
                params_dtype=dtype,
                device="meta",
                **meshes.te_kwargs(),
            )

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Map tokens (s, b) at the positions ``places`` (s,) to logits (sequence, b, 256 / tp)."""
        states = self.states(tokens, places)
        with te.autocast(enabled=False):  # the logits' rounding is that of the loss
            return self.head(states)


def summed_loss(how: str, logits: torch.Tensor, labels: torch.Tensor, tp: DeviceMesh | None) -> torch.Tensor:
    """Return the sum of the cross entropy, equal on all ranks of tp. Call it and backward in `loss_parallel`.

    Collective over tp. A plain `cross_entropy` would normalize over one rank's part: te_fsdp raises GradientError.

    Args:
        how: "torch" or "te".
        logits: (sequence, b, 256 / tp).
        labels: (sequence, b), bytes of the whole vocabulary.
        tp: The mesh of the tensor-parallel ranks.
    """
    if how == "te":
        group = None if tp is None else tp.get_group()
        return te.parallel_cross_entropy(logits, labels, 0.0, False, group).sum()
    flat = logits.flatten(0, 1).float()
    if tp is None:
        return F.cross_entropy(flat, labels.flatten(), reduction="sum")
    parts = DTensor.from_local(flat, tp, [Shard(-1)])
    return F.cross_entropy(parts, labels.flatten(), reduction="sum").to_local()


def main(options: Options) -> None:
    """Build the model and train."""
    meshes = te_fsdp.Meshes.build(dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, tp=options.tp)
    if train.check(options, meshes) > 1 or options.save or options.resume:
        train.stop("--micro, --save and --resume: see train.py, which has them.")
    text = train.Text(options)
    recipe = RECIPES[options.recipe] and RECIPES[options.recipe]()
    model, optimizer, schedule = train.build(ByteModel, te.TransformerLayer, options, meshes, recipe)
    if RANK == 0:
        print(te_fsdp.report(model))
    log = train.Log(options, meshes, optimizer, [])

    first, share, places, _ = train.portion(options, meshes)
    for step in range(options.steps):
        torch.manual_seed(options.seed + 7919 * step + first)  # for recipes with stochastic rounding
        tokens = text.take(step * options.batch + first, share).to(meshes.device)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(tokens[places], places)
        with loss_parallel():
            loss = summed_loss(options.loss, logits, tokens[1:], meshes.tp) / (options.batch * options.seq)
            loss.backward()
        norm = train.update(options, model, optimizer, schedule)
        mean = loss.detach().double()
        dist.all_reduce(mean)
        log.step(step, mean / meshes.size("tp"), **norm)
    log.close()


if __name__ == "__main__":
    main(tyro.cli(Options, console_outputs=RANK == 0))
    dist.barrier()
    dist.destroy_process_group()
    # Communication threads that still run at the interpreter's shutdown can abort it.
    sys.stdout.flush()
    os._exit(0)
