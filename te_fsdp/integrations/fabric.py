"""Lightning Fabric on te_fsdp.

    strategy = TeFsdpStrategy(tp=2)
    fabric = Fabric(devices=8, strategy=strategy)
    fabric.launch()                                                                 # processes and meshes
    model = fabric.setup_module(build_model(**strategy.meshes.te_kwargs()))         # sharded, initialized
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

Features of Fabric that te_fsdp cannot support raise. Source: lightning-fabric 2.6.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.checkpoint.storage import absolute
from te_fsdp.collectives.agreement import from_rank_0
from te_fsdp.errors import CheckpointError, OrderError, PlacementError, PrecisionError, shorten
from te_fsdp.integrations import check_keywords, needs, raising_method, shard
from te_fsdp.mesh import Meshes
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.upstream import te as _te

__all__ = ["TeFsdpStrategy"]


def _fabric(part: str) -> Any:
    """Import a module of Fabric from ``lightning`` or ``lightning_fabric``."""
    # The two packages have separate classes.
    names = ("lightning.fabric", "lightning_fabric")
    loaded = [name for name in names if name in sys.modules]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    return importlib.import_module(f"{(loaded or installed or names)[0]}.{part}")


with needs("fabric"):
    _ModelParallelStrategy: Any = _fabric("strategies").ModelParallelStrategy


class _AccumulateLocally:
    """Fabric's interface for ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context that accumulates unreduced gradients, or marks the last backward if not ``enabled``."""
        return te_fsdp.no_sync(module) if enabled else te_fsdp.microbatch(module, is_last=True)


