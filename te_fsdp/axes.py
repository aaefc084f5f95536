"""The named axes of a job and what is checked about them: sizes that fill the world, ranks that ascend."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fsdp import _torch
from te_fsdp.agree import digest, gather
from te_fsdp.all_ranks import is_simulated
from te_fsdp.errors import MeshError, meant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh

#: The axes that cut or copy dense parameters, in mesh order.
AXES = ("dp_replicate", "dp_shard", "tp")

#: The axes of a job, in mesh order.
ALL_AXES = ("dp_replicate", "dp_shard", "cp", "ep", "tp")

#: The axis over which ranks hold other weights of one model: stages of a pipeline.
STAGES = "pp"
#: Its names, whoever built the mesh.
_STAGES = ("pp", "pipe", "pipeline", "pipelineparallel", "stage", "stages")
# More lists of stages than jobs have stages: a mistake, of which no more need be seen.
_KINDS = 256
#: Other libraries' names of axes, as :func:`te_fsdp.errors.meant` compares them.
_ELSEWHERE = {
    **dict.fromkeys(("dp", "data", "dataparallel", "fsdp", "shard", "dpshardmod"), "dp_shard"),
    **dict.fromkeys(("replicate", "replica", "ddp", "hsdp", "dpouter", "outer"), "dp_replicate"),
    **dict.fromkeys(("tensor", "tensorparallel", "mp", "model", "modelparallel"), "tp"),
    **dict.fromkeys(("context", "contextparallel", "sequence", "sequenceparallel", "sp"), "cp"),
    **dict.fromkeys(("expert", "experts", "expertparallel"), "ep"),
}


def own_names(mesh: DeviceMesh, names: Mapping[str, str | None] | None) -> list[str | None]:
    """What each axis of a mesh is called here; ``None`` for one over which ranks hold other models, or of one rank.

    ``names`` maps the mesh's own names to those out of :data:`ALL_AXES`, :data:`STAGES`, or ``None``; others stay.
    Raises ``MeshError`` for a name that is no axis on either side, two axes of one name, or an axis of unknown
    meaning.
    """
    where, have = "Meshes.from_device_mesh", tuple(mesh.mesh_dim_names or ())
    given = dict(names or {})
    for name, target in given.items():
        if name not in have:
            near = meant(name, have)
            fix = f"{near!r}, if that is meant" if near else "name axes of this mesh"
            raise MeshError(f"{where}: names: axis {name!r}", expected=f"one of {have}", fix=fix)
        if target is not None and target not in (STAGES, *ALL_AXES):
            near = meant(target, ALL_AXES, _ELSEWHERE)
            fix = f"names={{{name!r}: {near!r}}}" if near else "None for an axis over which weights differ"
            raise MeshError(
                f"{where}: names[{name!r}]",
                expected=f"one of {(STAGES, *ALL_AXES)}, or None",
                got=repr(target),
                fix=fix,
            )
    found: list[str | None] = []
    for name, size in zip(have, mesh.shape, strict=True):
        own = given.get(name, name)
        # One rank touches no weight, whatever the axis is for.
        is_stage = "".join(c for c in name.lower() if c.isalnum()) in _STAGES
        if name not in given and name not in ALL_AXES and (size == 1 or is_stage):
            own = STAGES if size > 1 else None
        if own is not None and own not in (STAGES, *ALL_AXES):
            near = meant(name, ALL_AXES, _ELSEWHERE) or "dp_shard"
            raise MeshError(
                f"Meshes.from_device_mesh: axis {name!r} of size {size}",
                expected=f"axes out of {ALL_AXES}",
                got=have,
                why="te_fsdp binds axes by name: over an axis that it leaves out, no gradient is reduced",
                fix=f"names={{{name!r}: {near!r}}} for what it means, or names={{{name!r}: None}} if ranks along it "
                "hold other weights, as stages of a pipeline do",
            )
        if own is not None and own in found:
            raise MeshError(
                f"{where}: two axes that are {own!r}",
                expected="each once",
                got=f"axes {have} with names={given}",
                fix="flatten them into one, or give one of them another name",
            )
        found.append(own)
    return found


def check_1d(mesh: DeviceMesh | None, argument: str, where: str) -> None:
    """Raise :class:`MeshError` unless ``mesh`` is ``None`` or has exactly one axis."""
    if mesh is None:
        return
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "ndim"):
        raise MeshError(f"{where}: {argument}", expected="a 1-D DeviceMesh or None", got=type(mesh).__name__)
    if mesh.ndim != 1:
        raise MeshError(
            f"{where}: {argument}",
            expected="a 1-D DeviceMesh",
            got=f"{mesh.ndim}-D mesh of shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}",
            fix=f'pass one axis, for example {argument}=mesh["tp"], or the flattened weight mesh of te_fsdp.Meshes',
        )


def check_ascending(mesh: DeviceMesh, argument: str, where: str) -> None:
    """Raise :class:`MeshError` unless ranks ascend along every axis of ``mesh``.

    Process groups number their ranks in ascending order, whatever the order in the mesh. DTensor goes by the mesh,
    FSDP2 and TE go by the group: on another order a shard would be taken for its neighbour.
    """
    if any((mesh.mesh.diff(dim=axis) < 0).any() for axis in range(mesh.ndim)):
        raise MeshError(
            f"{where}: {argument}",
            expected="ranks that ascend along every axis",
            got=mesh.mesh.tolist(),
            why="Process groups number their ranks in ascending order, so that shards would change places",
            fix="build the mesh from ascending ranks, as init_device_mesh does",
        )


def check_holds_tp(
    tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, where: str, which: str
) -> None:
    """Raise :class:`MeshError` unless the ranks that cut a weight include those that cut it by tp."""
    if tp_mesh is None or weight_mesh is None:
        return
    tp, weight = set(tp_mesh.mesh.flatten().tolist()), set(weight_mesh.mesh.flatten().tolist())
    if not tp <= weight:
        raise MeshError(
            f"{where}: {which}_mesh",
            expected=f"a mesh that contains the tp ranks {sorted(tp)}",
            got=f"ranks {sorted(weight)}",
            fix=f"pass te_fsdp.Meshes(...).{which}, the flattened (dp_shard, tp) mesh",
        )


def check_experts_apart(
    ep_mesh: DeviceMesh, tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, where: str
) -> None:
    """Raise :class:`MeshError` if ranks that hold different experts are ranks that hold pieces of one."""
    ep = set(ep_mesh.mesh.flatten().tolist())
    for mesh, argument, attribute in (
        (tp_mesh, "tp_mesh", "tp"),
        (weight_mesh, "expert_weight_mesh", "expert_weight"),
    ):
        both = sorted(ep & set(mesh.mesh.flatten().tolist())) if mesh is not None else []
        if len(both) > 1:
            raise MeshError(
                f"{where}: {argument}",
                expected="one rank of ep_mesh at most, this one",
                got=f"ranks {both} of both",
                why="Ranks along ep hold different experts, and share no weight",
                fix=f"pass te_fsdp.Meshes(...).{attribute}",
            )


def mesh_of_experts(ep_mesh: DeviceMesh, tp_mesh: DeviceMesh | None, label: str) -> DeviceMesh:
    """The mesh of parameters of all experts, ``ep`` or (``ep``, ``tp``). Local operation."""
    if tp_mesh is None:
        return ep_mesh
    try:
        return _torch.concatenated_meshes(ep_mesh, tp_mesh)
    except RuntimeError as error:
        raise MeshError(
            f"{label}: ep_mesh and tp_mesh of one parameter for all experts",
            expected="axes of one mesh",
            got=f"{ep_mesh} and {tp_mesh}",
            why=str(error),
            fix="pass te_fsdp.Meshes(...).ep and .tp, or one parameter per expert",
        ) from error


def check_nested(ranks: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise unless dp_shard, cp and ep, taken as one axis, the middle one of 3-D ``ranks``, ascend."""
    if bool((ranks.diff(dim=1) < 0).any()):
        raise MeshError(
            "Meshes.from_device_mesh: axes dp_shard, cp and ep",
            expected="ep within cp within dp_shard, so that ranks ascend along the three as one axis",
            got=f"axes {mesh.mesh_dim_names} over ranks {mesh.mesh.tolist()}",
            why="Dense weights are sharded over them as one axis, and process groups number their ranks in "
            "ascending order",
            fix="build the mesh with dp_shard before cp before ep",
        )


