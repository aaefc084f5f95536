"""Lightning Fabric: the training loop of train_native.py with Fabric's functions.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_fabric.py --tp 2
"""

from __future__ import annotations

import os

import setting
import torch
from lightning_fabric import Fabric

import te_fsdp
from te_fsdp.integrations.fabric import TeFsdpStrategy


def train(options: setting.Options) -> list[float]:
    """Train and return the losses of the steps."""
    strategy = TeFsdpStrategy(tp=options.tp, seed=0)
    fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(setting.Model(strategy.meshes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    te_fsdp.main_weights(model.module, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer = fabric.setup_optimizers(optimizer)

    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    losses = []
    if options.resume:
        fabric.load(options.resume, state)
    for step in range(state["step"], options.steps):
        batches = setting.microbatches(strategy.meshes, step)
        parts = []
        for number, batch in enumerate(batches, 1):
            with fabric.no_backward_sync(model, enabled=number < len(batches)):
                loss = setting.loss_of(model(batch), batch)
                fabric.backward(loss / len(batches))
            parts.append(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(setting.mean(strategy.meshes, parts))
    if options.save:
        fabric.save(options.save, state | {"step": options.steps})
    return losses


if __name__ == "__main__":
    setting.show(train(setting.options()))
