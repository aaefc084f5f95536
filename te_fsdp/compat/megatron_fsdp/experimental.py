"""Megatron-FSDP's second interface (``megatron_fsdp.experimental`` of 0.6.1).

    fully_shard(layer, mesh, placements)           for each unit, inner ones first, and for the model at the end
    optimizer = AdamW(model.parameters())
    fully_shard_optimizer(optimizer)               shards the model here and updates the optimizer's parameters
    with microbatch(model, is_last): ...

In Megatron-FSDP every call shards its module. te_fsdp shards a model in one call, and cannot identify the last
``fully_shard``. So ``fully_shard`` only records its arguments. A forward before ``fully_shard_optimizer``
raises. Supported placements:

    parameter   gradient   optimizer    sharding axis           outer axis
    Replicate   Partial    Replicate    no_shard                no_shard (HSDP)
    Replicate   Partial    Flat         optim                   optim (HFSDP)
    Replicate   Flat       Flat         optim_grads
    Flat        Flat       Flat         optim_grads_params
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from te_fsdp.compat.megatron_fsdp.arguments import (
    UNUSED_ARGUMENTS,
    FSDPDistributedIndex,
    MixedPrecisionPolicy,
)
from te_fsdp.compat.megatron_fsdp.sharding import BRIDGED, fully_shard_optimizer as prepare_optimizer
from te_fsdp.errors import OrderError, PlacementError, require_flags, require_kind
from te_fsdp.gradient_sync import microbatch as native_microbatch
from te_fsdp.layout import OUTER_STRATEGIES
from te_fsdp.materialization import materialize
from te_fsdp.shard_model import fully_shard as native_fully_shard
from te_fsdp.sharded_model import get_sharded_model

__all__ = [
    "Flat",
    "Partial",
    "Placement",
    "Placements",
    "Replicate",
    "fully_shard",
    "fully_shard_optimizer",
    "microbatch",
]

_log = logging.getLogger("te_fsdp")


@dataclass(frozen=True)
class Placement:
    """Placement of a tensor along one axis."""


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank has the full tensor."""


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank has a term of the sum."""

    reduce_op: Any = dist.ReduceOp.SUM


@dataclass(frozen=True)
class Flat(Placement):
    """Every rank has some rows of the tensor."""


@dataclass(frozen=True)
class Placements:
    """Placements of parameters, gradients and optimizer state along each axis.

    Attributes:
        dp_axes: All axes of the mesh by name or number, in order: the sharding axis, optionally after an outer axis.
        parameter: Placement of weights on each axis.
        gradient: Placement of gradients between microbatches.
        optimizer: Placement of main weights and optimizer state.

    Raises:
        PlacementError: The number of placements differs from the number of axes.
    """

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        for name in ("parameter", "gradient", "optimizer"):
            placements = getattr(self, name)
            if len(placements) != len(self.dp_axes):
                raise PlacementError(
                    f"Placements: {name}",
                    expected=f"{len(self.dp_axes)} placements, one per axis of {list(self.dp_axes)}",
                    got=len(placements),
                    fix="pass one placement per data-parallel axis",
                )


_INNER: Mapping[tuple[type, type, type], str] = {
    (Replicate, Partial, Replicate): "no_shard",
    (Replicate, Partial, Flat): "optim",
    (Replicate, Flat, Flat): "optim_grads",
    (Flat, Flat, Flat): "optim_grads_params",
}
_OUTER = {kinds: name for kinds, name in _INNER.items() if name in OUTER_STRATEGIES}


@dataclass(eq=False)
class _Note:
    """Arguments of one call of :func:`fully_shard`, until the model is sharded."""

    module: nn.Module
    mesh: DeviceMesh
    strategy: str
    outer: str
    policy: MixedPrecisionPolicy
    guard: RemovableHandle


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    use_symm_mem: bool = False,
) -> None:
    """Record that a module is a unit or the model. :func:`fully_shard_optimizer` shards it. Local operation.

    Args:
        module: Module on the device, the CPU or the meta device.
        mesh: Mesh of all ranks: the sharding axis, optionally after an outer axis.
        placements: A row of the table above for each axis. Units may differ on the sharding axis.
        mixed_precision_policy: Policy, the same for all units; ``None``: fp32 main weights.
        use_symm_mem: Without effect.

    Raises:
        PlacementError: No strategy has these placements, or they do not name all axes of the mesh in order.
        OrderError: The module is recorded or already sharded.
    """
    require_flags("experimental.fully_shard", use_symm_mem=use_symm_mem)
    if use_symm_mem:
        _log.warning("megatron_fsdp: use_symm_mem=True has no effect: %s", UNUSED_ARGUMENTS["nccl_ub"])
    if BRIDGED in module.__dict__ or any(map(get_sharded_model, module.modules())):
        raise OrderError(
            f"experimental.fully_shard({type(module).__name__})",
            expected="one call per module, before fully_shard_optimizer",
            got="a module that was passed before, or that contains a sharded module",
            fix="call it once per module, inner modules first",
        )
    require_kind(
        "experimental.fully_shard",
        "placements",
        placements,
        Placements,
        expected="Placements(dp_axes, parameter, gradient, optimizer)",
        fix="Placements([0], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()]) for ZeRO-3 on one axis",
    )
    names = list(mesh.mesh_dim_names or range(mesh.ndim))
    axes = [names[axis] if isinstance(axis, int) else axis for axis in placements.dp_axes]
    rows = list(zip(placements.parameter, placements.gradient, placements.optimizer, strict=True))
    kinds = [tuple(type(p) for p in row) for row in rows]
    # A single axis is the sharding axis. The first of two axes is the outer one.
    tables = [_OUTER, _INNER][-len(kinds) :]
    if axes != names or len(kinds) > 2 or any(k not in t for k, t in zip(kinds, tables, strict=False)):
        raise PlacementError(
            "experimental.fully_shard: placements",
            expected=f"a strategy's (parameter, gradient, optimizer) for each axis of {names}: on the last axis "
            f"{', '.join(map(_format_types, _INNER))}; on the outer axis {', '.join(map(_format_types, _OUTER))}",
            got=", ".join(f"{axis}: {_format_types(row)}" for axis, row in zip(axes, kinds, strict=True)),
            fix="slice the mesh to its data-parallel axes; for other placements use te_fsdp.fully_shard",
        )
    strategy, outer = _INNER[kinds[-1]], "no_shard" if len(kinds) == 1 else _OUTER[kinds[0]]  # type: ignore[index]
    # Without sharding the model would run, but each rank would train separately.
    guard = module.register_forward_pre_hook(_raise_in_forward)
    note = _Note(module, mesh, strategy, outer, mixed_precision_policy or MixedPrecisionPolicy(), guard)
    module.__dict__[BRIDGED] = note
    for parameter in module.parameters():
        setattr(parameter, BRIDGED, note)  # the outermost module is the last to set it


def _format_types(kinds: tuple[type, ...]) -> str:
    return f"({', '.join(kind.__name__ for kind in kinds)})"


def _raise_in_forward(module: nn.Module, *unused: Any) -> NoReturn:
    raise OrderError(
        f"forward of {type(module).__name__} after experimental.fully_shard",
        expected="fully_shard_optimizer(optimizer) before the forward",
        got="none",
        why="fully_shard_optimizer shards the model with all its units",
        fix="build the optimizer from model.parameters() and call fully_shard_optimizer(optimizer)",
    )


def fully_shard_optimizer(optimizer: Optimizer, *, precision_aware: bool = False) -> None:
    """Shard the model of an optimizer and prepare the optimizer, in place. Collective over the world.

    The optimizer must not have stepped. Its parameters are those of modules passed to :func:`fully_shard`. Its groups
    keep their options. Call it once per optimizer if a model has several. ``precision_aware`` has no effect.

    Raises:
        OrderError: The optimizer has different parameters, or it has state.
        PlacementError: Units of one model differ in mesh, outer placements or policy.
    """
    require_flags("experimental.fully_shard_optimizer", precision_aware=precision_aware)
    if precision_aware:
        text = UNUSED_ARGUMENTS["use_decoupled_grad"]
        _log.warning("megatron_fsdp: precision_aware=True has no effect: %s", text)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    by_id = {id(note): note for p in params if isinstance(note := p.__dict__.get(BRIDGED), _Note)}.values()
    # With several optimizers the first call has sharded the model already.
    notes = [note for note in by_id if note.module.__dict__.get(BRIDGED) is note]  # not sharded yet
    if optimizer.state and (notes or any(isinstance(p.__dict__.get(BRIDGED), nn.Parameter) for p in params)):
        raise OrderError(
            f"fully_shard_optimizer({type(optimizer).__name__})",
            expected="an optimizer before its first step",
            got="state",
            why="Its parameters are replaced by sharded ones",
            fix="call fully_shard_optimizer right after building the optimizer",
        )
    # Sharding replaces parameters, so the old ones get a reference to the new ones for all optimizers.
    for note in notes:
        before = dict(note.module.named_parameters(remove_duplicate=False))
        _shard(note)
        for name, parameter in note.module.named_parameters(remove_duplicate=False):
            if parameter is not before[name]:
                before[name].__dict__[BRIDGED] = parameter
    for group in optimizer.param_groups:
        replaced = [p.__dict__.get(BRIDGED) for p in group["params"]]
        pairs = zip(group["params"], replaced, strict=True)
        group["params"][:] = [new if isinstance(new, nn.Parameter) else p for p, new in pairs]
    prepare_optimizer(optimizer)


def _shard(root: _Note) -> None:
    """Shard a model with its units. Collective over the world."""
    notes = {name: m.__dict__[BRIDGED] for name, m in root.module.named_modules() if BRIDGED in m.__dict__}
    for name, note in notes.items():
        if (note.mesh, note.outer, note.policy) != (root.mesh, root.outer, root.policy):
            raise PlacementError(
                f"experimental.fully_shard: {name}",
                expected="the mesh, outer placements and policy of the model",
                got="different ones",
                fix="use the same for all units of a model",
            )
    mesh = root.mesh
    if not mesh.mesh_dim_names:
        # The index finds axes by name.
        names = ("dp_replicate", "dp_shard")[-mesh.ndim :]
        mesh = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names)
    *outer, shard = mesh.mesh_dim_names or ()
    meshes = FSDPDistributedIndex(mesh, shard, outer[0] if outer else None).meshes
    on_meta = any(parameter.is_meta for parameter in root.module.parameters())
    if not on_meta:
        # Sharding needs the values on the device.
        root.module.to(meshes.device)
    strategies = {name: note.strategy for name, note in notes.items()}
    options = {"outer_strategy": root.outer, "precision": root.policy.native()}
    native_fully_shard(root.module, meshes, units=[], strategy=strategies, **options)  # type: ignore[arg-type]
    for note in notes.values():
        note.guard.remove()
        del note.module.__dict__[BRIDGED]
    if on_meta:
        materialize(root.module)


@contextlib.contextmanager
def microbatch(module: nn.Module, is_last: bool) -> Iterator[None]:
    """Return the context of one microbatch of all models in a module: :func:`te_fsdp.microbatch`."""
    states = filter(None, map(get_sharded_model, module.modules()))
    # a model wrapped by torch.compile occurs twice
    roots = list({id(state): state.model for state in states}.values())
    with contextlib.ExitStack() as stack:
        for root in roots or [module]:
            stack.enter_context(native_microbatch(root, is_last=is_last))
        yield
