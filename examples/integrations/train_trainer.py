"""transformers.Trainer: the training of train_native.py by Hugging Face's trainer.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_trainer.py --tp 2
"""

from __future__ import annotations

import tempfile

import setting
import torch
from transformers import TrainingArguments

import te_fsdp
from te_fsdp.integrations.transformers import TeFsdpTrainer


class Model(torch.nn.Module):
    """The model of all examples, with its loss."""

    def __init__(self, meshes: te_fsdp.Meshes) -> None:
        super().__init__()
        self.layers = setting.Model(meshes)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """``(sequence, batch, hidden)``."""
        return {"loss": setting.loss_of(self.layers(x), x)}


def samples(meshes: te_fsdp.Meshes, steps: int) -> list[torch.Tensor]:
    """Return the sequences of all steps, in the order in which microbatches are distributed to ranks."""
    found = []
    for step in range(steps):
        ranks = setting.whole_batch(step).chunk(meshes.data_size, dim=1)
        for parts in zip(*(rank.chunk(setting.MICROBATCHES, dim=1) for rank in ranks), strict=True):
            found += [sample for part in parts for sample in part.unbind(1)]
    return found


def train(options: setting.Options) -> list[float]:
    """Returns the losses of the steps that were made."""
    meshes = te_fsdp.Meshes.build(tp=options.tp)
    model = Model(meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    arguments = TrainingArguments(
        output_dir=str(options.save.parent) if options.save else tempfile.mkdtemp(),
        max_steps=options.steps,
        per_device_train_batch_size=setting.BATCH // (meshes.data_size * setting.MICROBATCHES),
        gradient_accumulation_steps=setting.MICROBATCHES,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        save_strategy="steps" if options.save else "no",
        save_steps=options.steps,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=meshes.device_type == "cpu",
    )
    trainer = TeFsdpTrainer(
        model,
        arguments,
        meshes=meshes,
        init_seed=0,
        train_dataset=samples(meshes, options.steps),
        data_collator=lambda picked: {"x": torch.stack(picked, dim=1)},
        optimizers=(optimizer, scheduler),
    )
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    setting.show(train(setting.options()))
