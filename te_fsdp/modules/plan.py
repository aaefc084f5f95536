"""Placement plan of a model's modules, checked before any module changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from te_fsdp import layout as table
from te_fsdp.collectives.agreement import raised_on_all_ranks
from te_fsdp.errors import MeshError, OrderError, PlacementError
from te_fsdp.layout import PLAIN, ExpertRange, Layout, ParameterRule, expert_index
from te_fsdp.mesh_checks import (
    check_ascending,
    check_contains_tp,
    check_expert_ranks_disjoint,
    mesh_of_experts,
)
from te_fsdp.modules.grouped import (
    Selection,
    check_single,
    experts_over,
    find_experts,
    plan_single_shard_dims,
    single_names,
    single_parameters,
)
from te_fsdp.modules.options import HEADS, PARALLEL, check_multiple, check_options, check_tp_size
from te_fsdp.modules.user_dtensors import dim_to_shard, is_as_bound, place_user_dtensor
from te_fsdp.quantized.alignment import Grid, check_quantizer, plan_shard_dims
from te_fsdp.records import ModuleBinding, UserDTensor, binding_of, is_replicated, param_owners
from te_fsdp.upstream import te as _te


@dataclass(frozen=True)
class ModuleMeshes:
    """The meshes that a module is bound to, each 1-D."""

    tp_mesh: DeviceMesh | None = None
    weight_mesh: DeviceMesh | None = None  #: Mesh of the ranks that have shards of one weight
    ep_mesh: DeviceMesh | None = None  #: For experts only
    replicas: int = 1  #: Number of replicas of the model; 1 if the user calls FSDP2
    #: Mesh of an unsharded parameter of all experts: ``ep``, or (``ep``, ``tp``).
    experts_mesh: DeviceMesh | None = None
    single: DeviceMesh | None = None  #: Mesh of this rank alone, for a user's DTensor on axes of size 1

    @property
    def grid(self) -> Grid:
        """Return the sizes of the axes that shard a weight. The weight mesh also covers FSDP2's ranks."""
        tp = self.tp_mesh.size() if self.tp_mesh is not None else 1
        return Grid(self.replicas, self.weight_mesh.size() // tp if self.weight_mesh is not None else 1, tp)


@dataclass(frozen=True)
class ModulePlan:
    """Plan of the binding of one module of the tree."""

    name: str  #: Its name in the tree, ``""`` for the root
    module: Any
    kind: str | None  #: TE kind, or ``None`` for modules that are not TE's
    rules: dict[str, ParameterRule]  #: Rule of each direct parameter
    experts: ExpertRange | None = None  #: Experts of a module that expert parallelism distributes
    meshes: ModuleMeshes = ModuleMeshes()
    #: Sharded dim of each direct weight that is quantized or has all experts, by its name in the bound module.
    fsdp_dims: Mapping[str, int] = field(default_factory=dict)
    #: The user's DTensors among the parameters, by name.
    distributed: Mapping[str, UserDTensor] = field(default_factory=dict)

    def registered(self, name: str) -> str:
        """Return the name of a direct parameter in the bound module: that of all experts if it becomes part of it."""
        single = name.rstrip("0123456789")
        if name not in self.rules and single in self.rules:
            return single
        return name if self.experts is None else self.experts.registered_name(name)


def plan_modules(
    model: nn.Module,
    dense: ModuleMeshes,
    expert_meshes: ModuleMeshes,
    experts: Selection = None,
    *,
    stays_replicated: Callable[[Any, str], bool] = is_replicated,
) -> list[ModulePlan]:
    """Plan how each module is bound and in which dims FSDP2 must shard quantized weights. Changes nothing.

    Local operation without ``ep``. With ``ep`` it is collective over it (two small object all-gathers), and all
    its ranks raise if one does. Meshes are 1-D. ``experts`` selects the modules bound to the meshes ``expert_meshes``.
    ``stays_replicated`` selects parameters that data parallelism replicates.

    Raises:
        TeFsdpError: See :func:`te_fsdp.set_device_mesh`.
    """
    where, ep_mesh = f"set_device_mesh({type(model).__name__})", expert_meshes.ep_mesh
    if ep_mesh is None or ep_mesh.size() == 1:
        planned = _plan_local(model, dense, None, set(), where, stays_replicated)
    else:
        # Each rank of ep has different experts. If one raises, the others must not wait for it in
        # `experts_over`.
        with raised_on_all_ranks(ep_mesh, where):
            planned = _plan_local(
                model, dense, expert_meshes, find_experts(model, experts), where, stays_replicated
            )
        modules = {item.name: item.module for item in planned if item.meshes.ep_mesh is not None}
        expert_ranges = experts_over(modules, ep_mesh, where)
        planned = [replace(item, experts=expert_ranges.get(item.name)) for item in planned]
    # Plan all weights at once: a mesh proposed in an error must work for all of them.
    dense_dims = plan_shard_dims(
        _quantizable(item for item in planned if item.experts is None), dense.grid, stays_replicated
    )
    plans = []
    for item in planned:
        shard_dims = dense_dims.get(id(item.module), {})
        grid = item.meshes.grid
        if item.experts is not None:
            dims = plan_shard_dims(_quantizable([item]), grid, stays_replicated).get(id(item.module), {})
            shard_dims = {item.registered(name): dim for name, dim in dims.items()}
        if item.kind == "GroupedLinear":
            shard_dims = {**shard_dims, **plan_single_shard_dims(item.module, grid, item.experts, item.name)}
        for name, user_dtensor in item.distributed.items():
            if stays_replicated(item.module, name):
                continue
            ranks = (expert_meshes if user_dtensor.is_expert else dense).grid.dp_shard
            label = f"{item.name}.{name}" if item.name else name
            dim = dim_to_shard(label, item.module._parameters[name], user_dtensor, ranks)
            shard_dims = {**shard_dims, name: dim} if dim else shard_dims
        plans.append(replace(item, fsdp_dims=shard_dims))
    return plans


def _plan_local(
    model: nn.Module,
    dense: ModuleMeshes,
    experts: ModuleMeshes | None,
    names: set[str],
    where: str,
    stays_replicated: Callable[[Any, str], bool],
) -> list[ModulePlan]:
    """Plan the modules of this rank, before the comparison across ranks. ``names`` are FQNs of expert modules."""
    ep_mesh = None if experts is None else experts.ep_mesh
    for mesh, argument in ((dense.tp_mesh, "tp_mesh"), (ep_mesh, "ep_mesh")):
        if mesh is not None:
            check_ascending(mesh, argument, where)
    check_contains_tp(dense.tp_mesh, dense.weight_mesh, where, "weight")
    if experts is not None and ep_mesh is not None:
        check_contains_tp(dense.tp_mesh, experts.weight_mesh, where, "expert_weight")
        check_expert_ranks_disjoint(ep_mesh, experts.tp_mesh, experts.weight_mesh, where)
    planned = []
    for item in plan_tree(model, dense.tp_mesh.size() if dense.tp_mesh is not None else 1):
        meshes = experts if experts is not None and item.name in names else dense
        weights = [name for name, rule in item.rules.items() if rule.quantizable]
        if weights and all(stays_replicated(item.module, name) for name in weights):
            meshes = replace(meshes, weight_mesh=meshes.tp_mesh)  # data parallelism does not shard them
        if meshes.ep_mesh is not None and any(rule.layout.is_grouped for rule in item.rules.values()):
            meshes = replace(meshes, experts_mesh=mesh_of_experts(meshes.ep_mesh, meshes.tp_mesh, item.name))
        item = replace(item, meshes=meshes)
        # The placements of the user's DTensors replace rules. DTensors of a bound module are those of an earlier call.
        if binding_of(item.module) is None:
            label = item.name or type(item.module).__name__
            placed = {
                name: place_user_dtensor(f"{label}.{name}", p, meshes.tp_mesh, ep_mesh, meshes.single)
                for name, p in user_dtensors(item.module).items()
            }
            rules = {
                **item.rules,
                **{name: ParameterRule(dtensor.tp_dim) for name, dtensor in placed.items()},
            }
            item = replace(item, rules=rules, distributed=placed)
        _check_module(item)
        planned.append(item)
    return planned


def user_dtensors(module: Any) -> dict[str, DTensor]:
    """Return a module's DTensor parameters that TE does not read itself, by name. Local operation."""
    dtensors = {name: p for name, p in module._parameters.items() if isinstance(p, DTensor)}
    kind = _te.kind_of(module) if dtensors else None
    read: Collection[str] = ()
    if kind == "GroupedLinear":
        counted = [f"{prefix}{index}" for prefix in ("weight", "bias") for index in range(module.num_gemms)]
        read = {*counted, *single_names(module)}
    elif kind not in (None, "unknown"):
        read = _rules(module, kind, {}, PLAIN, False)
    return {name: p for name, p in dtensors.items() if name not in read}


def refuse_uneven_ties(model: nn.Module, items: Iterable[ModulePlan]) -> None:
    """Raise PlacementError for a tied parameter that tp shards for one of its modules only, or differently. Local.

    User-defined modules are not checked, because they may compute with shards.
    """
    planned = {id(item.module): item for item in items}
    rules_of: dict[int, dict[str, tuple[int | None, Layout]]] = {}
    for owner in param_owners(model):
        item = planned.get(id(owner.module))
        kind = _te.kind_of(owner.module)
        stock = type(owner.module).__module__.startswith("torch.nn.") if kind is None else kind != "unknown"
        if stock and not isinstance(owner.parameter, DTensor):
            rule = (
                item.rules.get(owner.name) if item is not None and item.meshes.tp_mesh is not None else None
            )
            sharding = (
                (None, PLAIN) if rule is None or rule.shard_dim is None else (rule.shard_dim, rule.layout)
            )
            rules_of.setdefault(id(owner.parameter), {})[owner.label] = sharding
    for rules in rules_of.values():
        if len(set(rules.values())) > 1:
            raise PlacementError(
                f"{', '.join(rules)}: one parameter, which tp shards differently for these modules",
                expected="modules that read the same rows or columns",
                got="; ".join(
                    f"{label}: {'not sharded' if dim is None else f'dim {dim}, {layout}'}"
                    for label, (dim, layout) in rules.items()
                ),
                why="Each rank has one shard, and one of the modules would compute with a part of its weight",
                fix="do not tie them under tensor parallelism, or set the same parallel_mode for both",
            )


def _check_module(item: ModulePlan) -> None:
    """Check the plan of one module, before any module changes. Local operation.

    Raises:
        OrderError: The module is bound to different meshes, or a parameter is already a DTensor.
        PlacementError: A parameter has too few dims for its rule, or a quantizer is not supported.
        MeshError: A quantized weight has no weight mesh, or ``tp_mesh`` contradicts the module's ``tp_group``.
    """
    meshes = item.meshes
    tp_mesh, weight_mesh = meshes.tp_mesh, meshes.weight_mesh
    mesh_name = "weight" if meshes.ep_mesh is None else "expert_weight"
    label = item.name or type(item.module).__name__
    if (binding := binding_of(item.module)) is not None:
        _check_same(label, binding, meshes)
        return
    for name, parameter in item.module._parameters.items():
        if name in item.distributed:
            continue
        if isinstance(parameter, DTensor) and not is_as_bound(parameter, item.rules.get(name), tp_mesh):
            raise OrderError(
                f"{label}.{name}: set_device_mesh after the parameter became a DTensor",
                expected="a plain parameter, as TE creates it, or a DTensor on tp_mesh with TE's placement",
                got=f"DTensor with placements {tuple(parameter.placements)}",
                why="FSDP2 would ignore the tensor-parallel placement, and checkpoints would lose tp shards",
                fix="call set_device_mesh before fully_shard, or call te_fsdp.fully_shard, which does both",
            )
        rule = item.rules.get(name)
        dim = rule.shard_dim if rule is not None and tp_mesh is not None else None
        if parameter is not None and dim is not None and dim >= parameter.ndim:
            raise PlacementError(
                f"{label}.{name}: its rule shards dim {dim} over tp",
                expected=f"a parameter with at least {dim + 1} dims",
                got=f"shape {tuple(parameter.shape)}",
                fix="keep the shapes of TransformerEngine's parameters",
            )
        is_te = parameter is not None and item.kind is not None
        quantizer = _te.weight_quantizer(item.module, name) if is_te else None
        if quantizer is None:
            continue
        check_quantizer(f"{label}.{name}", quantizer)
        # A rank computes the amax of its shard only. The scale is that of all shards.
        lacks_weight_mesh = tp_mesh is not None and tp_mesh.size() > 1 and weight_mesh is None
        if lacks_weight_mesh and _te.needs_shared_amax(quantizer):
            raise MeshError(
                f"{label}.{name}: {mesh_name}_mesh of a quantized weight with one scale per tensor",
                expected="the mesh of all ranks that shard it",
                got="None",
                why="Each rank would quantize its shard with a different scale",
                fix=f"pass {mesh_name}_mesh=te_fsdp.Meshes(...).{mesh_name}",
            )
    group = getattr(item.module, "tp_group", None)
    if item.kind in PARALLEL and group is not None and tp_mesh is not None and item.module.tp_size > 1:
        group_ranks, mesh_ranks = dist.get_process_group_ranks(group), tp_mesh.mesh.flatten().tolist()
        if sorted(group_ranks) != sorted(mesh_ranks):
            raise MeshError(
                f"{label}: tp_mesh",
                expected=f"the ranks of tp_group, {group_ranks}",
                got=mesh_ranks,
                fix="pass the mesh of tp_group, or build the module with tp_size only",
            )


def _check_same(label: str, binding: ModuleBinding, meshes: ModuleMeshes) -> None:
    """Raise OrderError if a repeated ``set_device_mesh`` passes different meshes."""
    bound = ModuleMeshes(binding.tp_mesh, binding.weight_mesh, binding.ep.mesh)
    has_same_axes = bound.tp_mesh == meshes.tp_mesh and bound.ep_mesh == meshes.ep_mesh
    # Without tp, FSDP2's shard axis was taken as the mesh.
    is_left_out = meshes.weight_mesh is None or (bound.weight_mesh is None and not binding.fsdp.is_managed)
    # A script may have flattened the same ranks under a name of its own.
    before, after = (m if m is None else m.mesh.tolist() for m in (bound.weight_mesh, meshes.weight_mesh))
    if has_same_axes and (before == after or is_left_out):
        return
    problem, fix = "with different meshes than before", "bind a model once; build a new model for a new mesh"
    if binding.fsdp.is_managed:
        problem, fix = "after fully_shard", "call set_device_mesh before fully_shard"
    raise OrderError(
        f"{label}: set_device_mesh {problem}",
        expected=_format_meshes(bound),
        got=_format_meshes(meshes),
        why="The parameters already have placements",
        fix=fix,
    )


def _format_meshes(meshes: ModuleMeshes) -> str:
    """Format the arguments of ``set_device_mesh`` for one module by ranks, which the repr of a mesh omits."""
    named = {"tp_mesh": meshes.tp_mesh, "weight_mesh": meshes.weight_mesh}
    if meshes.ep_mesh is not None:
        named |= {"ep_mesh": meshes.ep_mesh, "expert_weight_mesh": named.pop("weight_mesh")}
    texts = {name: "None" if mesh is None else f"ranks {mesh.mesh.tolist()}" for name, mesh in named.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _quantizable(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, nn.Module, str, ParameterRule]]:
    """Yield label, owner, name and rule of every parameter that may be quantized and is not bound yet."""
    for item in planned:
        if binding_of(item.module) is None:
            for name, rule in item.rules.items():
                if rule.quantizable and not rule.layout.is_grouped:  # experts may be on different ranks
                    yield f"{item.name}.{name}" if item.name else name, item.module, name, rule


def plan_tree(root: nn.Module, tp_size: int) -> list[ModulePlan]:
    """Plan every module of TE, and every other module with parameters. Local operation that changes nothing.

    Modules of TE without a rule (``te.ops``) are left out if ``tp_size`` is 1, or if they have no parameters.

    Raises:
        MeshError: A module was built for a different tp size.
        PlacementError: A module or a parameter has no rule, or a module has unsupported options.
    """
    # named_modules() yields an attention module before the projections in it, whose layouts depend on it.
    layouts: dict[int, Layout] = {}
    per_head: set[int] = set()
    planned = []
    modules: list[tuple[str, Any]] = list(root.named_modules())
    for name, module in modules:
        kind = _te.kind_of(module)
        label = name or type(module).__name__
        if kind == "DotProductAttention":  # TE silently rounds down the number of local heads
            for head in HEADS:
                check_multiple(label, head, getattr(module, head), module.tp_size)
        if kind in PARALLEL:
            check_tp_size(module, kind, label, tp_size)
            check_options(module, kind, label, tp_size)
        if kind == "MultiheadAttention":
            layouts.update(fused_layouts(module))
            per_head.update(id(norm) for norm in (module.q_norm, module.k_norm) if norm is not None)
        params = {n: p for n, p in module._parameters.items() if p is not None}
        if kind == "GroupedLinear":
            check_single(module, label)
            params = single_parameters(module)
        if kind == "unknown":
            if params and tp_size > 1:
                # With its module, because te.ops.Linear and te.Linear have the same name.
                kind_name = f"{type(module).__module__}.{type(module).__name__}"
                raise PlacementError(
                    f"{label}: {kind_name} has no placement rule",
                    expected=f"one of {', '.join(f'te.{supported}' for supported in _te.KINDS)}",
                    why="Its parameters would be saved and reduced incorrectly under tensor parallelism",
                    fix="use one of these modules, or no tensor parallelism",
                )
            continue
        if kind is None and not params:
            continue
        distributed = user_dtensors(module)
        of_te = {n: p for n, p in params.items() if n not in distributed}
        rules = _rules(module, kind, of_te, layouts.get(id(module), PLAIN), id(module) in per_head)
        rules |= dict.fromkeys(distributed, ParameterRule(None))  # until the meshes are known
        missing = sorted(params.keys() - rules.keys())
        if missing:
            raise PlacementError(
                f"{label}: no placement rule for parameter(s) {', '.join(missing)}",
                expected=f"the parameters of {kind}",
                fix="register additional parameters in a module of your own",
            )
        for n, p in params.items():  # TE and Megatron mark parameters whose gradient is partial over tp
            if rules[n].shard_dim is None and getattr(p, "sequence_parallel", False):
                rules[n] = replace(rules[n], partial_grad=True)
        planned.append(ModulePlan(name, module, kind, {n: rules[n] for n in params}))
    return planned


def _rules(
    module: Any, kind: str | None, params: dict[str, object], layout: Layout, per_head: bool
) -> dict[str, ParameterRule]:
    """Return the rules of all parameters that a module of this kind may have."""
    sequence_parallel = bool(getattr(module, "sequence_parallel", False))
    if kind in ("Linear", "LayerNormLinear"):
        names, mode = (module.weight_names, module.bias_names), module.parallel_mode
        return table.linear_rules(*names, mode, sequence_parallel=sequence_parallel, layout=layout)
    if kind == "LayerNormMLP":
        return table.mlp_rules(module.activation, sequence_parallel=sequence_parallel)
    if kind == "GroupedLinear":
        # Local indices, or global indices after binding.
        single = [name for name in params if expert_index(name) is None]
        weights = [name for name in params if name not in single and name.startswith("weight")]
        biases = [name for name in params if name not in single and name.startswith("bias")]
        mode = module.parallel_mode
        return table.grouped_linear_rules(weights, biases, mode) | table.single_grouped_rules(single, mode)
    if kind in ("LayerNorm", "RMSNorm"):
        is_partial = sequence_parallel or per_head  # q/k norms inside attention
        return dict.fromkeys(("weight", "bias"), ParameterRule(None, partial_grad=is_partial))
    if kind == "DotProductAttention":
        return {"softmax_offset": ParameterRule(0)}  # one value per local head
    return dict.fromkeys(params if kind is None else (), ParameterRule(None))


def fused_projection(attention: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return an attention's fused projection and the relative heights of its matrices; ``None`` without one."""
    if attention.attention_type == "self":
        projection = attention.layernorm_qkv if attention.input_layernorm else attention.qkv
        heads, groups = attention.num_attention_heads, attention.num_gqa_groups
        blocks: tuple[int, ...] = (heads, groups, groups)
    else:
        projection, blocks = attention.key_value, (1, 1)
    # Split projections are separate plain parameters.
    return (projection, blocks) if len(projection.weight_names) == 1 else None


def fused_layouts(attention: Any) -> Iterator[tuple[int, Layout]]:
    """Yield the stacked layouts of an attention's fused, non-interleaved projections by ``id`` of the projection."""
    fused = None if attention.qkv_weight_interleaved else fused_projection(attention)
    if fused is not None:
        yield id(fused[0]), Layout("stacked", fused[1])
