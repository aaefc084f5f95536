"""Validation of the named mesh axes of a job."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from te_fsdp.collectives.agreement import digest, gather
from te_fsdp.collectives.rendezvous import is_simulated
from te_fsdp.collectives.watching import run_while_all_live
from te_fsdp.errors import MeshError, require_kind, suggest
from te_fsdp.upstream import torch_dtensor as _torch

#: The axes that shard or replicate dense parameters, in mesh order.
AXES = ("dp_replicate", "dp_shard", "tp")

#: The data, context, expert and tensor axes of a job, in mesh order.
ALL_AXES = ("dp_replicate", "dp_shard", "cp", "ep", "tp")

#: The axis along which ranks have different weights of one model: the pipeline stages.
STAGES = "pp"
#: Names that other libraries use for the pipeline axis.
_STAGES = ("pp", "pipe", "pipeline", "pipelineparallel", "stage", "stages")
# Upper bound on the lists of stages that an error shows: more do not help to find the mistake.
_KINDS = 256
#: Axis names of other libraries, normalized as :func:`te_fsdp.errors.suggest` compares them.
_OTHER_LIBRARIES = {
    **dict.fromkeys(("dp", "data", "dataparallel", "fsdp", "shard", "dpshardmod"), "dp_shard"),
    **dict.fromkeys(("replicate", "replica", "ddp", "hsdp", "dpouter", "outer"), "dp_replicate"),
    **dict.fromkeys(("tensor", "tensorparallel", "mp", "model", "modelparallel"), "tp"),
    **dict.fromkeys(("context", "contextparallel", "sequence", "sequenceparallel", "sp"), "cp"),
    **dict.fromkeys(("expert", "experts", "expertparallel"), "ep"),
}


def internal_axis_names(mesh: DeviceMesh, names: Mapping[str, str | None] | None) -> list[str | None]:
    """Return te_fsdp's name for each axis of a mesh; ``None`` for an axis of unrelated models or of size 1.

    ``names`` maps the mesh's own names to those in :data:`ALL_AXES`, to :data:`STAGES`, or to ``None``. Unmapped names
    are kept. Raises ``MeshError`` for a name that is unknown on either side, a duplicate name, or an axis without a
    known meaning.
    """
    where, axis_names = "Meshes.from_device_mesh", tuple(mesh.mesh_dim_names or ())
    require_kind(
        where,
        "names",
        {} if names is None else names,
        Mapping,
        expected="a dict of axis names",
        error=MeshError,
    )
    by_name = dict(names or {})
    for name, target in by_name.items():
        if name not in axis_names:
            guess = suggest(name, axis_names)
            fix = f"{guess!r}, if you mean that axis" if guess else "name axes of this mesh"
            raise MeshError(f"{where}: names: axis {name!r}", expected=f"one of {axis_names}", fix=fix)
        if target is not None and target not in (STAGES, *ALL_AXES):
            guess = suggest(target, ALL_AXES, _OTHER_LIBRARIES)
            fix = f"names={{{name!r}: {guess!r}}}" if guess else "None for an axis along which weights differ"
            raise MeshError(
                f"{where}: names[{name!r}]",
                expected=f"one of {(STAGES, *ALL_AXES)}, or None",
                got=repr(target),
                fix=fix,
            )
    axes: list[str | None] = []
    for name, size in zip(axis_names, mesh.shape, strict=True):
        internal = by_name.get(name, name)
        # An axis of size 1 affects no weight, so any name is accepted.
        # Names of pipeline axes vary. A missed one would bind stages as if they had one model.
        is_stage = "".join(c for c in name.lower() if c.isalnum()) in _STAGES
        if name not in by_name and name not in ALL_AXES and (size == 1 or is_stage):
            internal = STAGES if size > 1 else None
        if internal is not None and internal not in (STAGES, *ALL_AXES):
            guess = suggest(name, ALL_AXES, _OTHER_LIBRARIES) or "dp_shard"
            raise MeshError(
                f"Meshes.from_device_mesh: axis {name!r} of size {size}",
                expected=f"axes out of {ALL_AXES}",
                got=axis_names,
                why="te_fsdp binds axes by name: gradients are not reduced over an axis that it ignores",
                fix=f"names={{{name!r}: {guess!r}}} if that is its role, or names={{{name!r}: None}} if ranks along it "
                "have different weights, as pipeline stages do",
            )
        if internal is not None and internal in axes:
            raise MeshError(
                f"{where}: two axes named {internal!r}",
                expected="each name once",
                got=f"axes {axis_names} with names={by_name}",
                fix="flatten them into one, or give one of them a different name",
            )
        axes.append(internal)
    return axes


def check_1d(mesh: DeviceMesh | None, argument: str, where: str) -> None:
    """Raise :class:`MeshError` unless ``mesh`` is ``None`` or has exactly one axis."""
    if mesh is None:
        return
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "ndim"):
        raise MeshError(
            f"{where}: {argument}",
            expected="a 1-D DeviceMesh or None",
            got=type(mesh).__name__,
            fix="pass one axis, such as meshes.tp of meshes = te_fsdp.Meshes.build(...)",
        )
    if mesh.ndim != 1:
        raise MeshError(
            f"{where}: {argument}",
            expected="a 1-D DeviceMesh",
            got=f"{mesh.ndim}-D mesh of shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}",
            fix=f'pass one axis, for example {argument}=mesh["tp"], or the flattened weight mesh of te_fsdp.Meshes',
        )


def check_ascending(mesh: DeviceMesh, argument: str, where: str) -> None:
    """Raise :class:`MeshError` unless ranks ascend along every axis of ``mesh``."""
    # Process groups number their ranks in ascending order, independent of the mesh. DTensor uses the order of the mesh,
    # FSDP2 and TE that of the group. With a different order, ranks would use each other's shards.
    # Of the slices of a mesh, some may descend. Their root mesh is the same on all ranks, which then all raise.
    root, names = _torch.root_mesh(mesh), mesh.mesh_dim_names or ()
    full = root if set(names) <= set(root.mesh_dim_names or ()) else mesh
    axes = [axis for axis in range(full.ndim) if not names or (full.mesh_dim_names or ())[axis] in names]
    if any((full.mesh.diff(dim=axis) < 0).any() for axis in axes):
        raise MeshError(
            f"{where}: {argument}",
            expected="ranks that ascend along every axis",
            got=full.mesh.tolist(),
            why="Process groups number their ranks in ascending order, so shards would be swapped",
            fix="build the mesh from ascending ranks, as init_device_mesh does",
        )


def check_contains_tp(
    tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, where: str, which: str
) -> None:
    """Raise :class:`MeshError` unless the ranks that shard a weight include those that shard it over tp."""
    if tp_mesh is None or weight_mesh is None:
        return
    # The scale of a quantized weight is that of all its shards, and tp ranks have different ones.
    tp, weight = set(tp_mesh.mesh.flatten().tolist()), set(weight_mesh.mesh.flatten().tolist())
    if not tp <= weight:
        raise MeshError(
            f"{where}: {which}_mesh",
            expected=f"a mesh that contains the tp ranks {sorted(tp)}",
            got=f"ranks {sorted(weight)}",
            fix=f"pass te_fsdp.Meshes(...).{which}, the flattened (dp_shard, tp) mesh",
        )


def check_expert_ranks_disjoint(
    ep_mesh: DeviceMesh, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, where: str
) -> None:
    """Raise :class:`MeshError` if ranks with different experts also share the shards of one expert."""
    ep = set(ep_mesh.mesh.flatten().tolist())
    for mesh, argument, attribute in (
        (tp_mesh, "tp_mesh", "tp"),
        (weight_mesh, "expert_weight_mesh", "expert_weight"),
    ):
        shared = sorted(ep & set(mesh.mesh.flatten().tolist())) if mesh is not None else []
        if len(shared) > 1:
            raise MeshError(
                f"{where}: {argument}",
                expected="a mesh that shares only this rank with ep_mesh",
                got=f"ranks {shared} in both meshes",
                why="Ranks along ep have different experts and do not share weights",
                fix=f"pass te_fsdp.Meshes(...).{attribute}",
            )


def mesh_of_experts(ep_mesh: DeviceMesh, tp_mesh: DeviceMesh | None, label: str) -> DeviceMesh:
    """Return the mesh of a parameter that contains all experts: ``ep`` or (``ep``, ``tp``). Local operation."""
    if tp_mesh is None:
        return ep_mesh
    try:
        # torch concatenates slices of one mesh only.
        return _torch.concatenate_meshes([ep_mesh, tp_mesh])
    except RuntimeError as error:
        raise MeshError(
            f"{label}: ep_mesh and tp_mesh of a parameter that contains all experts",
            expected="axes of one mesh",
            got=f"{ep_mesh} and {tp_mesh}",
            why=str(error),
            fix="pass te_fsdp.Meshes(...).ep and .tp, or one parameter per expert",
        ) from error


def check_nested(ranks: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise unless ranks ascend along dp_shard, cp and ep as one axis, the middle one of the 3-D ``ranks``."""
    if bool((ranks.diff(dim=1) < 0).any()):
        raise MeshError(
            "Meshes.from_device_mesh: axes dp_shard, cp and ep",
            expected="ep within cp within dp_shard, so that ranks ascend along the three as one axis",
            got=f"axes {mesh.mesh_dim_names} over ranks {mesh.mesh.tolist()}",
            why="Dense weights are sharded over them as one axis, and process groups number their ranks in "
            "ascending order",
            fix="build the mesh with dp_shard before cp before ep",
        )


