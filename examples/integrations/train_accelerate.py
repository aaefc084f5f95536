"""Hugging Face accelerate: the training loop of train_native.py with accelerate's functions.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_accelerate.py --tp 2
"""

from __future__ import annotations

import setting
import torch

import te_fsdp
from te_fsdp.integrations.accelerate import TeFsdpAccelerator


def train(options: setting.Options) -> list[float]:
    """Train and return the losses of the steps."""
    meshes = te_fsdp.Meshes.build(tp=options.tp)
    accelerator = TeFsdpAccelerator(
        meshes,
        seed=0,
        gradient_accumulation_steps=setting.MICROBATCHES,
        step_scheduler_with_optimizer=False,  # ranks of one tp group share their data, but accelerate counts ranks
    )
    model = setting.Model(meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    te_fsdp.main_weights(model, optimizer.optimizer)

    begin, losses = 0, []
    if options.resume:
        accelerator.load_state(str(options.resume))
        begin = accelerator.step // setting.MICROBATCHES
    for step in range(begin, options.steps):
        parts = []
        for batch in setting.microbatches(meshes, step):
            with accelerator.accumulate(model):
                loss = setting.loss_of(model(batch), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            parts.append(loss)
        scheduler.step()
        losses.append(setting.mean(meshes, parts))
    if options.save:
        accelerator.save_state(str(options.save))
    return losses


if __name__ == "__main__":
    setting.show(train(setting.options()))
