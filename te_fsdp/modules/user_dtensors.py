"""Parameters that the user registered as DTensors over ``ep``, ``tp``, or both, before ``set_device_mesh``."""

# [Note: user's DTensors] Such a parameter stays a DTensor in forward, as with plain FSDP2: the user's code
# calls ``to_local()`` or DTensor operations. Its placements replace the table of :mod:`te_fsdp.layout`. FSDP2
# shards it over the remaining axes:
#
#     parameter sharded over ``ep``     FSDP2 shards over ``expert_fsdp``, in a unit without dense parameters
#     any other                         FSDP2 shards over ``fsdp``, in the unit around it

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from te_fsdp.collectives.groups import ranks_along
from te_fsdp.errors import OrderError, PlacementError
from te_fsdp.layout import ParameterRule, chunk_boxes, chunk_range
from te_fsdp.mesh_checks import mesh_of_experts
from te_fsdp.records import UserDTensor, inherit
from te_fsdp.upstream import torch_dtensor as _torch


def place_user_dtensor(
    label: str,
    parameter: DTensor,
    tp_mesh: DeviceMesh | None,
    ep_mesh: DeviceMesh | None,
    single: DeviceMesh | None = None,
) -> UserDTensor:
    """Return the placement of a user's DTensor on te_fsdp's meshes. Local operation.

    ``single`` is a mesh of this rank alone, for a parameter whose axes all have size 1.

    Raises:
        OrderError: The parameter is on a mesh axis other than ``ep`` and ``tp``.
        PlacementError: Its placements have no correct gradient or no correct position in a checkpoint.
    """
    by_axis = _by_axis(label, parameter, {"ep": ep_mesh, "tp": tp_mesh})
    _check_placements(label, parameter, by_axis, tp_mesh)
    placements: list[Placement] = [by_axis["ep"]] if "ep" in by_axis else []
    if tp_mesh is not None:
        placements.append(by_axis.get("tp", Replicate()))
    if ep_mesh is not None and "ep" in by_axis:
        mesh = mesh_of_experts(ep_mesh, tp_mesh, label)
    else:
        mesh = tp_mesh or single or parameter.device_mesh
    placements = placements or [Replicate()] * mesh.ndim
    tp_dim = _torch.shard_dim_of(by_axis["tp"]) if "tp" in by_axis else None
    user_dtensor = UserDTensor(mesh, tuple(placements), "ep" in by_axis, tp_dim)
    # The position of a local tensor's rows is known only if it is sharded as torch.chunk does.
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    dims = enumerate(map(_torch.shard_dim_of, placements))
    cuts = [(dim, mesh.size(axis), coordinate[axis]) for axis, dim in dims if dim is not None]
    expected, _ = chunk_boxes(parameter.shape, cuts)
    got = tuple(_torch.local_of(parameter).shape)
    if got != expected:
        raise PlacementError(
            f"{label}: local shape of a DTensor parameter",
            expected=f"{expected} of {tuple(parameter.shape)}, as torch.chunk shards it",
            got=got,
            why="The rows' positions in the unsharded tensor would be wrong",
            fix="DTensor.from_local(..., shape=, stride=) with the unsharded shape, or distribute_tensor",
        )
    return user_dtensor


def _by_axis(label: str, parameter: DTensor, meshes: Mapping[str, DeviceMesh | None]) -> dict[str, Placement]:
    """Return the placement on ``ep`` and on ``tp``, in the mesh's order, without axes of size 1."""
    mesh, placements = parameter.device_mesh, dict[str, Any]()
    for axis, placement in enumerate(parameter.placements):
        if mesh.size(axis) == 1:
            continue
        # The user may have named the axes of the mesh in any way, so an axis is recognised by its ranks.
        ranks = ranks_along(mesh, [axis])
        name = next(
            (n for n, m in meshes.items() if m is not None and m.mesh.flatten().tolist() == ranks), None
        )
        if name is None:
            raise OrderError(
                f"{label}: a parameter that is a DTensor already, on mesh axes {mesh.mesh_dim_names}",
                expected="a plain tensor, or a DTensor over ep, tp, or both",
                got=f"DTensor with placements {tuple(parameter.placements)} on {mesh}",
                why="FSDP2 shards over all other axes, and must be the first to do so",
                fix="call set_device_mesh before torch's fully_shard, with ep_mesh= for parameters over ep. Distribute "
                "the parameter over meshes.ep or meshes.tp alone, or register a plain tensor",
            )
        placements[name] = placement
    return placements