def check_stages(mesh: DeviceMesh, axes: Sequence[str | None], pp: DeviceMesh | None) -> None:
    """Raise :class:`MeshError` unless the pipeline mesh crosses the mesh of this rank's stage in this rank only.

    ``axes`` contains te_fsdp's names for the axes of the stage's mesh.
    """
    if pp is None:
        return
    where = "Meshes.from_device_mesh"
    check_1d(pp, "pp", where)
    check_ascending(pp, "pp", where)
    # A rank is in one stage only, so the mesh of its stage and the pipeline's mesh share this rank alone.
    shared = sorted({*pp.mesh.flatten().tolist()} & {*mesh.mesh.flatten().tolist()})
    if STAGES in axes or shared != [dist.get_rank()]:
        raise MeshError(
            f"{where}: pp",
            expected=f"for the mesh of one stage, a pp mesh that shares only this rank, {dist.get_rank()}, with it",
            got=f"ranks {pp.mesh.tolist()} with axes {mesh.mesh_dim_names} over {mesh.mesh.tolist()}",
            fix='slice both from one mesh: from_device_mesh(job_mesh["dp_shard", "tp"], pp=job_mesh["pp"])',
        )


def mesh_of_stage(device_type: str, ranks: torch.Tensor) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh of this rank's stage, with axes :data:`AXES`, and the pipeline mesh if any.

    ``ranks`` has the shape ``(models, stages, dp_replicate, dp_shard, tp)`` and contains this rank. Other ranks may
    pass different ones. Collective over the world.
    """
    # Both are slices of one mesh of all ranks, because torch names process groups by counting them. If ranks created
    # only their own stage's groups, different groups would get the same name and mix up their messages.
    if ranks.numel() < dist.get_world_size() and not is_simulated():
        # One number from each rank, then each distinct list from the first rank that has it. So a rank receives one
        # number per rank, and one list per model.
        own_ranks = ranks.tolist()
        digests = gather(digest(str(own_ranks)))
        lists: list[list] = []
        for kind in list(dict.fromkeys(digests))[:_KINDS]:
            received = [own_ranks]
            dist.broadcast_object_list(received, src=digests.index(kind))
            lists += received
        distinct = sorted({str(model): model for rank_list in lists for model in rank_list}.values())
        stages = [torch.tensor(model, device="cpu") for model in distinct]
        numbers = sorted(n for model in stages for n in model.flatten().tolist())
        have_one_shape = all(model.shape == ranks.shape[1:] for model in stages)
        if numbers != list(range(dist.get_world_size())) or not have_one_shape:
            raise MeshError(
                "Meshes.from_device_mesh: a mesh of some of the ranks",
                expected="on every rank the mesh that contains it, all of the same shape",
                got=f"ranks {distinct}",
                fix="slice one mesh of all ranks on every rank",
            )
        ranks = torch.stack(stages)
    outer = [(name, dim) for dim, name in enumerate(("model", STAGES)) if ranks.shape[dim] > 1]
    shape = (*(ranks.shape[dim] for _, dim in outer), *ranks.shape[2:])
    names = (*(name for name, _ in outer), *AXES)
    mesh = run_while_all_live(lambda: DeviceMesh(device_type, ranks.reshape(shape), mesh_dim_names=names))
    return mesh[AXES] if outer else mesh, mesh[STAGES] if STAGES in names else None


#: Environment variables in which launchers, including torch's own, publish the number of processes.
_STARTED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def check_started(sizes: Mapping[str, int]) -> None:
    """Raise ``MeshError`` if a launcher started several processes but did not set ``RANK``."""
    # Each would become a separate job. If all sizes are 1, separate jobs are intended.
    counts = {name: os.environ.get(name, "") for name in _STARTED}
    started = [f"{name}={n}" for name, n in counts.items() if n.isdecimal() and int(n) > 1]
    if started and "RANK" not in os.environ and any(size != 1 for size in sizes.values()):
        raise MeshError(
            "Meshes.build: several processes, and no RANK in the environment",
            expected="the variables of torchrun",
            got=started[0],
            why="Each process would train a separate model",
            fix="start the script with torchrun (srun torchrun ..., docs/nodes.md); or Meshes.build(dp_shard=1) if "
            "each process is a separate job",
        )


def check_device_type(passed: str | torch.device) -> str:
    """Return the device type. Raise ``MeshError`` for an unknown type, or for a device with an index."""
    try:
        device = torch.device(passed)
    except (RuntimeError, TypeError, ValueError):
        device = None
    if device is None or device.index is not None:
        raise MeshError(
            "Meshes.build: device_type",
            expected="'cuda' or 'cpu'",
            got=f"{passed!r:.80}",
            fix="pass the type alone: LOCAL_RANK selects this rank's device",
        )
    return device.type


def device_of_rank(device_type: str) -> int:
    """Return the index of this rank's accelerator: ``LOCAL_RANK``.

    Raises ``MeshError`` if the machine does not have that many, or if ``LOCAL_RANK`` is not set and ranks would share
    the first one.
    """
    count, local_rank = torch.get_device_module(device_type).device_count(), os.environ.get("LOCAL_RANK", "")
    index = int(local_rank) if local_rank.isdecimal() else 0
    # Without LOCAL_RANK several ranks of a node would all use device 0, which fails much later, in NCCL.
    is_determined = local_rank.isdecimal() or count < 2 or os.environ.get("WORLD_SIZE", "1") == "1"
    if index >= count or not is_determined:
        raise MeshError(
            f"Meshes.build: LOCAL_RANK={local_rank}"
            if local_rank
            else "Meshes.build: no LOCAL_RANK in the environment",
            expected=f"one of this process' {count} devices of type {device_type}, one for each rank of a node",
            fix=f"torchrun --nproc-per-node {max(count, 1)}, or set CUDA_VISIBLE_DEVICES to all devices; with "
            "a different launcher export LOCAL_RANK (SLURM: $SLURM_LOCALID)",
        )
    return index


def select_device(device_type: str) -> bool:
    """Select the device ``LOCAL_RANK``, unless the program has selected one. Return whether one is selected.

    ``DeviceMesh`` does the same, but for its thread alone.
    """
    if device_type == "cpu":
        return True
    module, local_rank = torch.get_device_module(device_type), os.environ.get("LOCAL_RANK", "")
    if not module.is_initialized() and local_rank.isdecimal():
        module.set_device(int(local_rank))
    return module.is_initialized()


def fill_sizes(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Resolve at most one ``-1`` and check that the product of the axes equals the world size."""
    shown = {axis: size for axis, size in sizes.items() if axis in AXES or size != 1}
    text = " * ".join(f"{axis}({size})" for axis, size in shown.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    wrong = [s for s in sizes.values() if isinstance(s, bool) or not isinstance(s, int) or s < -1 or s == 0]
    if len(free) > 1 or wrong:
        raise MeshError(
            f"Meshes.build: {text}",
            expected="positive sizes, at most one of them -1",
            got=tuple(shown.values()),
            fix="give every axis a size of 1 or more; only one may be -1 (the default of dp_shard)",
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    if free and world_size % product == 0:
        return {axis: world_size // product if size == -1 else size for axis, size in sizes.items()}
    if not free and product == world_size:
        return sizes
    remaining, over = divmod(world_size, product // (sizes["dp_shard"] if sizes["dp_shard"] != -1 else 1))
    fix = "sizes whose product is WORLD_SIZE"
    if remaining and not over:
        fix = f"dp_shard={remaining}, or dp_shard=-1 to infer it"
    if world_size == 1:
        fix += (
            "; or start the script with torchrun --nproc-per-node N, because it runs as a single process now"
        )
    raise MeshError(
        f"Meshes.build: {text} = {product}{' * ?' if free else ''}",
        expected=f"a product equal to WORLD_SIZE = {world_size}",
        got=f"{product}" if not free else f"{product}, which does not divide {world_size}",
        fix=fix,
    )


def ranks_of_a_node(world_size: int) -> int:
    """Return the number of ranks per node from torchrun's ``LOCAL_WORLD_SIZE``, or all ranks if it is not set."""
    # Also all ranks if nodes have different numbers of ranks, because then no number fits every node.
    local_world = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks_per_node = int(local_world) if local_world.isdecimal() else world_size
    return ranks_per_node if ranks_per_node and world_size % ranks_per_node == 0 else world_size


def slow_axes(groups: Mapping[str, torch.Tensor], node: int) -> list[str]:
    """Return a sentence for each axis with heavy traffic between nodes that could stay within a node.

    ``groups`` maps an axis to its ranks, ``(groups, size)``. Rank r is on node ``r // node``, as torchrun numbers them.
    """
    # Consecutive ranks share a node, as torchrun numbers them.
    crossing = {axis for axis, ranks in groups.items() if bool((ranks // node != ranks[:, :1] // node).any())}
    why = {"tp": "it all-reduces the activations of every layer", "ep": "it sends every token to its experts"}
    sentences = [
        f"{axis}={groups[axis].shape[1]} crosses nodes of {node} ranks: {why[axis]}. Choose a size that divides {node}"
        for axis in ("tp", "ep")
        if axis in crossing
    ]
    if "dp_replicate" in groups and "dp_shard" in crossing and "dp_replicate" not in crossing:
        sentences.append(
            f"dp_shard={groups['dp_shard'].shape[1]} crosses nodes of {node} ranks and dp_replicate does not: "
            "weights are all-gathered between nodes in every pass. Exchange the two axes"
        )
    return sentences
