"""Hugging Face accelerate on te_fsdp: an ``Accelerator`` that shards, clips, accumulates, saves and loads as it does.

    meshes = te_fsdp.Meshes.build(tp=2)
    accelerator = TeFsdpAccelerator(meshes)
    model = build_model(**meshes.te_kwargs())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

accelerate's own FSDP2 and DDP stay off: to it, ranks are processes that it only starts and feeds. What it offers and
te_fsdp cannot do right raises. Source: accelerate 1.15.
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
from te_fsdp.integrations import check_keywords, needs, refused, shard
from te_fsdp.mesh import Meshes, as_meshes
from te_fsdp.sharded_model import get_sharded_model, sharded_model_of

with needs("accelerate"):
    import accelerate
    from accelerate.data_loader import prepare_data_loader

__all__ = ["TeFsdpAccelerator"]

_log = logging.getLogger("te_fsdp")
_Accelerator: Any = accelerate.Accelerator

#: Argument of ``Accelerator`` that would have no effect -> what to do instead.
_INSTEAD = {
    "deepspeed_plugin": "strategies of te_fsdp.fully_shard",
    "deepspeed_plugins": "strategies of te_fsdp.fully_shard",
    "fsdp_plugin": "sharding={...}, keywords of te_fsdp.fully_shard",
    "megatron_lm_plugin": "meshes with tp",
    "torch_tp_plugin": "te_fsdp.Meshes.build(tp=...)",
    "parallelism_config": "te_fsdp.Meshes.build(dp_replicate=..., dp_shard=..., cp=..., tp=...)",
    "dynamo_backend": "torch.compile of what lies between units",
    "dynamo_plugin": "torch.compile of what lies between units",
}
#: The same of handlers.
_HANDLERS = {
    "DistributedDataParallelKwargs": "sharding={...}, keywords of te_fsdp.fully_shard",
    "GradScalerKwargs": "bf16, which needs no scaling",
    "InitProcessGroupKwargs": "torch.distributed.init_process_group before te_fsdp.Meshes.build",
}
#: What ``accelerate launch`` sets by its configuration file.
_LAUNCHED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
_FOLDER = "te_fsdp"


class TeFsdpAccelerator(_Accelerator):
    """accelerate's ``Accelerator`` for models of TransformerEngine's modules.

    ``prepare`` shards a model with :func:`te_fsdp.fully_shard` and initialises what is on meta; an optimizer that is
    given with it gets the sharded parameters in its groups. Call :func:`te_fsdp.main_weights` or
    :func:`te_fsdp.shard_optimizer` where they are needed afterwards, on ``optimizer.optimizer``. ``accumulate`` and
    ``no_sync`` let gradients add up on each rank, ``clip_grad_norm_`` takes the norm over all ranks. ``save_state``
    writes model and optimizer by :func:`te_fsdp.checkpoint.save` into the folder ``te_fsdp`` beside accelerate's own
    files, and ``load_state`` takes them onto any mesh.

    Args:
        meshes: The job's; the model's modules were, or will be, built with them.
        seed: Of :func:`te_fsdp.materialize`. ``None``: the current generator, the same on all ranks.
        sharding: Keywords of :func:`te_fsdp.fully_shard`.
        **options: Of ``Accelerator``.

    Raises:
        OrderError: An option that would have no effect, with what to use instead.
        PrecisionError: ``mixed_precision`` other than ``"no"``.
        TypeError: A keyword that ``fully_shard`` does not have.
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
        # Before accelerate notes it for all accelerators of the process, of whatever follows this error too.
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        _refuse_precision(options.get("mixed_precision") or precision)
        options.setdefault("cpu", self.meshes.device_type == "cpu")
        super().__init__(**options)
        _refuse_precision(self.mixed_precision)
        super().register_save_state_pre_hook(self._save)
        super().register_load_state_pre_hook(self._load)

    # ------------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As accelerate's; an optimizer's parameters become those of the model beside it. Collective over the world.

        ``OrderError``: an optimizer that holds other parameters, or has stepped.
        """
        models = [obj for obj in args if isinstance(obj, nn.Module)]
        optimizers = [obj for obj in args if isinstance(obj, Optimizer)]
        for optimizer in optimizers:
            te_fsdp.check_optimizer(nn.ModuleList([*models, *self._models]), optimizer)
        for model in (model for model in models if not get_sharded_model(model)):
            own = {id(parameter) for parameter in model.parameters()}
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers:
                    if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                        fix = "build it from the parameters of one model, right before"
                        stack.enter_context(
                            rebind_optimizer_params(model, optimizer, "Accelerator.prepare", fix)
                        )
                shard(model, self.meshes, self._seed, self._sharding)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, or leave it as it is for ``evaluation_mode=True``. Collective over the world."""
        if not evaluation_mode and not get_sharded_model(model):
            shard(model, self.meshes, self._seed, self._sharding)
        # In this mode accelerate wraps nothing.
        return super().prepare_model(model, device_placement=bool(evaluation_mode), evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """As accelerate's, for an optimizer over the models that were prepared; ``OrderError``: over others."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            states = [sharded_model_of(p) for group in optimizer.param_groups for p in group["params"]]
            models = {id(state): state.model for state in states if state is not None}
            te_fsdp.check_optimizer(nn.ModuleList(models.values()), optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """As accelerate's: data of its own for each data-parallel rank, the same for ranks of ``tp`` and ``cp``."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader)
        shared = self.meshes.data_size != self.num_processes
        if shared and self.dispatch_batches:
            what = "DataLoaderConfiguration(dispatch_batches=True)"
            self._refuse_shared_data(what, "dispatch_batches=False")
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
        """As accelerate's; ``OrderError`` where processes share data: it steps once for each, which would run ahead."""
        if self.step_scheduler_with_optimizer and not self.split_batches:
            fix = "step_scheduler_with_optimizer=False, or leave the scheduler out of prepare"
            self._refuse_shared_data("Accelerator.prepare(scheduler)", fix)
        return super().prepare_scheduler(scheduler)

    def _refuse_shared_data(self, what: str, fix: str) -> None:
        """Raise where accelerate counts processes, and several of them have the same data."""
        if self.meshes.data_size != self.num_processes:
            raise OrderError(
                what,
                expected="data of its own for each process",
                got=f"{self.meshes.data_size} parts of the data on {self.num_processes} processes ({self.meshes})",
                why="accelerate counts processes",
                fix=fix,
            )

    # --------------------------------------------------------------------------------------------------------- train

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """:func:`te_fsdp.no_sync`."""
        return te_fsdp.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """:func:`te_fsdp.sync`."""
        return te_fsdp.sync(model)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """:func:`te_fsdp.clip_grad_norm_`. Collective."""
        return te_fsdp.clip_grad_norm_(parameters, max_norm, norm_type)

    clip_grad_value_ = refused(
        PlacementError,
        "Accelerator.clip_grad_value_",
        why="A gradient may still wait for its average over dp_replicate",
        fix="accelerator.clip_grad_norm_(model.parameters(), max_norm)",
    )
    join_uneven_inputs = refused(
        OrderError,
        "Accelerator.join_uneven_inputs",
        why="Each rank takes part in the gathers of each step",
        fix="even_batches=True, the default, or drop_last=True of the DataLoader",
    )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As accelerate's; ``OrderError`` where processes share data, which would count more than once."""
        self._refuse_shared_data("Accelerator.gather_for_metrics", "gather over meshes.fsdp")
        return super().gather_for_metrics(input_data, use_gather_object)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """As accelerate's; ``OrderError`` where several processes must have the same data."""
        self._refuse_shared_data("Accelerator.split_between_processes", "split by meshes.data_rank")
        return super().split_between_processes(inputs, apply_padding)

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Model and optimizer by :func:`te_fsdp.checkpoint.save`, all else as accelerate does. Collective.

        Its folder ``te_fsdp`` must not exist; options of how accelerate writes a model are refused.

        Raises:
            CheckpointError: No prepared model, or several, or several optimizers; or what ``save`` raises. Nothing was
                written then but an empty folder.
        """
        if not safe_serialization or save_model_func_kwargs:
            raise CheckpointError(
                "Accelerator.save_state",
                expected="the folder alone",
                got=", ".join(save_model_func_kwargs) or "safe_serialization=False",
                fix="leave it out: te_fsdp writes a checkpoint that any mesh loads",
            )
        with self._apart():
            return super().save_state(output_dir)

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """What :meth:`save_state` has written, from any mesh. Collective over the world.

        Random states are accelerate's, a file for each process: on another number of processes they are not those that
        a run without a break would have, which a warning says.

        ``load_model_func_kwargs`` are keywords of :func:`te_fsdp.checkpoint.load`; where it raises nothing was changed.
        """
        self._loading = load_model_func_kwargs
        with self._apart():
            super().load_state(input_dir, load_kwargs)
        self.step = self._loaded["step"]

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Hide model and optimizer from accelerate, which would write and read the parts of one rank."""
        models, optimizers = self._models, self._optimizers
        if len(models) != 1 or len(optimizers) > 1:
            raise CheckpointError(
                "Accelerator.save_state or load_state",
                expected="one model and at most one optimizer from prepare",
                got=f"{len(models)} models and {len(optimizers)} optimizers",
                fix="te_fsdp.checkpoint.save and load for each model",
            )
        self._kept = models[0], optimizers[0].optimizer if optimizers else None
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers

    def _save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        """Hook of ``save_state``, before accelerate writes its own files."""
        model, optimizer = self._kept
        extra = {"step": self.step, "processes": world_size()}
        checkpoint.save(Path(output_dir, _FOLDER), model, optimizer, extra=extra)

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        """Hook of ``load_state``, before accelerate reads its own files."""
        self._loaded = checkpoint.load(Path(input_dir, _FOLDER), *self._kept, **self._loading)
        saved, here = self._loaded["processes"], world_size()
        if saved != here:
            text = "%s is of %d processes, these are %d: random states go on otherwise"
            _log.warning(text, input_dir, saved, here)

    # accelerate gives such hooks models' state dicts, which are parts here.
    register_save_state_pre_hook = register_load_state_pre_hook = refused(
        CheckpointError,
        "Accelerator.register_save_state_pre_hook or register_load_state_pre_hook",
        why="te_fsdp saves and loads model and optimizer by itself",
        fix="register_for_checkpointing(object) for what belongs to the run beside them",
    )
    #: ``save_model`` goes through it as well.
    get_state_dict = refused(
        CheckpointError,
        "Accelerator.get_state_dict or save_model",
        expected="a model that one rank holds",
        got="a sharded one",
        fix="te_fsdp.checkpoint.save_huggingface, or save_state and the command te-fsdp ckpt convert",
    )


def _refuse_precision(asked: Any) -> None:
    """Raise for an autocast of accelerate's."""
    if str(asked) != "no":
        raise PrecisionError(
            f"TeFsdpAccelerator(mixed_precision={str(asked)!r})",
            expected="no",
            got=asked,
            why="Its autocast, and its loss scaling, would meet weights that FSDP2 casts and shards",
            fix='mixed_precision="no", also for accelerate launch; te.autocast in the forward of the model; '
            'sharding={"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, with the policy of FSDP2',
        )


def _refuse(options: Mapping[str, Any]) -> None:
    """Raise for options of ``Accelerator``, and of ``accelerate launch``, that would have no effect."""
    given = [name for name, value in options.items() if value is not None]
    found = {f"{name}=": _INSTEAD[name] for name in given if name in _INSTEAD}
    handlers = [type(handler).__name__ for handler in options.get("kwargs_handlers") or ()]
    found |= {f"{name}()": _HANDLERS[name] for name in handlers if name in _HANDLERS}
    for name in (f"ACCELERATE_USE_{word}" for word in _LAUNCHED):
        if os.environ.get(name, "false").lower() == "true":
            found[f"{name}=true"] = "accelerate launch --multi_gpu, or torchrun, without it"
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        found["ACCELERATE_DYNAMO_BACKEND"] = _INSTEAD["dynamo_backend"]
    if found:
        raise OrderError(
            f"TeFsdpAccelerator: {', '.join(found)}",
            why="It would have no effect: te_fsdp shards, and starts the process group",
            fix="; ".join(dict.fromkeys(found.values())),
        )
