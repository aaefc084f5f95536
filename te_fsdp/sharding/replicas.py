"""What must be the same on several ranks before a model is cut: the model itself, and the values of replicas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fsdp import _torch
from te_fsdp.agree import are_equal, digest, maximum, raised_on_all_ranks
from te_fsdp.errors import InitError, MeshError
from te_fsdp.modules.rank_checks import checksum, find_equal_shards, on_device, refuse_equal_shards
from te_fsdp.parameters import places_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.layout.storage import ParameterPlan
    from te_fsdp.mesh import Meshes
    from te_fsdp.sharding.no_shard import Exempt
    from te_fsdp.sharding.sharding_plan import ModelPlan

__all__ = ["check_replicas", "check_same_model", "check_whole"]

# Characters of settings that a message shows.
_MOST = 1000


def check_same_model(plan: ModelPlan) -> None:
    """Raise on all ranks unless all have built the same model: names, tp-local shapes, dtypes, devices.

    Ranks with different models, or with other units, would wait for each other in collectives that never match. Of
    expert modules, the ranks that hold the same experts must have the same.

    Collective over the world: three max all-reduces of a few integers per axis.

    Args:
        plan: The model's, before it is bound.

    Raises:
        MeshError: The models or the settings differ.
    """
    model, meshes, settings = plan.model, plan.meshes, plan.settings()
    described: dict[bool, list[tuple[object, ...]]] = {False: [], True: []}
    for label, module, name, p in places_of(model):
        told = (label, tuple(_torch.local_of(p).shape), str(p.dtype), p.requires_grad, p.is_meta)
        described[plan.parameters[id(module), name].experts].append(told)
    dense, of_experts = digest(repr(described[False])), digest(repr(described[True]))
    same = are_equal([dense, digest(settings)], meshes.device_mesh, device=meshes.device)
    mesh = meshes.expert_mesh or meshes.device_mesh
    same_experts = are_equal([of_experts], mesh, device=meshes.device, leave_out=("ep",))
    differs = (~torch.cat([same, same_experts])).long()
    maximum(differs, meshes.device_mesh)  # what the ranks of one expert see, all must know
    models, others, experts_of_one = differs.tolist()
    if others and not (models or experts_of_one):
        raise MeshError(
            "fully_shard: the ranks of the mesh were given different arguments",
            expected="the same units, strategies and dtypes everywhere",
            got=f"here {settings[:_MOST]}",
            fix="call it with the same arguments on all ranks",
        )
    if models or experts_of_one:
        count = sum(map(len, described.values()))
        first = next((f"{told[0]} {told[1]}" for told in described[False]), None)
        raise MeshError(
            f"{type(model).__name__}: the ranks of the mesh hold different models",
            expected="the same names, shapes, dtypes and devices everywhere",
            got=f"here {count} parameters, the first {first}",
            fix="build the model from the same configuration on all ranks",
        )


def check_replicas(plan: ModelPlan) -> None:
    """Raise on all ranks unless parameters on the device are equal wherever they must be.

    Before FSDP2 cuts them, all data-parallel ranks hold the same tp-local tensors, and all tp ranks the same
    replicated parameters. FSDP2 takes each rank's part from that rank, so that differing initialisations
    would be mixed in silence. Experts are compared among the ranks that hold the same ones. Parts that ranks of tp, and
    experts that ranks of ep, hold of their own must not be equal.

    Collective over the world: max all-reduces of two integers per parameter and axis, small object gathers.

    Args:
        plan: The model's, before it is bound.

    Raises:
        InitError: Names the parameters that differ, or that do not.
    """
    meshes, experts = plan.meshes, any(row.experts for row in plan.parameters.values())
    held = _on_device(
        (place.label, place.parameter, plan.parameters[id(place.owner), place.name])
        for place in places_of(plan.model)
    )
    bad = _differing(held[False], meshes.device_mesh)
    with raised_on_all_ranks(meshes.device_mesh if experts else None, "fully_shard"):
        bad += _differing(held[True], meshes.expert_mesh or meshes.device_mesh)
        _check_none(bad, sum(map(len, held.values())))
    if (meshes.tp is not None or meshes.ep is not None) and on_device(plan.modules):
        with raised_on_all_ranks(meshes.device_mesh, "fully_shard"):
            refuse_equal_shards(find_equal_shards(plan.modules, meshes.tp, meshes.ep))


def check_whole(parameters: Iterable[Exempt], meshes: Meshes) -> None:
    """:func:`check_replicas` of parameters of a bound model that data parallelism does not cut.

    Args:
        parameters: Those on meta are left out.
        meshes: The job's meshes.
    """
    held = _on_device((item.plan.label, item.parameter, item.plan) for item in parameters)
    with raised_on_all_ranks(meshes.device_mesh, "materialize"):
        bad = _differing(held[False], meshes.device_mesh)
        bad += _differing(held[True], meshes.expert_mesh or meshes.device_mesh)
        _check_none(bad, sum(map(len, held.values())))


def _on_device(
    parameters: Iterable[tuple[str, torch.Tensor, ParameterPlan]],
) -> dict[bool, list[_Held]]:
    """What has values by now, of experts (``True``) and of others."""
    held: dict[bool, list[_Held]] = {False: [], True: []}
    for label, parameter, plan in parameters:
        local = _torch.local_of(parameter)
        if not local.is_meta:
            whole = plan.rule is None or plan.rule.shard_dim is None
            held[plan.experts].append(_Held(label, checksum(local), whole))
    return held


def _check_none(bad: list[str], count: int) -> None:
    if bad:
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise InitError(
            f"{', '.join(bad[:5])}{more}: values differ between ranks that must hold the same",
            expected="equal parameters on all data-parallel ranks, and equal replicated ones on all tp ranks",
            got=f"{len(bad)} of {count} parameters differ",
            why="FSDP2 would cut each shard from another initialisation",
            fix="seed all ranks alike before building the model, or build it on meta and call te_fsdp.materialize",
        )


@dataclass(frozen=True)
class _Held:
    """A parameter before it is cut: its label, a checksum of the tp-local value, whether tp replicates it."""

    label: str
    checksum: torch.Tensor
    whole: bool


def _differing(held: list[_Held], mesh: DeviceMesh) -> list[str]:
    """Labels of parameters that differ over the data-parallel axes of ``mesh``, or over tp though tp replicates them.

    Collective over ``mesh`` without ``ep``, of which all ranks find the same.
    """
    if not held:
        return []
    mine = torch.stack([item.checksum for item in held])
    extremes = torch.stack([mine, -mine])
    maximum(extremes, mesh, leave_out=("ep", "tp"))
    differs = extremes[0] != -extremes[1]
    if "tp" in (mesh.mesh_dim_names or ()):
        replicated = torch.tensor([item.whole for item in held], device=mine.device)
        maximum(extremes, mesh["tp"])
        differs |= replicated & (extremes[0] != -extremes[1])
        # A difference seen by one tp rank alone must reach the others: all raise, or none.
        seen = differs.to(torch.int64)
        maximum(seen, mesh["tp"])
        differs = seen.bool()
    return [item.label for item, flag in zip(held, differs.tolist(), strict=True) if flag]
