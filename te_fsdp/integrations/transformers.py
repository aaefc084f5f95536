"""``transformers.Trainer`` on te_fsdp (:class:`TeFsdpTrainer`).

    meshes = te_fsdp.Meshes.build(tp=2)
    model = build_model(**meshes.te_kwargs())
    TeFsdpTrainer(model, arguments, meshes=meshes, train_dataset=data).train()

The trainer creates its accelerator, saves and loads in private methods. They are overridden here. Source:
transformers 5.23.
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
#: Arguments with the prefix ``ddp_`` that do not configure DDP.
_OTHER = ("ddp_backend", "ddp_timeout")
_FOLDER, _SCHEDULER = "te_fsdp", "scheduler.pt"


class TeFsdpTrainer(_Trainer):
    """Hugging Face's ``Trainer`` for models with TransformerEngine modules.

    Training starts by sharding the model and initializing its meta tensors. The optimizer (given or created) gets the
    sharded parameters, with fp32 main weights if these are bf16 or quantized. A folder ``checkpoint-N`` contains the
    trainer's own files. Its subfolder ``te_fsdp`` contains model and optimizer from :func:`te_fsdp.checkpoint.save`,
    which load on any mesh.

    Args:
        *given: Arguments of ``Trainer``.
        meshes: Meshes of the job; the model was built with them.
        init_seed: Seed of :func:`te_fsdp.materialize`. ``None``: the current generator, identical on all ranks.
        sharding: Keywords of :func:`te_fsdp.fully_shard`.
        **options: Keyword arguments of ``Trainer``.

    Raises:
        OrderError, PrecisionError: An option has no effect here, such as ``fsdp`` and ``bf16`` of
            ``TrainingArguments``.
    """

    def __init__(
        self,
        *arguments: Any,
        meshes: Meshes,
        init_seed: int | None = None,
        sharding: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.meshes, self._init_seed, self._sharding = meshes, init_seed, sharding
        super().__init__(*arguments, **options)

    # ------------------------------------------------------------------------------------------------------- prepare

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        options = super()._build_accelerator_args(**kwargs)
        # The trainer passes these objects even without arguments for DDP and torch.compile.
        passed = [name for name, value in vars(self.args).items() if value is not None]
        handlers = options.get("kwargs_handlers") or []
        if not any(name.startswith("ddp_") and name not in _OTHER for name in passed):
            handlers = [h for h in handlers if type(h).__name__ != "DistributedDataParallelKwargs"]
        accelerator_options = {**options, "kwargs_handlers": handlers}
        if not self.args.torch_compile:
            accelerator_options.pop("dynamo_plugin", None)
        self._accelerator_options = accelerator_options
        return options

    def create_accelerator_and_postprocess(self) -> None:
        """Create te_fsdp's accelerator in place of the trainer's own."""
        super().create_accelerator_and_postprocess()
        options: Any = {"seed": self._init_seed, "sharding": self._sharding, **self._accelerator_options}
        self.accelerator = TeFsdpAccelerator(self.meshes, **options)
        # The trainer has bound this function to the accelerator that was replaced.
        gather, objects = self.accelerator.gather_for_metrics, self.args.eval_use_gather_object
        self.gather_function = functools.partial(gather, use_gather_object=objects)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing. Sharding moves the model, and meta tensors have nothing to move."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler after adding main weights. The optimizer has sharded parameters at this point."""
        te_fsdp.main_weights(self.model, self.optimizer.optimizer)
        return super().create_scheduler(num_training_steps, optimizer)

    def get_tp_size(self) -> int:
        """Return the size of tp. Ranks of tp share data, which affects batch sizes and token counts."""
        return self.meshes.size("tp")

    def get_cp_size(self) -> int:
        """Return the size of cp. Ranks of cp share data."""
        return self.meshes.size("cp")

    # --------------------------------------------------------------------------------------------------------- train

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return te_fsdp.clip_grad_norm_(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return te_fsdp.clip_grad_norm_(model, math.inf) if grad_norm is None else grad_norm

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model only, with :func:`te_fsdp.checkpoint.save` into the folder ``te_fsdp``.

        Collective over the world. For ``from_pretrained`` call :func:`te_fsdp.checkpoint.save_huggingface`.
        """
        folder = output_dir or self.args.output_dir
        # In a checkpoint of the trainer, _save_optimizer_and_scheduler writes the model as well.
        if not _internal_call or self.args.save_only_model:
            checkpoint.save(Path(folder, _FOLDER), self.model)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(Path(output_dir, _FOLDER), self.model, self.optimizer.optimizer)
        if rank() == 0:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Do nothing. The model is not sharded yet, so :meth:`_load_optimizer_and_scheduler` loads it."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            te_fsdp.checkpoint.load(Path(checkpoint, _FOLDER), self.model, self.optimizer.optimizer)
            state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        checkpoint.load(Path(self.state.best_model_checkpoint, _FOLDER), self.model)