def check_stages(mesh: DeviceMesh, found: Sequence[str | None], pp: DeviceMesh | None) -> None:
    """Raise :class:`MeshError` unless a mesh of stages, given beside that of a stage, lies across it in this rank.

    ``found`` is what the axes of the stage's mesh are called here.
    """
    if pp is None:
        return
    where = "Meshes.from_device_mesh"
    check_1d(pp, "pp", where)
    check_ascending(pp, "pp", where)
    both = sorted({*pp.mesh.flatten().tolist()} & {*mesh.mesh.flatten().tolist()})
    if STAGES in found or both != [dist.get_rank()]:
        raise MeshError(
            f"{where}: pp",
            expected=f"beside a mesh of one stage, ranks of which this one, {dist.get_rank()}, alone is in it",
            got=f"ranks {pp.mesh.tolist()} beside axes {mesh.mesh_dim_names} over {mesh.mesh.tolist()}",
            fix='slice both from one mesh: from_device_mesh(whole["dp_shard", "tp"], pp=whole["pp"])',
        )


def mesh_of_stage(device_type: str, ranks: torch.Tensor) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The mesh of this rank's stage, of axes :data:`AXES`, and that of the stages, if any. Collective over the world.

    It is cut out of one of all ranks, since torch numbers process groups by counting them: ranks that each made the
    groups of their own stage alone would give different groups one name, and meet in each other's. ``ranks`` are
    ``(models, stages, dp_replicate, dp_shard, tp)``, with this rank in it; other ranks may have others.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if ranks.numel() < dist.get_world_size() and not is_simulated():
        each = _all_models(ranks.tolist())
        found = [torch.tensor(model, device="cpu") for model in each]
        numbers = sorted(n for model in found for n in model.flatten().tolist())
        alike = all(model.shape == ranks.shape[1:] for model in found)
        if numbers != list(range(dist.get_world_size())) or not alike:
            raise MeshError(
                "Meshes.from_device_mesh: a mesh of a part of the ranks",
                expected="on every rank the mesh that it is part of, all of one shape",
                got=f"ranks {each}",
                fix="slice one mesh of all ranks on each of them",
            )
        ranks = torch.stack(found)
    outer = [(name, at) for at, name in enumerate(("model", STAGES)) if ranks.shape[at] > 1]
    shape = (*(ranks.shape[at] for _, at in outer), *ranks.shape[2:])
    names = (*(name for name, _ in outer), *AXES)
    mesh = DeviceMesh(device_type, ranks.reshape(shape), mesh_dim_names=names)
    return mesh[AXES] if outer else mesh, mesh[STAGES] if STAGES in names else None


