"""The plan of a model's modules, with all that is checked before anything changes: meshes, order, quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp import _te, _torch
from te_fsdp.agree import gather, raised_on_all_ranks
from te_fsdp.axes import check_1d, check_ascending
from te_fsdp.errors import MeshError, OrderError, PlacementError
from te_fsdp.layout import ExpertRange, expert_ranges
from te_fsdp.modules.grouped import single_cuts
from te_fsdp.modules.plan import PARALLEL_KINDS, Meshing, ModulePlan, plan_tree, quantizable
from te_fsdp.parameters import Binding, binding_of, is_replicated
from te_fsdp.quantized.alignment import check_quantizer
from te_fsdp.quantized.shards import plan_cuts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from te_fsdp.quantized.alignment import Grid

#: Which grouped modules are dealt out: names in the tree, classes; ``None``: all of them.
Selection: TypeAlias = Iterable[type | str] | None


def plan_modules(
    model: nn.Module,
    dense: Meshing,
    of_experts: Meshing,
    experts: Selection = None,
    *,
    stays_whole: Callable[[Any, str], bool] = is_replicated,
) -> list[ModulePlan]:
    """Settle how each module is bound, and which dims of quantized weights FSDP2 shall cut. Changes nothing.

    Local without ``ep``; with it collective over it, and then all its ranks raise if one does.

    Args:
        model: The root.
        dense: Meshes of all modules but experts.
        of_experts: Those of experts.
        experts: Which modules are experts.
        stays_whole: Whether data parallelism leaves a module's own parameter whole.

    Raises:
        TeFsdpError: see :func:`te_fsdp.set_device_mesh`.
    """
    where, ep_mesh = f"set_device_mesh({type(model).__name__})", of_experts.ep_mesh
    check_1d(ep_mesh, "ep_mesh", where)

    def plan() -> list[ModulePlan]:
        return _plan(model, dense, of_experts, experts, where, stays_whole)

    planned = plan() if ep_mesh is None or ep_mesh.size() == 1 else _partition_experts(plan, ep_mesh, where)
    return _with_cuts(planned, dense.grid, stays_whole)


def _plan(
    model: nn.Module,
    dense: Meshing,
    experts: Meshing,
    selection: Selection,
    where: str,
    stays_whole: Callable[[Any, str], bool],
) -> list[ModulePlan]:
    """The plan of this rank alone, as far as it can be made without the others."""
    names: set[str] = set()
    if experts.ep_mesh is None or experts.ep_mesh.size() == 1:
        experts = dense
    else:
        names = find_experts(model, selection)
    if dense.tp_mesh is not None:
        check_1d(dense.tp_mesh, "tp_mesh", where)
    for meshes, argument in ((dense, "weight_mesh"), (experts, "expert_weight_mesh")):
        check_1d(meshes.weight_mesh, argument, where)
    for mesh, argument in ((dense.tp_mesh, "tp_mesh"), (experts.ep_mesh, "ep_mesh")):
        if mesh is not None:
            check_ascending(mesh, argument, where)
    _check_nested(dense.tp_mesh, dense.weight_mesh, f"{where}: weight_mesh", ".weight")
    if experts.ep_mesh is not None:
        _check_nested(dense.tp_mesh, experts.weight_mesh, f"{where}: expert_weight_mesh", ".expert_weight")
        _check_apart(experts, where)
    planned = []
    for item in plan_tree(model, dense.tp_mesh.size() if dense.tp_mesh is not None else 1):
        meshes = experts if item.name in names else dense
        weights = [name for name, rule in item.rules.items() if rule.quantizable]
        if weights and all(stays_whole(item.module, name) for name in weights):
            meshes = replace(meshes, weight_mesh=meshes.tp_mesh)  # data parallelism does not cut them
        if meshes.ep_mesh is not None and any(rule.layout.is_grouped for rule in item.rules.values()):
            meshes = replace(meshes, experts_mesh=_experts_mesh(meshes.ep_mesh, meshes.tp_mesh, item.name))
        planned.append(replace(item, meshes=meshes))
        _check_item(planned[-1])
    return planned


def _experts_mesh(ep_mesh: DeviceMesh, tp_mesh: DeviceMesh | None, label: str) -> DeviceMesh:
    """The mesh of parameters of all experts. Local operation."""
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


def _check_apart(experts: Meshing, where: str) -> None:
    """No two ranks that hold different experts may be ranks that hold pieces of one."""
    assert experts.ep_mesh is not None
    ep = set(experts.ep_mesh.mesh.flatten().tolist())
    for mesh, argument, attribute in (
        (experts.tp_mesh, "tp_mesh", "tp"),
        (experts.weight_mesh, "expert_weight_mesh", "expert_weight"),
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


def _check_nested(
    tp_mesh: DeviceMesh | None, weight_mesh: DeviceMesh | None, what: str, attribute: str
) -> None:
    """The ranks that cut a weight include those that cut it by tp."""
    if tp_mesh is None or weight_mesh is None:
        return
    tp, weight = set(tp_mesh.mesh.flatten().tolist()), set(weight_mesh.mesh.flatten().tolist())
    if not tp <= weight:
        raise MeshError(
            what,
            expected=f"a mesh that contains the tp ranks {sorted(tp)}",
            got=f"ranks {sorted(weight)}",
            fix=f"pass te_fsdp.Meshes(...){attribute}, the flattened (dp_shard, tp) mesh",
        )


def _check_item(item: ModulePlan) -> None:
    """Everything that can be wrong with one module, before any module is touched."""
    meshes = item.meshes
    tp_mesh, weight_mesh = meshes.tp_mesh, meshes.weight_mesh
    which = "weight" if meshes.ep_mesh is None else "expert_weight"
    label = item.name or type(item.module).__name__
    binding = binding_of(item.module)
    if binding is not None:
        _check_same(label, binding, meshes)
        return
    for name, parameter in item.module._parameters.items():
        if isinstance(parameter, DTensor) and (item.kind is not None or parameter.device_mesh != tp_mesh):
            raise OrderError(
                f"{label}.{name}: set_device_mesh after the parameter became a DTensor",
                expected="a plain parameter, as TE makes it",
                got=f"DTensor with placements {tuple(parameter.placements)}",
                why="FSDP2 would not see the tensor-parallel placement, and checkpoints would lose tp shards",
                fix="call set_device_mesh before fully_shard, or te_fsdp.fully_shard, which does both",
            )
        rule = item.rules.get(name)
        dim = rule.shard_dim if rule is not None and tp_mesh is not None else None
        if parameter is not None and dim is not None and dim >= parameter.ndim:
            raise PlacementError(
                f"{item.name}: shard dim {dim}",
                expected=f"{parameter.ndim} dims",
                got=tuple(parameter.shape),
            )
        if parameter is None or item.kind is None:
            continue
        quantizer = _te.weight_quantizer(item.module, name)
        if quantizer is None:
            continue
        check_quantizer(f"{label}.{name}", quantizer)
        if tp_mesh is None or tp_mesh.size() == 1 or weight_mesh is not None:
            continue
        if _te.needs_shared_amax(quantizer):
            raise MeshError(
                f"{label}.{name}: {which}_mesh of a quantized weight with one scale per tensor",
                expected="the mesh of all ranks that hold pieces of it",
                got="None",
                why="Each rank would quantize its piece with a scale of its own",
                fix=f"pass {which}_mesh=te_fsdp.Meshes(...).{which}",
            )
    group = getattr(item.module, "tp_group", None)
    if item.kind in PARALLEL_KINDS and group is not None and tp_mesh is not None and item.module.tp_size > 1:
        have, want = dist.get_process_group_ranks(group), tp_mesh.mesh.flatten().tolist()
        if sorted(have) != sorted(want):
            raise MeshError(
                f"{label}: tp_mesh",
                expected=f"the ranks of tp_group, {have}",
                got=want,
                fix="pass the mesh that tp_group belongs to, or build the module with tp_size alone",
            )


def _check_same(label: str, binding: Binding, meshes: Meshing) -> None:
    """A second call may only repeat the first."""
    tp_mesh, weight_mesh = meshes.tp_mesh, meshes.weight_mesh
    same_tp = binding.tp_mesh is tp_mesh or binding.tp_mesh == tp_mesh
    same_tp = same_tp and (binding.ep_mesh is meshes.ep_mesh or binding.ep_mesh == meshes.ep_mesh)
    same_weight = binding.weight_mesh is weight_mesh or binding.weight_mesh == weight_mesh
    if (
        same_tp
        and (same_weight or binding.weight_mesh is None or weight_mesh is None)
        and not binding.under_fsdp
    ):
        return
    same_weight = same_weight or weight_mesh is None  # without tp, FSDP2's shard axis was taken as the mesh
    if binding.under_fsdp and not (same_tp and same_weight):
        what, fix = "set_device_mesh after fully_shard", "call set_device_mesh before fully_shard"
    elif binding.under_fsdp:
        return
    else:
        what, fix = (
            "set_device_mesh with other meshes than before",
            "bind a model once; build a new one for a new mesh",
        )
    raise OrderError(
        f"{label}: {what}",
        expected=_meant(Meshing(binding.tp_mesh, binding.weight_mesh, binding.ep_mesh)),
        got=_meant(meshes),
        why="The parameters are placed already",
        fix=fix,
    )


def _meant(meshes: Meshing) -> str:
    """The arguments of ``set_device_mesh`` that concern one module."""
    if meshes.ep_mesh is None:
        return f"tp_mesh={_ranks(meshes.tp_mesh)}, weight_mesh={_ranks(meshes.weight_mesh)}"
    own = f"ep_mesh={_ranks(meshes.ep_mesh)}, expert_weight_mesh={_ranks(meshes.weight_mesh)}"
    return f"tp_mesh={_ranks(meshes.tp_mesh)}, {own}"


def _ranks(mesh: DeviceMesh | None) -> str:
    """A mesh by its ranks, which its own text leaves out."""
    return "None" if mesh is None else f"ranks {mesh.mesh.tolist()}"


def find_experts(model: nn.Module, selection: Selection) -> set[str]:
    """Names of the ``GroupedLinear`` modules that expert parallelism deals out. Local operation.

    Args:
        model: The root.
        selection: Names and classes of grouped modules, or of modules that hold some; ``None``: all in the tree.

    Raises:
        PlacementError: An entry without a ``GroupedLinear``.
    """
    names = dict(model.named_modules())
    grouped = [name for name, module in names.items() if _te.kind_of(module) == "GroupedLinear"]
    if selection is None:
        return set(grouped)
    chosen: set[str] = set()
    for want in selection:
        holders = [
            n for n, m in names.items() if (n == want if isinstance(want, str) else isinstance(m, want))
        ]
        found = [n for n in grouped if any(n == h or not h or n.startswith(f"{h}.") for h in holders)]
        if not found:
            raise PlacementError(
                f"set_device_mesh: experts {want if isinstance(want, str) else want.__name__!r}",
                expected="a GroupedLinear, or a module that holds some",
                got="none of that name or class",
                fix="name modules as model.named_modules() does",
            )
        chosen.update(found)
    return chosen


def _partition_experts(
    plan: Callable[[], list[ModulePlan]], ep_mesh: DeviceMesh, where: str
) -> list[ModulePlan]:
    """Plan, and find out over ``ep_mesh`` which experts each module holds. Changes nothing.

    Collective over ``ep_mesh`` (two small object gathers), also where this rank's own plan fails.

    Args:
        plan: The plan of one rank: modules on an expert-parallel mesh are experts.
        ep_mesh: 1-D.
        where: Name of the operation, for messages.

    Raises:
        TeFsdpError: On all ranks of ``ep_mesh``: what any of them raises, expert modules that differ in more than the
            number of experts, and experts that are not dealt out as ``torch.chunk`` cuts.
    """
    with raised_on_all_ranks(ep_mesh, where):
        planned = plan()
        told = {item.name: _described(item.module) for item in planned if item.meshes.ep_mesh is not None}
    held = _ranges(gather(told, ep_mesh), where)
    here = ep_mesh.get_local_rank()
    return [replace(item, experts=held[item.name][here]) if item.name in told else item for item in planned]


def _described(module: Any) -> tuple[int, str]:
    """Number of experts, and all else in which the ranks must agree, as text."""
    names = ("in_features", "out_features", "use_bias", "parallel_mode", "tp_size", "params_dtype")
    names += ("primary_weights_in_fp8", "single_grouped_weight", "single_grouped_bias")
    return module.num_gemms, ", ".join(f"{name}={getattr(module, name, None)}" for name in names)


def _ranges(told: list[dict[str, tuple[int, str]]], where: str) -> dict[str, list[ExpertRange]]:
    """Ranges of all ranks by module, from what the ranks tell of theirs; every rank finds the same."""
    for rank, modules in enumerate(told):
        differ = [
            n for n in {**told[0], **modules} if told[0].get(n, (0, ""))[1] != modules.get(n, (0, ""))[1]
        ]
        if differ:
            expected = told[0].get(differ[0], (0, "no such module"))[1]
            raise MeshError(
                f"{where}: expert module(s) {', '.join(differ[:5])} over ep={len(told)}",
                expected=f"on rank {rank} of ep as on the first: {expected}",
                got=modules.get(differ[0], (0, "no such module"))[1],
                why="Experts of one layer may lie on any rank, and differ in their values alone",
                fix="build the model from the same configuration on all ranks; num_gemms alone may differ",
            )
    return {
        name: expert_ranges([modules[name][0] for modules in told], name or "GroupedLinear")
        for name in told[0]
    }


def _with_cuts(
    planned: list[ModulePlan], dense: Grid, stays_whole: Callable[[Any, str], bool]
) -> list[ModulePlan]:
    """The plans, with the dims that FSDP2 shall cut of weights that are or will be quantized. Local operation.

    Args:
        planned: Of all modules, their experts known.
        dense: Sizes of the axes that dense weights lie on.
        stays_whole: Whether data parallelism leaves a module's own parameter whole.

    Raises:
        PlacementError: No cut of a quantized weight fits.
    """
    # At once: a mesh that an error proposes fits all of them.
    of_dense = plan_cuts(quantizable(item for item in planned if item.experts is None), dense, stays_whole)
    found = []
    for item in planned:
        cuts = of_dense.get(id(item.module), {})
        grid = item.meshes.grid
        if item.experts is not None:
            own = plan_cuts(quantizable([item]), grid, stays_whole).get(id(item.module), {})
            cuts = {item.registered(name): dim for name, dim in own.items()}
        if item.kind == "GroupedLinear":
            cuts = {**cuts, **single_cuts(item.module, grid, item.experts, item.name)}
        found.append(replace(item, cuts=cuts))
    return found