class TeFsdpStrategy(_ModelParallelStrategy):
    """Fabric's strategy for models with TransformerEngine modules.

    ``setup_module`` shards a model with :func:`te_fsdp.fully_shard` and initializes its meta tensors. Build the
    optimizer afterwards and pass it to ``setup_optimizers``. Before or after that, call
    :func:`te_fsdp.main_weights` (on ``model.module``) or :func:`te_fsdp.shard_optimizer` if needed.
    ``no_backward_sync`` accumulates unreduced gradients. ``clip_gradients`` computes the norm over all ranks.
    ``save`` and ``load`` use :mod:`te_fsdp.checkpoint`. They accept one model, at most one optimizer, and plain
    values or objects with a state dict.

    Args:
        dp_replicate, dp_shard, cp, ep, tp: As for :meth:`te_fsdp.Meshes.build`.
        seed: Seed of :func:`te_fsdp.materialize`. ``None``: the current generator, identical on all ranks after
            ``seed_everything``.
        process_group_backend: As for Fabric's own strategies.
        timeout: Timeout of the process group.
        **sharding: Keywords of :func:`te_fsdp.fully_shard`: ``units``, ``strategy``, ``precision``, ...

    Attributes:
        meshes: Meshes of the job, available after ``fabric.launch()``.

    Raises:
        TypeError: ``fully_shard`` does not have the keyword.
    """

    def __init__(
        self,
        *,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        ep: int = 1,
        tp: int = 1,
        seed: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **sharding: Any,
    ) -> None:
        check_keywords(sharding)
        more = {} if timeout is None else {"timeout": timeout}
        super().__init__(self._shard, process_group_backend=process_group_backend, **more)
        self._axes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "ep": ep, "tp": tp}
        self._seed, self._sharding = seed, sharding
        self._models: list[nn.Module] = []
        self._on_meta = False
        # Fabric.no_backward_sync() uses this attribute.
        self._backward_sync_control = _AccumulateLocally()

    # ------------------------------------------------------------------------------------------------------- set up

    def setup_environment(self) -> None:
        """Initialize the process group and build the meshes. Collective over the world.

        Raises:
            PrecisionError: Fabric's precision conflicts with TransformerEngine's modules.
        """
        plugins = _fabric("plugins.precision")
        is_plain = type(self.precision) is plugins.Precision or isinstance(
            self.precision, (plugins.HalfPrecision, plugins.TransformerEnginePrecision)
        )
        if not is_plain:
            raise PrecisionError(
                f"Fabric(precision={getattr(self.precision, 'precision', self.precision)!r})",
                expected="32-true, bf16-true, 16-true or TransformerEnginePrecision(...)",
                got=type(self.precision).__name__,
                why="Fabric's autocast and loss scaling do not support weights that FSDP2 casts and shards",
                fix="TeFsdpStrategy(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), with the policy class "
                "of FSDP2",
            )
        # As in ModelParallelStrategy, but without its mesh.
        super(_ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self.meshes = Meshes.build(**self._axes, device_type=self.root_device.type)
        # ``device_mesh`` of Fabric's strategy returns it.
        self._device_mesh = self.meshes.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Return the arguments of a DistributedSampler. Ranks of one ``tp`` or ``cp`` group get the same data."""
        return {"num_replicas": self.meshes.data_size, "rank": self.meshes.data_rank}

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return Fabric's context. ``empty_init`` does not affect TransformerEngine's modules."""
        # They set their own device.
        self._on_meta = bool(empty_init)
        return super().module_init_context(empty_init)

    def _shard(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Shard a module (parallelize function of ``setup_module``)."""
        owners = [(name, inner) for name, inner in module.named_modules() if _te.kind_of(inner)]
        built = [n for n, inner in owners if not all(p.is_meta for p in inner.parameters(recurse=False))]
        if self._on_meta and built:
            raise OrderError(
                "Fabric.init_module(empty_init=True)",
                expected="modules on the meta device",
                got=f"{shorten(built)} on the device",
                why="TransformerEngine's modules take their device as an argument",
                fix='pass device="meta" to the modules',
            )
        # The next module may be built without this context.
        self._on_meta = False
        shard(module, self.meshes, self._seed, self._sharding)
        self._models.append(module)
        return module

    setup_module_and_optimizers = raising_method(
        OrderError,
        "Fabric.setup(model, optimizer)",
        expected="an optimizer over the sharded parameters",
        got="an optimizer over the original parameters",
        why="Sharding replaces the parameters of the model",
        fix="model = fabric.setup_module(model), then optimizer = fabric.setup_optimizers(...) over "
        "model.parameters()",
    )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check that the optimizer has parameters of models that were set up; raise OrderError otherwise."""
        if not self._models:
            raise OrderError(
                f"Fabric.setup_optimizers({type(optimizer).__name__}) before setup_module",
                fix="set up the model first, and build the optimizer from its parameters",
            )
        te_fsdp.check_optimizer(nn.ModuleList(self._models), optimizer)
        return optimizer

    # --------------------------------------------------------------------------------------------------------- train

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip gradients of the optimizer's parameters. Collective as :func:`te_fsdp.clip_grad_norm_`."""
        parameters = self.precision.main_params(optimizer)
        return te_fsdp.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    clip_gradients_value = raising_method(
        PlacementError,
        "Fabric.clip_gradients(clip_val=...)",
        why="Gradients may not be averaged over dp_replicate yet",
        fix="clip_gradients(model, optimizer, max_norm=...)",
    )

    # --------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Any] | None = None,
    ) -> None:
        """Save with :func:`te_fsdp.checkpoint.save` into the directory ``path`` of rank 0. Collective over the world.

        ``state`` contains one model and at most one optimizer. For other objects their state dict is saved, or
        the object itself if it has none, from rank 0. The other arguments raise.

        Raises:
            CheckpointError: Another argument was given, or ``save`` raises.
        """
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise CheckpointError(
                    f"Fabric.save({name}=...)",
                    why="te_fsdp writes complete checkpoints into a directory",
                    fix="omit it; a load may skip parts of the checkpoint",
                )
        # te_fsdp stores model and optimizer by shard, and other objects once, from rank 0.
        model, optimizer, others = _sorted(state)
        extra = {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in others.items()}
        # A script may make a different path on each rank, for example from the time.
        checkpoint.save(self.broadcast(path), model, optimizer, extra=extra)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load with :func:`te_fsdp.checkpoint.load` from rank 0's ``path``, on any mesh. Collective over the world.

        ``state`` has the saved keys, or some of them including the model. It may be the model itself
        (``Fabric.load_raw``). With ``strict`` all keys must be in the checkpoint. ``weights_only=True`` has no
        effect because te_fsdp's checkpoints contain no pickled objects. ``weights_only=False`` raises.

        Returns:
            Saved values that are not in ``state``.

        Raises:
            CheckpointError: An argument is wrong, or ``load`` raises. Nothing was changed.
        """
        if weights_only is False:
            raise CheckpointError(
                "Fabric.load(weights_only=False)",
                why="te_fsdp's checkpoints contain no pickled objects",
                fix="omit it",
            )
        path = absolute(self.broadcast(path))
        if isinstance(state, nn.Module):
            checkpoint.load(path, state, strict=strict)
            return {}
        model, optimizer, others = _sorted(state if isinstance(state, dict) else {})
        if strict and others:
            # Before anything is loaded: a missing key must not leave a half-loaded state.
            saved = from_rank_0(lambda: set(open_checkpoint(path).extra))
            if missing := sorted(others.keys() - saved):
                raise CheckpointError(
                    f"Fabric.load: {path} lacks {shorten(missing)}",
                    expected=f"{shorten(sorted(others))} in addition to the model",
                    got=shorten(sorted(saved)) or "nothing",
                    fix="remove them from the state, or pass strict=False",
                )
        loaded = dict(checkpoint.load(path, model, optimizer, strict=strict))
        for name in others.keys() & loaded.keys():
            if hasattr(others[name], "load_state_dict"):
                others[name].load_state_dict(loaded.pop(name))
            else:
                state[name] = loaded.pop(name)
        return loaded


def _sorted(state: dict[str, Any]) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    """Split a state to save or load into the model, the optimizer and the rest."""
    models = [n for n, v in state.items() if isinstance(v, nn.Module) and get_sharded_model(v)]
    optimizers = [name for name, value in state.items() if isinstance(value, Optimizer)]
    # A checkpoint is of one model, whose parameters the optimizer's state refers to by name.
    if len(models) != 1 or len(optimizers) > 1:
        raise CheckpointError(
            "Fabric.save or load",
            expected="a state with one model from setup_module, and at most one optimizer",
            got=f"{len(models)} models and {len(optimizers)} optimizers among {shorten(list(state)) or 'nothing'}",
            fix="use one checkpoint per model, and parameter groups of one optimizer instead of several optimizers",
        )
    others = {name: value for name, value in state.items() if name not in (*models, *optimizers)}
    return state[models[0]], state[optimizers[0]] if optimizers else None, others
