"""torchtitan: its Trainer around the model of train_native.py.

torchrun --standalone --nproc-per-node 4 -m te_fsdp.emulation examples/integrations/train_torchtitan.py --tp 2

The trainer's modules import triton, which comes with torch for GPUs; on a CPU `pip install triton`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import setting
import torch
import torchtitan_on_cpu
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import MSELoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

import te_fsdp
from te_fsdp.integrations import torchtitan


class Model(torchtitan.TeModel):
    """The model of all examples, as torchtitan builds it."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.TeModel.Config):
        """No further sizes."""

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


class Data(BaseDataLoader):
    """The data of all examples, distributed by torchtitan's ranks, from a given step on."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No options."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
        self.size, self.rank, self.step = dp_world_size, dp_rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            own = setting.whole_batch(self.step).chunk(self.size, dim=1)[self.rank]
            for batch in own.chunk(setting.MICROBATCHES, dim=1):
                yield {"input": batch}, batch.flip(0)
            self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data of a step follows from its number."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class NoTokenizer(BaseTokenizer):
    """There are no words."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No options."""

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__()

    def encode(self, *given: Any, **others: Any) -> list[int]:
        """Nothing."""
        return []

    def decode(self, *given: Any, **others: Any) -> str:
        """Nothing."""
        return ""

    def get_vocab_size(self) -> int:
        """None."""
        return 0


class Schedule(LRSchedulersContainer):
    """Nine tenths of the learning rate after each step, as in the other examples."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        """No options."""

        def build(self, *, optimizers: Any, training_steps: int) -> LRSchedulersContainer:
            """For the trainer."""
            return LRSchedulersContainer(optimizers, lambda step: 0.9**step)


class Losses(MetricsProcessor):
    """The trainer's metrics, and a list of the losses."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """No options."""

    def __init__(self, config: Config, **others: Any) -> None:
        super().__init__(config, **others)
        self.losses: list[float] = []

    def log(self, step: int, global_avg_loss: float, *given: Any, **others: Any) -> None:
        """Keep the loss."""
        self.losses.append(global_avg_loss)
        super().log(step, global_avg_loss, *given, **others)


class Training(Trainer):
    """torchtitan's trainer, whose data continues where the checkpoint ended, on any mesh."""

    def batch_generator(self, data_iterable: Iterable[Any]) -> Iterator[Any]:
        """After the checkpoint was loaded."""
        self.dataloader.step = self.step
        return super().batch_generator(data_iterable)


def train(options: setting.Options) -> list[float]:
    """Returns the losses of the steps that were made."""
    torchtitan_on_cpu.install()
    spec = ModelSpec(
        name="example",
        flavor="tiny",
        model=Model.Config(),
        parallelize_fn=torchtitan.parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=torchtitan.keep_main_weights,
        state_dict_adapter=None,
    )
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 3e-3})
    ranks = te_fsdp.Meshes.build(tp=options.tp).data_size
    config = Trainer.Config(
        model_spec=spec,
        loss=MSELoss.Config(),  # the sum over a rank's values, which the trainer divides by their number on all ranks
        dataloader=Data.Config(),
        tokenizer=NoTokenizer.Config(),
        metrics=Losses.Config(log_freq=1, disable_color_printing=True),
        optimizer=OptimizersContainer.Config(param_groups=[group], implementation="for-loop"),
        lr_scheduler=Schedule.Config(),
        training=TrainingConfig(
            local_batch_size=setting.BATCH // (setting.MICROBATCHES * ranks),
            global_batch_size=setting.BATCH,
            seq_len=setting.SEQUENCE,
            steps=options.steps,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=options.tp, spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        checkpoint=torchtitan.CheckpointManager.Config(
            enable=True,
            folder=str(options.save.absolute()) if options.save else "unused",
            initial_load_path=str(options.resume.absolute()) if options.resume else None,
            load_only=options.save is None,
        ),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )
    trainer = Training(config)
    try:
        trainer.train()
        return trainer.metrics_processor.losses
    finally:
        trainer.close()
        gc.enable()  # which the trainer has switched off


if __name__ == "__main__":
    setting.show(train(setting.options()))
