"""torchtitan on te_fsdp.

    class MyModel(TeModel): ...                                       # of TransformerEngine's modules
    spec = ModelSpec(name="my", flavor="8B", model=MyModel.Config(...), parallelize_fn=parallelize,
                     pipelining_fn=None, post_optimizer_build_fn=keep_main_weights, state_dict_adapter=None)
    Trainer.Config(model_spec=spec, checkpoint=CheckpointManager.Config(enable=True), ...)

The trainer builds the model on the meta device and calls ``parallelize``, ``to_empty`` and ``init_weights``.
Then it builds the optimizer. Its losses are sums over a rank's tokens, divided by the number of all tokens.
Gradients are therefore summed over data parallel. Options without effect here raise. Source: torchtitan 0.3.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.errors import CheckpointError, OrderError, PlacementError
from te_fsdp.integrations import needs
from te_fsdp.sharded_model import get_sharded_model

with needs("torchtitan"):
    from torchtitan.components.checkpointer.base import BaseCheckpointManager
    from torchtitan.protocols import BaseModel

__all__ = ["CheckpointManager", "TeModel", "keep_main_weights", "parallelize"]

_BaseModel: Any = BaseModel
_Manager: Any = BaseCheckpointManager


class TeModel(_BaseModel):
    """Base class of a model with TransformerEngine modules.

    A subclass calls ``super().__init__(config)`` and builds its modules with ``device="meta"`` and
    ``**self.meshes.te_kwargs()``. Its nested ``Config`` derives from this one and defines ``get_nparams_and_flops``.

    Attributes:
        meshes: Meshes of the job.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_BaseModel.Config):
        """Sizes of the mesh axes. A subclass adds those of the model."""

        axes: dict[str, int] = field(default_factory=dict)

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Copy the degrees of parallelism. The trainer calls it before it builds the model."""
            degrees = config.parallelism
            self.axes = {
                "dp_replicate": degrees.data_parallel_replicate_degree,
                "dp_shard": degrees.data_parallel_shard_degree,
                "cp": degrees.context_parallel_degree,
                "tp": degrees.tensor_parallel_degree,
            }

    def __init__(self, config: Config) -> None:
        super().__init__()
        axes: Any = config.axes
        self.meshes = te_fsdp.Meshes.build(**axes)

    def verify_module_protocol(self) -> None:
        """Do nothing. TransformerEngine's modules do not implement torchtitan's module protocol."""

    def to_empty(self, *, device: Any, recurse: bool = True) -> TeModel:
        """Do nothing. :func:`te_fsdp.materialize` allocates parameters, including quantized ones."""
        return self

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialize with :func:`te_fsdp.materialize`; raise OrderError before ``parallelize``.

        Collective over the world.
        """
        if get_sharded_model(self) is None:
            raise OrderError(
                "TeModel.init_weights before parallelize",
                why="Each rank initializes its own shards",
                fix="ModelSpec(parallelize_fn=te_fsdp.integrations.torchtitan.parallelize), and no seed checkpoint",
            )
        te_fsdp.materialize(self)


def parallelize(
    model: TeModel,
    *,
    parallel_dims: Any,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str = "",
    **sharding: Any,
) -> nn.Module:
    """Shard a model with the options of the trainer (``parallelize_fn`` of a ``ModelSpec``).

    Collective over the world. The trainer's ``mixed_precision_param`` and ``mixed_precision_reduce`` become FSDP2's
    policy. ``fsdp_reshard_after_forward`` is applied. Degrees of parallelism are those of ``model.meshes``.
    ``sharding`` contains further keywords of ``fully_shard``: ``units``, ``strategy``, ``experts``. Returns ``model``.

    Raises:
        PlacementError: An option has no effect or is not supported. The error names a replacement.
    """
    unsupported = {
        "parallelism.pipeline_parallel_degree": (parallelism.pipeline_parallel_degree > 1, "1"),
        "parallelism.expert_parallel_degree": (parallelism.expert_parallel_degree > 1, "1"),
        "parallelism.spmd_backend": (parallelism.spmd_backend != "partial_dtensor", "partial_dtensor"),
        "parallelism.enable_fsdp_symm_mem": (parallelism.enable_fsdp_symm_mem, "False"),
        "training.enable_cpu_offload": (training.enable_cpu_offload, "False"),
        "training.disable_cuda_graphs": (not training.disable_cuda_graphs, "True, and te_fsdp.graphed_step"),
        "compile.enable": (
            compile_config.enable and "model" in compile_config.components,
            'components=["loss"]',
        ),
        "activation_checkpoint": (ac_config is not None, "None, and te.checkpoint in the model"),
    }
    if refused := {name: instead for name, (is_set, instead) in unsupported.items() if is_set}:
        raise PlacementError(
            f"parallelize: {', '.join(refused)}",
            why="torchtitan's own code for it does not support TransformerEngine's modules",
            fix="; ".join(f"{name}={instead}" for name, instead in refused.items()),
        )
    if not {"strategy", "precision"} & sharding.keys():
        # Without pipeline parallelism, "default" means "always".
        sharding["reshard_after_forward"] = parallelism.fsdp_reshard_after_forward != "never"
    if "precision" not in sharding:
        dtypes = training.mixed_precision_param, training.mixed_precision_reduce
        sharding["mp_policy"] = MixedPrecisionPolicy(*(getattr(torch, name) for name in dtypes))
    return te_fsdp.fully_shard(model, model.meshes, average_gradients=False, **sharding)


