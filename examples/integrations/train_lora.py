"""LoRA by Hugging Face PEFT: train adapters on frozen 8-bit weights.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_lora.py --tp 2
"""

from __future__ import annotations

import setting
import torch
from peft import LoraConfig

import te_fsdp
from te_fsdp.integrations import peft


def train(options: setting.Options) -> list[float]:
    """Returns the losses of the steps that were made, and at last that of the merged model."""
    meshes = te_fsdp.Meshes.build(tp=options.tp)
    model = setting.Model(meshes)
    peft.add_adapters(model, LoraConfig(r=4, lora_alpha=16, target_modules=["layernorm_qkv", "proj"]))
    te_fsdp.fully_shard(model, meshes)
    te_fsdp.materialize(model, seed=0)
    # A pretrained base would be loaded here: with peft.base_of(model): te_fsdp.checkpoint.load(path, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    adapters = peft.adapters_of(model)

    begin, losses = 0, []
    if options.resume:
        begin = te_fsdp.checkpoint.load(options.resume, adapters, optimizer)["step"]
    for step in range(begin, options.steps):
        parts = []
        for batch in setting.microbatches(meshes, step):
            loss = setting.loss_of(model(batch), batch)
            (loss / setting.MICROBATCHES).backward()
            parts.append(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(setting.mean(meshes, parts))
    if options.save:
        te_fsdp.checkpoint.save(options.save, adapters, optimizer, extra={"step": options.steps})
    peft.merge(model)
    with torch.no_grad():
        parts = [setting.loss_of(model(b), b) for b in setting.microbatches(meshes, options.steps)]
    return [*losses, setting.mean(meshes, parts)]


if __name__ == "__main__":
    setting.show(train(setting.options()))
