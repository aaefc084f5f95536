"""Lightning Fabric on te_fsdp: a strategy that shards, clips, accumulates, saves and loads as te_fsdp does.

    strategy = TeFsdpStrategy(tp=2)
    fabric = Fabric(devices=8, strategy=strategy)
    fabric.launch()                                                                 # processes and meshes
    model = fabric.setup_module(build_model(**strategy.meshes.te_kwargs()))         # sharded, initialised
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

What Fabric offers and te_fsdp cannot do right raises. Source: lightning-fabric 2.6.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import te_fsdp
from te_fsdp import checkpoint
from te_fsdp.checkpoint.directory import open_checkpoint
from te_fsdp.collectives.agreement import from_rank_0
from te_fsdp.errors import CheckpointError, OrderError, PlacementError, PrecisionError, shorten
from te_fsdp.integrations import check_keywords, needs, refused, shard
from te_fsdp.mesh import Meshes
from te_fsdp.sharded_model import get_sharded_model
from te_fsdp.upstream import te as _te

__all__ = ["TeFsdpStrategy"]


def _fabric(part: str) -> Any:
    """A module of Fabric: of ``lightning`` or of ``lightning_fabric``, whose classes do not know each other."""
    names = ("lightning.fabric", "lightning_fabric")
    loaded = [name for name in names if name in sys.modules]
    installed = [name for name in names if importlib.util.find_spec(name.partition(".")[0])]
    return importlib.import_module(f"{(loaded or installed or names)[0]}.{part}")


with needs("fabric"):
    _ModelParallelStrategy: Any = _fabric("strategies").ModelParallelStrategy


class _AccumulateLocally:
    """What Fabric asks for ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """``enabled``: gradients add up on each rank; else the backward is the last one of its step, which helps."""
        return te_fsdp.no_sync(module) if enabled else te_fsdp.microbatch(module, is_last=True)


