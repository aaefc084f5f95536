"""torchtitan: its configuration, optimizers, schedulers and checkpoints around the model of train_native.py.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_torchtitan.py --tp 2

torchtitan's Trainer does what `train` does, and more, on GPUs alone: its modules need triton. `spec` and the
configurations are what it would be given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import setting
import torch
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.protocols.model_spec import ModelSpec

import te_fsdp
from te_fsdp.integrations import torchtitan


class Model(torchtitan.TeModel):
    """The model of all examples, as torchtitan builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.TeModel.Config):
        """No sizes of its own."""

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            """For the trainer's metrics."""
            count = sum(parameter.numel() for parameter in model.parameters())
            return count, 6 * count

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = setting.Model(self.meshes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(sequence, batch, hidden)`` to the same."""
        return self.layers(x)


@dataclass
class Config:
    """Of the trainer, as far as the model asks for it."""

    parallelism: ParallelismConfig


class Progress:
    """What the trainer keeps of itself."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.step = state["step"]


def train(options: setting.Options) -> list[float]:
    """Returns the losses of the steps that were made."""
    spec = ModelSpec(
        name="example",
        flavor="tiny",
        model=Model.Config(),
        parallelize_fn=torchtitan.parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=torchtitan.keep_main_weights,
        state_dict_adapter=None,
    )
    parallelism = ParallelismConfig(tensor_parallel_degree=options.tp, spmd_backend="partial_dtensor")
    training = TrainingConfig(disable_cuda_graphs=True)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3})
    saving = torchtitan.CheckpointManager.Config(
        enable=True,
        folder=str(options.save or "unused"),
        initial_load_path=str(options.resume.absolute()) if options.resume else None,
        load_only=options.save is None,
    )

    torch.manual_seed(0)  # the trainer's --debug.seed
    parallel_dims = ParallelDims.from_config(parallelism, te_fsdp.Meshes.build().data_size)
    spec.model.update_from_config(config=Config(parallelism))
    with torch.device("meta"):
        model = spec.model.build()
    how = {"parallelism": parallelism, "training": training, "parallel_dims": parallel_dims}
    model = spec.parallelize_fn(model, compile_config=CompileConfig(), ac_config=None, **how)
    model.to_empty(device=model.meshes.device)
    model.init_weights()
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(
        model_parts=[model]
    )
    spec.post_optimizer_build_fn(optimizers, [model], parallel_dims)
    schedule = LRSchedulersContainer.Config(warmup_steps=1, total_steps=10)
    schedulers = schedule.build(optimizers=optimizers, training_steps=options.steps)
    progress = Progress()
    parts = {"model_parts": [model], "optimizers": optimizers, "lr_schedulers": schedulers}
    checkpointer = saving.build(dataloader=None, states={"train_state": progress}, **parts)

    checkpointer.load()
    losses = []
    while progress.step < options.steps:
        batches = setting.microbatches(model.meshes, progress.step)
        optimizers.zero_grad()
        parts = []
        for batch in batches:
            loss = setting.loss_of(model(batch), batch)
            (loss / (len(batches) * model.meshes.data_size)).backward()  # gradients are summed over ranks
            parts.append(loss)
        clip_grad_norm_(model.parameters(), training.max_norm, foreach=True)
        optimizers.step()
        schedulers.step()
        progress.step += 1
        losses.append(setting.mean(model.meshes, parts))
        checkpointer.save(progress.step, last_step=progress.step == options.steps)
    checkpointer.close()
    return losses


if __name__ == "__main__":
    setting.show(train(setting.options()))