def _all_models(mine: list) -> list:
    """The models of all ranks, each once, in ascending order; the same on all ranks.

    Collective over the world: a number from each rank, then each kind of list from the first rank that has it, so that
    a rank receives one number for each rank and one rank's list for each model.
    """
    digests = gather(digest(str(mine)))
    lists: list[list] = []
    for kind in list(dict.fromkeys(digests))[:_KINDS]:
        received = [mine]
        dist.broadcast_object_list(received, src=digests.index(kind))
        lists += received
    return sorted({str(model): model for one in lists for model in one}.values())


#: Variables in which launchers, torch's own and others, say how many processes they have started.
_STARTED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def check_started(sizes: Mapping[str, int]) -> None:
    """Raise ``MeshError`` where a launcher has started several processes that ``torch.distributed`` knows nothing of.

    There is no ``RANK`` then, and each would be a job of its own. Where all ``sizes`` are 1, such jobs are meant.
    """
    said = {name: os.environ.get(name, "") for name in _STARTED}
    several = [f"{name}={count}" for name, count in said.items() if count.isdecimal() and int(count) > 1]
    if several and "RANK" not in os.environ and any(size != 1 for size in sizes.values()):
        raise MeshError(
            "Meshes.build: several processes, and no RANK in the environment",
            expected="the variables of torchrun",
            got=several[0],
            why="Each process would train a model of its own",
            fix="start the script with torchrun (srun torchrun ..., docs/nodes.md); or Meshes.build(dp_shard=1) where "
            "each process is a job",
        )


