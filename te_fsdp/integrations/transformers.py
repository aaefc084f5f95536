"""``transformers.Trainer`` on te_fsdp: a trainer with :class:`TeFsdpAccelerator` and te_fsdp's checkpoints.

    meshes = te_fsdp.Meshes.build(tp=2)
    trainer = TeFsdpTrainer(build_model(**meshes.te_kwargs()), arguments, meshes=meshes, train_dataset=data)
    trainer.train()

The trainer makes its accelerator, and saves and loads, by methods that have no public seam: they are overridden here.
Source: transformers 5.23.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.collectives.agreement import rank
from te_fsdp.integrations import needs
from te_fsdp.integrations.accelerate import TeFsdpAccelerator
from te_fsdp.mesh import Meshes

with needs("accelerate"):
    import transformers

__all__ = ["TeFsdpTrainer"]

_Trainer: Any = transformers.Trainer
#: Arguments of that prefix that are not DDP's.
_OTHER = ("ddp_backend", "ddp_timeout")
_FOLDER, _SCHEDULER = "te_fsdp", "scheduler.pt"


class TeFsdpTrainer(_Trainer):
    """Hugging Face's ``Trainer`` for models of TransformerEngine's modules.

    The model is sharded when training begins, and initialised where it is on meta; the optimizer, the trainer's or one
    that is given, gets the sharded parameters, and fp32 main weights where they are bf16 or quantized. A folder
    ``checkpoint-N`` has the trainer's own files and, in ``te_fsdp``, model and optimizer by
    :func:`te_fsdp.checkpoint.save`, which any mesh loads.

    Args:
        *given: Of ``Trainer``.
        meshes: The job's; the model's modules were built with them.
        init_seed: Of :func:`te_fsdp.materialize`. ``None``: the current generator, the same on all ranks.
        sharding: Keywords of :func:`te_fsdp.fully_shard`.
        **options: Of ``Trainer``.

    Raises:
        OrderError, PrecisionError: Options that would have no effect, such as ``fsdp`` and ``bf16`` of
            ``TrainingArguments``.
    """

    def __init__(
        self,
        *given: Any,
        meshes: Meshes,
        init_seed: int | None = None,
        sharding: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.meshes, self._init_seed, self._sharding = meshes, init_seed, sharding
        super().__init__(*given, **options)

    # ------------------------------------------------------------------------------------------------------- prepare

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options = super()._build_accelerator_args(**kwargs)
        # Without its arguments for DDP and torch.compile, the trainer gives such objects all the same.
        given = [name for name, value in vars(self.args).items() if value is not None]
        handlers = options.get("kwargs_handlers") or []
        if not any(name.startswith("ddp_") and name not in _OTHER for name in given):
            handlers = [h for h in handlers if type(h).__name__ != "DistributedDataParallelKwargs"]
        own = {**options, "kwargs_handlers": handlers}
        if not self.args.torch_compile:
            own.pop("dynamo_plugin", None)
        self._accelerator_options = own
        return options

    def create_accelerator_and_postprocess(self) -> None:
        """As the trainer's, with te_fsdp's accelerator in place of its own."""
        super().create_accelerator_and_postprocess()
        options: Any = {"seed": self._init_seed, "sharding": self._sharding, **self._accelerator_options}
        self.accelerator = TeFsdpAccelerator(self.meshes, **options)
        gather, objects = self.accelerator.gather_for_metrics, self.args.eval_use_gather_object
        self.gather_function = functools.partial(gather, use_gather_object=objects)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: sharding does it, and parameters on meta have nothing to move."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the trainer's, which calls it when the optimizer holds sharded parameters: it gets main weights first."""
        te_fsdp.main_weights(self.model, self.optimizer.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_tp_size(self) -> int:
        """Ranks that share their data, for batch sizes and counts of tokens."""
        return self.meshes.size("tp")

    def get_cp_size(self) -> int:
        """As :meth:`get_tp_size`."""
        return self.meshes.size("cp")

    # --------------------------------------------------------------------------------------------------------- train

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return te_fsdp.clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return te_fsdp.clip_grad_norm_(model, math.inf) if grad_norm is None else grad_norm

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model alone, by :func:`te_fsdp.checkpoint.save`, into the folder ``te_fsdp``. Collective over the world.

        For ``from_pretrained`` call :func:`te_fsdp.checkpoint.save_huggingface`.
        """
        folder = output_dir or self.args.output_dir
        # Of a checkpoint of the trainer's, _save_optimizer_and_scheduler writes the model as well.
        if not _internal_call or self.args.save_only_model:
            checkpoint.save(Path(folder, _FOLDER), self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(Path(output_dir, _FOLDER), self.model, self.optimizer.optimizer)
        if rank() == 0:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the model is not sharded yet. :meth:`_load_optimizer_and_scheduler` loads it."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            te_fsdp.checkpoint.load(Path(checkpoint, _FOLDER), self.model, self.optimizer.optimizer)
            state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        checkpoint.load(Path(self.state.best_model_checkpoint, _FOLDER), self.model)