def keep_main_weights(optimizers: Any, model_parts: list[nn.Module], parallel_dims: Any) -> None:
    """Add main weights with :func:`te_fsdp.main_weights` (``post_optimizer_build_fn`` of every ``ModelSpec``).

    Local operation.
    """
    # torchtitan's container of optimizers is itself an optimizer over the same parameters. Its groups are
    # emptied so that its step is not mistaken for theirs: te_fsdp runs around every optimizer step, so the
    # parameters would count twice.
    for optimizer in optimizers:
        te_fsdp.main_weights(model_parts[0], optimizer)
    optimizers.param_groups.clear()


class CheckpointManager(_Manager):
    """torchtitan's checkpoint manager on :mod:`te_fsdp.checkpoint`: one directory ``step-N`` per checkpoint.

    Checkpoints load on any mesh. The trainer creates the manager with one model and one optimizer. The data loader's
    state is saved per rank and loaded on meshes of the same size only. ``sd_adapter`` is unused because
    ``te_fsdp.checkpoint.save_huggingface`` infers the layout from the model.

    Raises:
        CheckpointError: An option has no effect, or there are several models or optimizers.
        OrderError: :func:`keep_main_weights` was not called on the optimizers.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Manager.Config):
        """torchtitan's configuration. Optimizers are always saved and loaded.

        ``asynchronous`` is te_fsdp's option.
        """

        initial_load_model_only: bool = False
        last_save_model_only: bool = False
        asynchronous: bool = False

    #: Options without effect, which must keep their defaults.
    _UNUSED = (
        "initial_load_in_hf",
        "last_save_in_hf",
        "export_dtype",
        "exclude_from_loading",
        "create_seed_checkpoint",
    )

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any = None,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Any = None
        # A disabled manager still has the attributes that the trainer reads.
        if not self.enable:
            return
        # Do not create a default configuration: this may log warnings.
        defaults = {
            f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)
        }
        refused = [name for name in self._UNUSED if getattr(config, name) != defaults[name]]
        if refused or len(model_parts) != 1 or len(list(optimizers)) != 1:
            raise CheckpointError(
                f"CheckpointManager: {', '.join(refused) or 'several models or optimizers'}",
                expected="one model, one optimizer, and checkpoints of te_fsdp",
                fix="te_fsdp.checkpoint.load_huggingface and save_huggingface; load(..., allow=[...])",
            )
        if optimizers.param_groups:
            raise OrderError(
                "CheckpointManager before keep_main_weights",
                why="The container of optimizers would count as a further optimizer",
                fix="ModelSpec(post_optimizer_build_fn=te_fsdp.integrations.torchtitan.keep_main_weights)",
            )
        self.config, self.folder = config, Path(base_folder, config.folder)
        self.model, (self.optimizer,) = model_parts[0], list(optimizers)
        self.dataloader, self.others = dataloader, {**states, "lr_scheduler": lr_schedulers}

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        is_due = curr_step % config.interval == 0 or last_step
        is_due |= config.enable_first_step_checkpoint and curr_step == 1
        if config.load_only or not is_due:
            return False
        model_only = last_step and config.last_save_model_only
        extra: dict[str, Any] = {name: other.state_dict() for name, other in self.others.items()}
        if hasattr(self.dataloader, "state_dict"):
            # Each data-parallel rank is at a different position in the data.
            # torchtitan stores bytes (a pickle) in the state.
            state = self.dataloader.state_dict()
            extra["dataloader"] = checkpoint.PerRank(
                {n: _BYTES + value.hex() if isinstance(value, bytes) else value for n, value in state.items()}
            )
        self.save_future = checkpoint.save(
            self.folder / f"step-{curr_step}",
            self.model,
            None if model_only else self.optimizer,
            extra={} if model_only else extra,
            # The program ends after the last step, so nothing is gained by not waiting.
            asynchronous=config.asynchronous and not last_step,
            keep_last=config.keep_latest_k or None,
        )
        return True

    def _load(self, step: int = -1) -> bool:
        path = checkpoint.latest(self.folder) if step == -1 else self.folder / f"step-{step}"
        if path is None:
            if not self.config.initial_load_path:
                return False
            path = Path(self.config.initial_load_path)
            # A new run begins with a new optimizer and the first batch.
            if self.config.initial_load_model_only:
                checkpoint.load(path, self.model)
                return True
        loaded = checkpoint.load(path, self.model, self.optimizer)
        for name, other in self.others.items():
            other.load_state_dict(loaded[name])
        if loaded.get("dataloader") is not None:
            state = loaded["dataloader"]
            marked = {
                name for name, value in state.items() if isinstance(value, str) and value.startswith(_BYTES)
            }
            self.dataloader.load_state_dict(
                {n: bytes.fromhex(v.removeprefix(_BYTES)) if n in marked else v for n, v in state.items()}
            )
        return True

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing. An asynchronous save has copied its data when it returns."""

    def _close(self) -> None:
        if self.save_future is not None:
            # Cleared first, so that an error is raised once only.
            future, self.save_future = self.save_future, None
            future.result()

    _wait_for_saving = _close


_BYTES = "bytes: "
