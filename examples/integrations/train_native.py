"""te_fsdp's own functions: the training loop of all examples in this folder, without a framework.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_native.py --tp 2
"""

from __future__ import annotations

import setting
import torch

import te_fsdp


def train(options: setting.Options) -> list[float]:
    """Train and return the losses of the steps."""
    meshes = te_fsdp.Meshes.build(tp=options.tp)
    model = te_fsdp.fully_shard(setting.Model(meshes), meshes)
    te_fsdp.materialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    te_fsdp.main_weights(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    begin, losses = 0, []
    if options.resume:
        loaded = te_fsdp.checkpoint.load(options.resume, model, optimizer)
        begin = loaded["step"]
        scheduler.load_state_dict(loaded["scheduler"])
    for step in range(begin, options.steps):
        batches = setting.microbatches(meshes, step)
        parts = []
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with te_fsdp.microbatch(model, is_last=True) if last else te_fsdp.no_sync(model):
                loss = setting.loss_of(model(batch), batch)
                (loss / len(batches)).backward()
            parts.append(loss)
        te_fsdp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(setting.mean(meshes, parts))
    if options.save:
        extra = {"step": options.steps, "scheduler": scheduler.state_dict()}
        te_fsdp.checkpoint.save(options.save, model, optimizer, extra=extra)
    return losses


if __name__ == "__main__":
    setting.show(train(setting.options()))