def check_device_type(given: str | torch.device) -> str:
    """The type of device that is meant; ``MeshError`` for none that torch knows, or one device of it."""
    try:
        device = torch.device(given)
    except RuntimeError:
        device = None
    if device is None or device.index is not None:
        raise MeshError(
            "Meshes.build: device_type",
            expected="'cuda' or 'cpu'",
            got=repr(given),
            fix="the type alone: which device of it is this rank's follows from LOCAL_RANK",
        )
    return device.type


def own_device(device_type: str) -> int:
    """Index of this rank's accelerator: ``LOCAL_RANK``.

    Raises ``MeshError`` where this machine has not as many; or where it is not said, and ranks would share the first
    one.
    """
    count, said = torch.get_device_module(device_type).device_count(), os.environ.get("LOCAL_RANK", "")
    index = int(said) if said.isdecimal() else 0
    alone = said.isdecimal() or count < 2 or os.environ.get("WORLD_SIZE", "1") == "1"
    if index >= count or not alone:
        raise MeshError(
            f"Meshes.build: LOCAL_RANK={said}" if said else "Meshes.build: no LOCAL_RANK in the environment",
            expected=f"one of this process' {count} devices of type {device_type}, another for each rank of a node",
            fix=f"torchrun --nproc-per-node {max(count, 1)}, or all devices of the node in CUDA_VISIBLE_DEVICES; with "
            "another launcher export LOCAL_RANK (SLURM: $SLURM_LOCALID)",
        )
    return index


def fill_sizes(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    """Resolve one ``-1`` and check that the axes fill the world exactly."""
    shown = {axis: size for axis, size in sizes.items() if axis in AXES or size != 1}
    text = " * ".join(f"{axis}({size})" for axis, size in shown.items())
    free = [axis for axis, size in sizes.items() if size == -1]
    wrong = [s for s in sizes.values() if isinstance(s, bool) or not isinstance(s, int) or s < -1 or s == 0]
    if len(free) > 1 or wrong:
        raise MeshError(
            f"Meshes.build: {text}",
            expected="positive sizes, at most one of them -1",
            got=tuple(shown.values()),
            fix="give every axis a size of 1 or more; one alone may be -1, which dp_shard is by default",
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    if free and world_size % product == 0:
        return {axis: world_size // product if size == -1 else size for axis, size in sizes.items()}
    if not free and product == world_size:
        return sizes
    left, over = divmod(world_size, product // (sizes["dp_shard"] if sizes["dp_shard"] != -1 else 1))
    fix = "sizes whose product is WORLD_SIZE"
    if left and not over:
        fix = f"dp_shard={left}, or dp_shard=-1 to use what is left"
    if world_size == 1:
        fix += "; or start the script with torchrun --nproc-per-node N, where it runs alone now"
    raise MeshError(
        f"Meshes.build: {text} = {product}{' * ?' if free else ''}",
        expected=f"a product equal to WORLD_SIZE = {world_size}",
        got=f"{product}" if not free else f"{product}, which does not divide {world_size}",
        fix=fix,
    )


def ranks_of_a_node(world_size: int) -> int:
    """How many ranks a node has, as torchrun says it (``LOCAL_WORLD_SIZE``); all of them where nobody says it.

    Also where nodes have different numbers of ranks, so that a number of one is none of the others.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    each = int(said) if said.isdecimal() else world_size
    return each if each and world_size % each == 0 else world_size


def slow_axes(groups: Mapping[str, torch.Tensor], node: int) -> list[str]:
    """What of a job's arrangement sends much between nodes that could stay within one: a sentence for each.

    ``groups``: axis -> its ranks, ``(groups, size)``; rank r is on node ``r // node``, as torchrun numbers them.
    """
    crossing = {axis for axis, ranks in groups.items() if bool((ranks // node != ranks[:, :1] // node).any())}
    why = {
        "tp": "every layer's activations are added up over it",
        "ep": "every token travels to its experts over it",
    }
    found = [
        f"{axis}={groups[axis].shape[1]} crosses nodes of {node} ranks: {why[axis]}. Choose a size that divides {node}"
        for axis in ("tp", "ep")
        if axis in crossing
    ]
    if "dp_replicate" in groups and "dp_shard" in crossing and "dp_replicate" not in crossing:
        found.append(
            f"dp_shard={groups['dp_shard'].shape[1]} crosses nodes of {node} ranks and dp_replicate does not: "
            "weights are gathered between nodes, in every pass. Exchange the two axes"
        )
    return found