def _check_placements(
    label: str, parameter: DTensor, by_axis: Mapping[str, Placement], tp_mesh: DeviceMesh | None
) -> None:
    placements, is_marked = tuple(parameter.placements), bool(getattr(parameter, "sequence_parallel", False))
    problem = why = fix = ""
    if not all(type(placement) in (Shard, Replicate) for placement in by_axis.values()):
        problem = "a parameter that is neither sharded nor replicated"
        why = "Its shards have no defined position"
        fix = "Shard(dim) or Replicate() on each axis"
    elif "ep" in by_axis and by_axis["ep"].is_replicate():
        problem = "a parameter that is replicated over ep"
        why = "ep is part of data parallelism for such a parameter"
        fix = "register a plain tensor, or a DTensor over meshes.tp alone: FSDP2 then shards it over ep too"
    elif list(by_axis) == ["tp", "ep"] and by_axis["tp"] == by_axis["ep"]:
        problem = "a dim that tp shards before ep"
        why = "Parameters of experts are on (ep, tp), in this order"
        fix = "distribute it over (ep, tp)"
    elif tp_mesh is not None and is_marked and not by_axis.get("tp", Replicate()).is_shard():
        problem = "sequence_parallel=True on a DTensor"
        why = "te_fsdp does not change this DTensor's gradient"
        fix = "parameter.to_local(grad_placements=[Partial()]) in forward, without the mark"
    if problem:
        raise PlacementError(f"{label}: {problem}", got=f"placements {placements}", why=why, fix=fix)


def dim_to_shard(label: str, parameter: DTensor, placed: UserDTensor, ranks: int) -> int:
    """Return the first dim that FSDP2 can shard evenly over ``ranks`` on every rank, else 0. The same on all ranks.

    Raises PlacementError if some ranks have no elements of a trained parameter.
    """
    first = None
    for dim, length in enumerate(parameter.shape):
        lengths = {int(length)}
        for axis, placement in enumerate(placed.placements):
            if _torch.shard_dim_of(placement) == dim:
                size = placed.mesh.size(axis)
                # Uneven shards have different lengths, and all ranks must choose the same dim.
                ends = (chunk_range(n, size, index) for n in lengths for index in range(size))
                lengths = {high - low for low, high in ends}
        if length and 0 in lengths and parameter.requires_grad:
            raise PlacementError(
                f"{label}: a DTensor parameter without elements on some ranks",
                expected=f"dim {dim} with an index for each rank of the axes that shard it",
                got=f"shape {tuple(parameter.shape)}, placements {placed.placements} on {placed.mesh}",
                why="FSDP2 cannot reduce an empty gradient",
                fix="fewer ranks on the axis, or te_fsdp.fsdp_no_shard(parameter)",
            )
        if first is None and 0 not in lengths and all(n % ranks == 0 for n in lengths):
            first = dim
    return first or 0


def on_te_fsdp_mesh(parameter: DTensor, placed: UserDTensor) -> torch.nn.Parameter:
    """Return the parameter on te_fsdp's mesh, which shares its root with FSDP2's. Local operation."""
    if parameter.device_mesh == placed.mesh and tuple(parameter.placements) == placed.placements:
        return parameter  # type: ignore[bad-return]
    local = _torch.local_of(parameter).detach()
    template = _torch.placed(
        local, placed.mesh, placed.placements, torch.empty_like(parameter, device="meta")
    )
    new = _torch.with_local(local, template, requires_grad=parameter.requires_grad)
    inherit(parameter, new)
    return new


def is_as_bound(parameter: DTensor, rule: ParameterRule | None, tp_mesh: DeviceMesh | None) -> bool:
    """Return whether TE's parameter already has the placement that ``set_device_mesh`` sets."""
    if rule is None or tp_mesh is None or rule.layout.is_stacked or rule.layout.is_grouped:
        return False
    placement = Replicate() if rule.shard_dim is None else Shard(rule.shard_dim)
    # Meshes are compared by ranks, because the user may have built an equal one under different names.
    same_ranks = parameter.device_mesh.mesh.tolist() == tp_mesh.mesh.tolist()
    return same_ranks and tuple(parameter.placements) == (placement,)
