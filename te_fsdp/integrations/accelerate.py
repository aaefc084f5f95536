"""Hugging Face accelerate on te_fsdp.

    meshes = te_fsdp.Meshes.build(tp=2)
    accelerator = TeFsdpAccelerator(meshes)
    model = build_model(**meshes.te_kwargs())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

accelerate's own FSDP2 and DDP are disabled. accelerate only starts the processes and distributes the data.
Features that te_fsdp cannot support raise. Source: accelerate 1.15.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.collectives.agreement import world_size
from te_fsdp.errors import CheckpointError, OrderError, PlacementError, PrecisionError
from te_fsdp.features.main_weights import rebind_optimizer_params
from te_fsdp.integrations import check_keywords, needs, raising_method, shard
from te_fsdp.mesh import Meshes, as_meshes
from te_fsdp.sharded_model import get_sharded_model, sharded_model_of

with needs("accelerate"):
    import accelerate
    from accelerate.data_loader import prepare_data_loader

__all__ = ["TeFsdpAccelerator"]

_log = logging.getLogger("te_fsdp")
_Accelerator: Any = accelerate.Accelerator

#: Argument of ``Accelerator`` without effect -> replacement.
_INSTEAD = {
    "deepspeed_plugin": "strategies of te_fsdp.fully_shard",
    "deepspeed_plugins": "strategies of te_fsdp.fully_shard",
    "fsdp_plugin": "sharding={...}, keywords of te_fsdp.fully_shard",
    "megatron_lm_plugin": "meshes with tp",
    "torch_tp_plugin": "te_fsdp.Meshes.build(tp=...)",
    "parallelism_config": "te_fsdp.Meshes.build(dp_replicate=..., dp_shard=..., cp=..., tp=...)",
    "dynamo_backend": "torch.compile of the code between units",
    "dynamo_plugin": "torch.compile of the code between units",
}
#: Class name of a handler without effect -> replacement.
_HANDLERS = {
    "DistributedDataParallelKwargs": "sharding={...}, keywords of te_fsdp.fully_shard",
    "GradScalerKwargs": "bf16, which needs no scaling",
    "InitProcessGroupKwargs": "torch.distributed.init_process_group before te_fsdp.Meshes.build",
}
#: Environment variables that ``accelerate launch`` sets from its configuration file.
_LAUNCHED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
_FOLDER = "te_fsdp"


class TeFsdpAccelerator(_Accelerator):
    """accelerate's ``Accelerator`` for models with TransformerEngine modules.

    ``prepare`` shards a model with :func:`te_fsdp.fully_shard` and initializes its meta tensors. An optimizer
    passed in the same call gets the sharded parameters. Afterwards, call :func:`te_fsdp.main_weights` or
    :func:`te_fsdp.shard_optimizer` on ``optimizer.optimizer`` if needed. ``accumulate`` and ``no_sync``
    accumulate unreduced gradients. ``clip_grad_norm_`` computes the norm over all ranks. ``save_state`` writes
    model and optimizer with :func:`te_fsdp.checkpoint.save` into the folder ``te_fsdp`` next to accelerate's
    files. ``load_state`` loads them on any mesh.

    Args:
        meshes: Meshes of the job; the model is built with them.
        seed: Seed of :func:`te_fsdp.materialize`. ``None``: the current generator, identical on all ranks.
        sharding: Keywords of :func:`te_fsdp.fully_shard`.
        **options: Arguments of ``Accelerator``.

    Raises:
        OrderError: An option has no effect here. The error names a replacement.
        PrecisionError: ``mixed_precision`` is not ``"no"``.
        TypeError: ``fully_shard`` does not have the keyword.
    """

    def __init__(
        self,
        meshes: Meshes,
        *,
        seed: int | None = None,
        sharding: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.meshes = as_meshes(meshes, "TeFsdpAccelerator")
        self._seed, self._sharding = seed, dict(sharding or {})
        check_keywords(self._sharding)
        _refuse(options)
        # Check this first. accelerate stores the precision for all later accelerators of the process.
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        _check_precision(options.get("mixed_precision") or precision)
        # accelerate would choose a GPU if the machine has one.
        options.setdefault("cpu", self.meshes.device_type == "cpu")
        super().__init__(**options)
        _check_precision(self.mixed_precision)
        # The methods of this class raise, so that users cannot register hooks that get shards.
        super().register_save_state_pre_hook(self._save)
        super().register_load_state_pre_hook(self._load)

    # ------------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as accelerate does. An optimizer gets the parameters of the model passed with it.

        Collective over the world. Raise OrderError if the optimizer has different parameters or has stepped.
        """
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        optimizers = [obj for obj in args if isinstance(obj, Optimizer)]
        for optimizer in optimizers:
            # Check all optimizers first, because sharding replaces parameters and cannot be undone.
            te_fsdp.check_optimizer(nn.ModuleList([*models, *self._models]), optimizer)
        for model in (model for model in models if not get_sharded_model(model)):
            param_ids = {id(parameter) for parameter in model.parameters()}
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers:
                    if any(id(p) in param_ids for group in optimizer.param_groups for p in group["params"]):
                        fix = "build it from the parameters of one model, right before this call"
                        stack.enter_context(
                            rebind_optimizer_params(model, optimizer, "Accelerator.prepare", fix)
                        )
                shard(model, self.meshes, self._seed, self._sharding)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, or leave it unchanged with ``evaluation_mode=True``. Collective over the world."""
        if not evaluation_mode and not get_sharded_model(model):
            shard(model, self.meshes, self._seed, self._sharding)
        # accelerate does not wrap the model in this mode.
        return super().prepare_model(model, device_placement=bool(evaluation_mode), evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Prepare an optimizer over prepared models. Raise OrderError if it has different parameters."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            # The models are those of the parameters, because accelerate does not pass them.
            states = [sharded_model_of(p) for group in optimizer.param_groups for p in group["params"]]
            models = {id(state): state.model for state in states if state is not None}
            te_fsdp.check_optimizer(nn.ModuleList(models.values()), optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a data loader with different data on each data-parallel rank."""
        # Ranks of ``tp`` and ``cp`` share data.
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        shared = self.meshes.data_size != self.num_processes
        if shared and self.dispatch_batches:
            problem = "DataLoaderConfiguration(dispatch_batches=True)"
            self._require_unshared_data(problem, "dispatch_batches=False")
        # accelerate would divide the data by processes, and ranks of tp would get different data.
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=self.meshes.data_size,
            process_index=self.meshes.data_rank,
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types.copy(),
            dispatch_batches=False if shared else self.dispatch_batches,
            even_batches=self.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler; raise OrderError if several processes share data."""
        # accelerate steps a scheduler num_processes times, to count samples of all processes.
        if self.step_scheduler_with_optimizer and not self.split_batches:
            fix = "step_scheduler_with_optimizer=False, or do not pass the scheduler to prepare"
            self._require_unshared_data("Accelerator.prepare(scheduler)", fix)
        return super().prepare_scheduler(scheduler)

    def _require_unshared_data(self, problem: str, fix: str) -> None:
        """Raise OrderError if several processes have the same data, because accelerate counts processes."""
        if self.meshes.data_size != self.num_processes:
            raise OrderError(
                problem,
                expected="different data on each process",
                got=f"{self.meshes.data_size} parts of the data on {self.num_processes} processes ({self.meshes})",
                why="accelerate counts processes",
                fix=fix,
            )

    # --------------------------------------------------------------------------------------------------------- train

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Accumulate unreduced gradients: :func:`te_fsdp.no_sync`."""
        return te_fsdp.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Reduce gradients in each backward: :func:`te_fsdp.sync`."""
        return te_fsdp.sync(model)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients by their norm over all ranks. Collective as :func:`te_fsdp.clip_grad_norm_`."""
        return te_fsdp.clip_grad_norm_(parameters, max_norm, norm_type)

    clip_grad_value_ = raising_method(
        PlacementError,
        "Accelerator.clip_grad_value_",
        why="Gradients may not be averaged over dp_replicate yet",
        fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    )
    join_uneven_inputs = raising_method(
        OrderError,
        "Accelerator.join_uneven_inputs",
        why="Every rank participates in the all-gathers of each step",
        fix="even_batches=True, the default, or drop_last=True of the DataLoader",
    )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather metrics; raise OrderError if several processes have the same data."""
        # The data would be counted repeatedly.
        self._require_unshared_data("Accelerator.gather_for_metrics", "gather over meshes.fsdp")
        return super().gather_for_metrics(input_data, use_gather_object)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Split inputs. Raise OrderError if several processes need the same data."""
        self._require_unshared_data("Accelerator.split_between_processes", "split by meshes.data_rank")
        return super().split_between_processes(inputs, apply_padding)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Save model and optimizer with :func:`te_fsdp.checkpoint.save`, other objects as accelerate does.

        Collective over the world. The folder ``te_fsdp`` must not exist. Options for accelerate's model files raise.

        Raises:
            CheckpointError: There is not exactly one prepared model, there are several optimizers, or ``save``
                raises. At most an empty folder was created.
        """
        if not safe_serialization or save_model_func_kwargs:
            raise CheckpointError(
                "Accelerator.save_state",
                expected="no option except the folder",
                got=", ".join(save_model_func_kwargs) or "safe_serialization=False",
                fix="omit it; te_fsdp writes a checkpoint that loads on any mesh",
            )
        with self._hide_from_accelerate():
            return super().save_state(output_dir)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load the output of :meth:`save_state` on any mesh. Collective over the world.

        accelerate stores random states in one file per process. With a different number of processes they differ from
        those of an uninterrupted run, and a warning is logged.

        ``load_model_func_kwargs`` are keywords of :func:`te_fsdp.checkpoint.load`. If it raises, nothing was changed.
        """
        # The hook of load_state has no other way to get them.
        self._loading = load_model_func_kwargs
        with self._hide_from_accelerate():
            super().load_state(input_dir, load_kwargs)
        self.step = self._loaded["step"]

    @contextlib.contextmanager
    def _hide_from_accelerate(self) -> Iterator[None]:
        """Hide model and optimizer from accelerate, which would write and read this rank's shards only."""
        # The hooks run within accelerate's call, when its lists are empty. They read ``_kept`` instead.
        models, optimizers = self._models, self._optimizers
        if len(models) != 1 or len(optimizers) > 1:
            raise CheckpointError(
                "Accelerator.save_state or load_state",
                expected="one prepared model and at most one prepared optimizer",
                got=f"{len(models)} models and {len(optimizers)} optimizers",
                fix="call te_fsdp.checkpoint.save and load for each model",
            )
        # accelerate writes the objects in its lists, so they are empty while it runs.
        self._kept = models[0], optimizers[0].optimizer if optimizers else None
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Save model and optimizer before accelerate writes its own files (hook of ``save_state``)."""
        model, optimizer = self._kept
        extra = {"step": self.step, "processes": world_size()}
        checkpoint.save(Path(output_dir, _FOLDER), model, optimizer, extra=extra)

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        """Load model and optimizer before accelerate reads its own files (hook of ``load_state``)."""
        self._loaded = checkpoint.load(Path(input_dir, _FOLDER), *self._kept, **self._loading)
        saved, present = self._loaded["processes"], world_size()
        if saved != present:
            text = (
                "%s was saved by %d processes and is loaded by %d. Random states will differ from "
                "those of an uninterrupted run."
            )
            _log.warning(text, input_dir, saved, present)

    # accelerate passes state dicts to such hooks. Here these would contain one rank's shards.
    register_save_state_pre_hook = register_load_state_pre_hook = raising_method(
        CheckpointError,
        "Accelerator.register_save_state_pre_hook or register_load_state_pre_hook",
        why="te_fsdp itself saves and loads the model and the optimizer",
        fix="register_for_checkpointing(object) for further objects",
    )
    #: ``save_model`` calls it as well.
    get_state_dict = raising_method(
        CheckpointError,
        "Accelerator.get_state_dict or save_model",
        expected="an unsharded model",
        got="a sharded model",
        fix="te_fsdp.checkpoint.save_huggingface, or save_state and the command te-fsdp ckpt convert",
    )


def _check_precision(requested: Any) -> None:
    """Raise PrecisionError if accelerate's autocast is enabled."""
    if str(requested) != "no":
        raise PrecisionError(
            f"TeFsdpAccelerator(mixed_precision={str(requested)!r})",
            expected="no",
            got=requested,
            why="accelerate's autocast and loss scaling do not support weights that FSDP2 casts and shards",
            fix='mixed_precision="no", also for accelerate launch; te.autocast in the forward of the model; '
            'sharding={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, with the policy '
            "of FSDP2",
        )


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise OrderError for options of ``Accelerator`` and of ``accelerate launch`` without effect here."""
    passed = [name for name, value in options.items() if value is not None]
    refused = {f"{name}=": _INSTEAD[name] for name in passed if name in _INSTEAD}
    handlers = [type(handler).__name__ for handler in options.get("kwargs_handlers") or ()]
    refused |= {f"{name}()": _HANDLERS[name] for name in handlers if name in _HANDLERS}
    # ``accelerate launch`` passes its configuration file as environment variables.
    for name in (f"ACCELERATE_USE_{launcher}" for launcher in _LAUNCHED):
        if os.environ.get(name, "false").lower() == "true":
            refused[f"{name}=true"] = "accelerate launch --multi_gpu or torchrun, without this option"
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        refused["ACCELERATE_DYNAMO_BACKEND"] = _INSTEAD["dynamo_backend"]
    if refused:
        raise OrderError(
            f"TeFsdpAccelerator: {', '.join(refused)}",
            why="It would have no effect, because te_fsdp shards the model and initializes the process group",
            fix="; ".join(dict.fromkeys(refused.values())),
        )