class TeFsdpStrategy(_ModelParallelStrategy):
    """Fabric's strategy for models of TransformerEngine's modules.

    ``setup_module`` shards a model with :func:`te_fsdp.fully_shard` and initialises what is on meta. Build the
    optimizer afterwards and give it to ``setup_optimizers``; before or after that call :func:`te_fsdp.main_weights`
    (on ``model.module``) or :func:`te_fsdp.shard_optimizer` where they are needed. ``no_backward_sync`` lets gradients
    add up on each rank, ``clip_gradients`` takes the norm over all ranks, ``save`` and ``load`` are those of
    :mod:`te_fsdp.checkpoint`: one model, at most one optimizer, and plain values or objects with a state dict.

    Args:
        dp_replicate, dp_shard, cp, ep, tp: As for :meth:`te_fsdp.Meshes.build`.
        seed: Of :func:`te_fsdp.materialize`. ``None``: the current generator, the same on all ranks after
            ``seed_everything``.
        process_group_backend: As for Fabric's own strategies.
        timeout: Of the process group.
        **sharding: Keywords of :func:`te_fsdp.fully_shard`: ``units``, ``strategy``, ``precision``, ...

    Attributes:
        meshes: The job's, once ``fabric.launch()`` has been called.

    Raises:
        TypeError: A keyword that ``fully_shard`` does not have.
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
        self._backward_sync_control = _AccumulateLocally()

    # ------------------------------------------------------------------------------------------------------- set up

    def setup_environment(self) -> None:
        """Start the process group and build the meshes. Collective over the world.

        Raises:
            PrecisionError: A precision of Fabric's that works otherwise than TransformerEngine's modules do.
        """
        plugins = _fabric("plugins.precision")
        known = type(self.precision) is plugins.Precision or isinstance(
            self.precision, (plugins.HalfPrecision, plugins.TransformerEnginePrecision)
        )
        if not known:
            raise PrecisionError(
                f"Fabric(precision={getattr(self.precision, 'precision', self.precision)!r})",
                expected="32-true, bf16-true, 16-true or TransformerEnginePrecision(...)",
                got=type(self.precision).__name__,
                why="Its autocast, and its loss scaling, would meet weights that FSDP2 casts and shards",
                fix="TeFsdpStrategy(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), FSDP2's",
            )
        # As ModelParallelStrategy does, but for its mesh.
        super(_ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        self.meshes = Meshes.build(**self._axes, device_type=self.root_device.type)
        self._device_mesh = self.meshes.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data is this rank's; ranks of one ``tp`` or ``cp`` group get the same."""
        return {"num_replicas": self.meshes.data_size, "rank": self.meshes.data_rank}

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """As Fabric's. TransformerEngine's modules have a device of their own, which ``empty_init`` does not reach."""
        self._on_meta = bool(empty_init)
        return super().module_init_context(empty_init)

    def _shard(self, module: nn.Module, mesh: Any) -> nn.Module:
        """The parallelize function of ``setup_module``."""
        owners = [(name, inner) for name, inner in module.named_modules() if _te.kind_of(inner)]
        built = [
            name for name, inner in owners if not all(p.is_meta for p in inner.parameters(recurse=False))
        ]
        if self._on_meta and built:
            raise OrderError(
                "Fabric.init_module(empty_init=True)",
                expected="modules on meta",
                got=f"{shorten(built)} on the device",
                why="TransformerEngine's modules take their device as an argument",
                fix='give them device="meta"',
            )
        self._on_meta = False
        shard(module, self.meshes, self._seed, self._sharding)
        self._models.append(module)
        return module

    setup_module_and_optimizers = refused(
        OrderError,
        "Fabric.setup(model, optimizer)",
        expected="an optimizer over the sharded model",
        got="one from before",
        why="Sharding puts new parameters into the model",
        fix="model = fabric.setup_module(model), then optimizer = fabric.setup_optimizers(...) over "
        "model.parameters()",
    )

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise ``OrderError`` unless the optimizer holds parameters of the models that were set up."""
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
        """:func:`te_fsdp.clip_grad_norm_` over the optimizer's parameters. Collective."""
        parameters = self.precision.main_params(optimizer)
        return te_fsdp.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    clip_gradients_value = refused(
        PlacementError,
        "Fabric.clip_gradients(clip_val=...)",
        why="A gradient may still wait for its average over dp_replicate",
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
        """:func:`te_fsdp.checkpoint.save`, a directory per checkpoint: rank 0's ``path``. Collective over the world.

        ``state`` has one model, at most one optimizer; of other objects with a state dict that is saved, of others
        themselves, rank 0's. The other arguments are refused.

        Raises:
            CheckpointError: Something else, or what ``save`` raises.
        """
        for name, value in (("storage_options", storage_options), ("filter", filter)):
            if value is not None:
                raise CheckpointError(
                    f"Fabric.save({name}=...)",
                    why="te_fsdp writes whole checkpoints into a directory",
                    fix="save without it; a load may leave parts out",
                )
        model, optimizer, others = _sorted(state)
        extra = {name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in others.items()}
        checkpoint.save(self.broadcast(path), model, optimizer, extra=extra)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """:func:`te_fsdp.checkpoint.load`, from any mesh, of rank 0's ``path``. Collective over the world.

        ``state`` is as saved, or a part of it with the model in it; or the model alone (``Fabric.load_raw``). With
        ``strict`` all of it must be in the checkpoint. ``weights_only=True`` changes nothing: no checkpoint of te_fsdp
        runs code. False is refused.

        Returns:
            What was saved and is not in ``state``.

        Raises:
            CheckpointError: Something else, or what ``load`` raises; nothing was changed then.
        """
        if weights_only is False:
            raise CheckpointError(
                "Fabric.load(weights_only=False)",
                why="te_fsdp's checkpoints hold no pickled objects",
                fix="leave it out",
            )
        path = Path(self.broadcast(path))
        if isinstance(state, nn.Module):
            checkpoint.load(path, state, strict=strict)
            return {}
        model, optimizer, others = _sorted(state if isinstance(state, dict) else {})
        if strict and others:
            saved = from_rank_0(lambda: set(open_checkpoint(path).extra))
            if missing := sorted(others.keys() - saved):
                raise CheckpointError(
                    f"Fabric.load: {path} lacks {shorten(missing)}",
                    expected=f"{shorten(sorted(others))} beside the model",
                    got=shorten(sorted(saved)) or "nothing",
                    fix="leave them out of the state, or strict=False",
                )
        loaded = dict(checkpoint.load(path, model, optimizer, strict=strict))
        for name in others.keys() & loaded.keys():
            if hasattr(others[name], "load_state_dict"):
                others[name].load_state_dict(loaded.pop(name))
            else:
                state[name] = loaded.pop(name)
        return loaded


def _sorted(state: dict[str, Any]) -> tuple[nn.Module, Optimizer | None, dict[str, Any]]:
    """The one sharded model, the optimizer and the rest of what is saved or loaded."""
    models = [
        name for name, value in state.items() if isinstance(value, nn.Module) and get_sharded_model(value)
    ]
    optimizers = [name for name, value in state.items() if isinstance(value, Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise CheckpointError(
            "Fabric.save or load",
            expected="a state with one model from setup_module, and at most one optimizer",
            got=f"{len(models)} models and {len(optimizers)} optimizers among {shorten(list(state)) or 'nothing'}",
            fix="a checkpoint for each model; parameter groups of one optimizer instead of several optimizers",
        )
    others = {name: value for name, value in state.items() if name not in (*models, *optimizers)}
    return state[models[0]], state[optimizers[0]] if optimizers else None, others
