"""The plan of a model's modules, with every check before anything changes: rules, meshes, order, quantized weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from te_fsdp import _te
from te_fsdp import layout as table
from te_fsdp.agree import raised_on_all_ranks
from te_fsdp.axes import check_1d, check_ascending, check_experts_apart, check_holds_tp, mesh_of_experts
from te_fsdp.errors import MeshError, OrderError, PlacementError
from te_fsdp.layout import PLAIN, ExpertRange, Layout, ParameterRule, expert_index
from te_fsdp.modules.grouped import (
    Selection,
    check_single,
    experts_over,
    find_experts,
    single_cuts,
    single_parameters,
)
from te_fsdp.parameters import Binding, binding_of, is_replicated
from te_fsdp.quantized.alignment import Grid, check_quantizer, plan_cuts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

#: Kinds whose constructors divide sizes by ``tp_size``.
_LINEARS = ("Linear", "LayerNormLinear", "GroupedLinear")
_PARALLEL = (*_LINEARS, "LayerNormMLP", "DotProductAttention", "MultiheadAttention")
HEADS = ("num_attention_heads", "num_gqa_groups")


@dataclass(frozen=True)
class Meshing:
    """The meshes that a module is bound to, each 1-D; ``ep_mesh`` for experts alone.

    Attributes:
        weight_mesh: Of the ranks that hold pieces of one weight.
        replicas: How many times these ranks hold the model, where that is known.
        experts_mesh: Mesh that a parameter of all experts lies on when nothing is sharded: ``ep``, or (``ep``, ``tp``).
    """

    tp_mesh: DeviceMesh | None = None
    weight_mesh: DeviceMesh | None = None
    ep_mesh: DeviceMesh | None = None
    replicas: int = 1
    experts_mesh: DeviceMesh | None = None

    @property
    def grid(self) -> Grid:
        """Sizes of the axes that cut a weight, also where the user calls FSDP2: the weight mesh tells its ranks."""
        tp = self.tp_mesh.size() if self.tp_mesh is not None else 1
        return Grid(self.replicas, self.weight_mesh.size() // tp if self.weight_mesh is not None else 1, tp)


@dataclass(frozen=True)
class ModulePlan:
    """One module of the tree, by its name there (``""`` for the root), and what it will be bound with.

    Attributes:
        kind: TE kind, or ``None`` for modules that TE does not know.
        rules: Rule of each own parameter.
        experts: Which experts it holds, for a module that expert parallelism deals out.
        cuts: Dim that FSDP2 shall cut of each own weight that is quantized or holds all experts, by the name that it
            has once it is bound.
    """

    name: str
    module: Any
    kind: str | None
    rules: dict[str, ParameterRule]
    experts: ExpertRange | None = None
    meshes: Meshing = Meshing()
    cuts: Mapping[str, int] = field(default_factory=dict)

    def registered(self, name: str) -> str:
        """The name that an own parameter has once the module is bound, that of all experts if it becomes one of it."""
        single = name.rstrip("0123456789")
        if name not in self.rules and single in self.rules:
            return single
        return name if self.experts is None else self.experts.registered_name(name)


def plan_modules(
    model: nn.Module,
    dense: Meshing,
    of_experts: Meshing,
    experts: Selection = None,
    *,
    stays_whole: Callable[[Any, str], bool] = is_replicated,
) -> list[ModulePlan]:
    """Settle how each module is bound, and which dims of quantized weights FSDP2 shall cut. Changes nothing.

    Local without ``ep``; with it collective over it (two small object gathers), and then all its ranks raise if one
    does. ``experts`` says which modules are bound to the meshes ``of_experts``, ``stays_whole`` which parameters data
    parallelism leaves whole.

    Raises:
        TeFsdpError: see :func:`te_fsdp.set_device_mesh`.
    """
    where, ep_mesh = f"set_device_mesh({type(model).__name__})", of_experts.ep_mesh
    check_1d(ep_mesh, "ep_mesh", where)
    if ep_mesh is None or ep_mesh.size() == 1:
        planned = _plan(model, dense, None, set(), where, stays_whole)
    else:
        with raised_on_all_ranks(ep_mesh, where):
            planned = _plan(model, dense, of_experts, find_experts(model, experts), where, stays_whole)
        modules = {item.name: item.module for item in planned if item.meshes.ep_mesh is not None}
        held = experts_over(modules, ep_mesh, where)
        planned = [replace(item, experts=held.get(item.name)) for item in planned]
    return _with_cuts(planned, dense.grid, stays_whole)


def _plan(
    model: nn.Module,
    dense: Meshing,
    experts: Meshing | None,
    names: set[str],
    where: str,
    stays_whole: Callable[[Any, str], bool],
) -> list[ModulePlan]:
    """The plan of this rank alone, as far as it can be made without the others; ``names`` are those of experts."""
    check_1d(dense.tp_mesh, "tp_mesh", where)
    for meshes, argument in ((dense, "weight_mesh"), (experts or dense, "expert_weight_mesh")):
        check_1d(meshes.weight_mesh, argument, where)
    ep_mesh = None if experts is None else experts.ep_mesh
    for mesh, argument in ((dense.tp_mesh, "tp_mesh"), (ep_mesh, "ep_mesh")):
        if mesh is not None:
            check_ascending(mesh, argument, where)
    check_holds_tp(dense.tp_mesh, dense.weight_mesh, where, "weight")
    if experts is not None and ep_mesh is not None:
        check_holds_tp(dense.tp_mesh, experts.weight_mesh, where, "expert_weight")
        check_experts_apart(ep_mesh, experts.tp_mesh, experts.weight_mesh, where)
    planned = []
    for item in plan_tree(model, dense.tp_mesh.size() if dense.tp_mesh is not None else 1):
        meshes = experts if experts is not None and item.name in names else dense
        weights = [name for name, rule in item.rules.items() if rule.quantizable]
        if weights and all(stays_whole(item.module, name) for name in weights):
            meshes = replace(meshes, weight_mesh=meshes.tp_mesh)  # data parallelism does not cut them
        if meshes.ep_mesh is not None and any(rule.layout.is_grouped for rule in item.rules.values()):
            meshes = replace(meshes, experts_mesh=mesh_of_experts(meshes.ep_mesh, meshes.tp_mesh, item.name))
        planned.append(replace(item, meshes=meshes))
        _check_item(planned[-1])
    return planned


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
        if isinstance(parameter, DTensor) and item.kind is None and parameter.device_mesh != tp_mesh:
            raise _distributed_already(f"{label}.{name}", parameter)
        if isinstance(parameter, DTensor) and item.kind is not None:
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
                f"{item.name}: shard dim {dim}", expected=f"{parameter.ndim} dims", got=tuple(parameter.shape)
            )
        known = parameter is not None and item.kind is not None
        quantizer = _te.weight_quantizer(item.module, name) if known else None
        if quantizer is None:
            continue
        check_quantizer(f"{label}.{name}", quantizer)
        is_cut_alone = tp_mesh is not None and tp_mesh.size() > 1 and weight_mesh is None
        if is_cut_alone and _te.needs_shared_amax(quantizer):
            raise MeshError(
                f"{label}.{name}: {which}_mesh of a quantized weight with one scale per tensor",
                expected="the mesh of all ranks that hold pieces of it",
                got="None",
                why="Each rank would quantize its piece with a scale of its own",
                fix=f"pass {which}_mesh=te_fsdp.Meshes(...).{which}",
            )
    group = getattr(item.module, "tp_group", None)
    if item.kind in _PARALLEL and group is not None and tp_mesh is not None and item.module.tp_size > 1:
        have, want = dist.get_process_group_ranks(group), tp_mesh.mesh.flatten().tolist()
        if sorted(have) != sorted(want):
            raise MeshError(
                f"{label}: tp_mesh",
                expected=f"the ranks of tp_group, {have}",
                got=want,
                fix="pass the mesh that tp_group belongs to, or build the module with tp_size alone",
            )


def _distributed_already(label: str, parameter: DTensor) -> OrderError:
    """Return the error for a parameter that the user or FSDP2 has distributed."""
    return OrderError(
        f"{label}: a parameter that is a DTensor already, on mesh axes {parameter.device_mesh.mesh_dim_names}",
        expected="a plain tensor, or a DTensor on the tp mesh",
        got=f"DTensor with placements {tuple(parameter.placements)}",
        why="te_fsdp does not support parameters that were distributed over other axes",
        fix="call set_device_mesh before torch's fully_shard. Register plain tensors; for experts leave the parameters "
        "of GroupedLinear in place, which te_fsdp.fully_shard distributes over ep",
    )


def _check_same(label: str, binding: Binding, meshes: Meshing) -> None:
    """A second call may only repeat the first."""
    known = Meshing(binding.tp_mesh, binding.weight_mesh, binding.ep_mesh)
    same = known.tp_mesh == meshes.tp_mesh and known.ep_mesh == meshes.ep_mesh
    # Without tp, FSDP2's shard axis was taken as the mesh.
    is_left_out = meshes.weight_mesh is None or (known.weight_mesh is None and not binding.under_fsdp)
    if same and (known.weight_mesh == meshes.weight_mesh or is_left_out):
        return
    what, fix = "with other meshes than before", "bind a model once; build a new one for a new mesh"
    if binding.under_fsdp:
        what, fix = "after fully_shard", "call set_device_mesh before fully_shard"
    raise OrderError(
        f"{label}: set_device_mesh {what}",
        expected=_meant(known),
        got=_meant(meshes),
        why="The parameters are placed already",
        fix=fix,
    )


def _meant(meshes: Meshing) -> str:
    """The arguments of ``set_device_mesh`` that concern one module, by ranks, which a mesh's own text leaves out."""
    named = {"tp_mesh": meshes.tp_mesh, "weight_mesh": meshes.weight_mesh}
    if meshes.ep_mesh is not None:
        named = {
            "tp_mesh": meshes.tp_mesh,
            "ep_mesh": meshes.ep_mesh,
            "expert_weight_mesh": meshes.weight_mesh,
        }
    texts = {name: "None" if mesh is None else f"ranks {mesh.mesh.tolist()}" for name, mesh in named.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _with_cuts(
    planned: list[ModulePlan], dense: Grid, stays_whole: Callable[[Any, str], bool]
) -> list[ModulePlan]:
    """The plans, with the dims that FSDP2 shall cut of weights that are or will be quantized. Local operation."""
    # At once: a mesh that an error proposes fits all of them.
    of_dense = plan_cuts(_quantizable(item for item in planned if item.experts is None), dense, stays_whole)
    found = []
    for item in planned:
        cuts = of_dense.get(id(item.module), {})
        grid = item.meshes.grid
        if item.experts is not None:
            own = plan_cuts(_quantizable([item]), grid, stays_whole).get(id(item.module), {})
            cuts = {item.registered(name): dim for name, dim in own.items()}
        if item.kind == "GroupedLinear":
            cuts = {**cuts, **single_cuts(item.module, grid, item.experts, item.name)}
        found.append(replace(item, cuts=cuts))
    return found


def _quantizable(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, nn.Module, str, ParameterRule]]:
    """Label, owner, name and rule of every parameter that TE may hold quantized and that is not bound yet."""
    for item in planned:
        if binding_of(item.module) is None:
            for name, rule in item.rules.items():
                if rule.quantizable and not rule.layout.is_grouped:  # experts may lie on different ranks
                    yield f"{item.name}.{name}" if item.name else name, item.module, name, rule


def plan_tree(root: nn.Module, tp_size: int) -> list[ModulePlan]:
    """Plan every module of the tree that has parameters, or that TE cuts by tp, or that the user constructs.

    Local operation; changes nothing. Raises ``MeshError`` for a module that was built for another tensor-parallel size,
    ``PlacementError`` for one without rules, or with options that te_fsdp cannot make right.
    """
    layouts: dict[int, Layout] = {}
    per_head: set[int] = set()
    planned = []
    modules: list[tuple[str, Any]] = list(root.named_modules())
    for name, module in modules:
        kind = _te.kind_of(module)
        label = name or type(module).__name__
        if kind == "DotProductAttention":  # TE rounds the number of local heads down in silence
            for head in HEADS:
                check_multiple(label, head, getattr(module, head), module.tp_size)
        if kind in _PARALLEL:
            _check_tp_size(module, kind, label, tp_size)
            _check_options(module, kind, label, tp_size)
        if kind == "MultiheadAttention":
            layouts.update(_fused_layouts(module))
            per_head.update(id(norm) for norm in (module.q_norm, module.k_norm) if norm is not None)
        own = {n: p for n, p in module._parameters.items() if p is not None}
        if kind == "GroupedLinear":
            check_single(module, label)
            own = single_parameters(module)
        if kind == "unknown":
            if own and tp_size > 1:
                raise PlacementError(
                    f"{label}: {type(module).__name__} has no placement rule",
                    expected=f"one of {', '.join(_te.KINDS)}",
                    why="Its parameters would be saved and reduced wrongly under tensor parallelism",
                    fix="use one of these modules, or no tensor parallelism",
                )
            continue
        if kind is None and not own:
            continue
        rules = _rules(module, kind, own, layouts.get(id(module), PLAIN), id(module) in per_head)
        missing = sorted(own.keys() - rules.keys())
        if missing:
            raise PlacementError(
                f"{label}: no placement rule for parameter(s) {', '.join(missing)}",
                expected=f"the parameters of {kind}",
                fix="give parameters of your own to a module of your own",
            )
        planned.append(ModulePlan(name, module, kind, {n: _marked(rules[n], p) for n, p in own.items()}))
    return planned


def _marked(rule: ParameterRule, parameter: object) -> ParameterRule:
    """A rule for a parameter that may be marked as TE and Megatron mark those that see a part of the sequence."""
    partial = rule.shard_dim is None and bool(getattr(parameter, "sequence_parallel", False))
    return replace(rule, partial_grad=True) if partial else rule


def _rules(
    module: Any, kind: str | None, own: dict[str, object], layout: Layout, per_head: bool
) -> dict[str, ParameterRule]:
    """What the table says of the module's parameters, of all that a module of this kind may have."""
    sequence_parallel = bool(getattr(module, "sequence_parallel", False))
    if kind in ("Linear", "LayerNormLinear"):
        names, mode = (module.weight_names, module.bias_names), module.parallel_mode
        return table.linear_rules(*names, mode, sequence_parallel=sequence_parallel, layout=layout)
    if kind == "LayerNormMLP":
        return table.mlp_rules(module.activation, sequence_parallel=sequence_parallel)
    if kind == "GroupedLinear":
        # By local indices, or by global ones once it is bound.
        single = [name for name in own if expert_index(name) is None]
        weights = [name for name in own if name not in single and name.startswith("weight")]
        biases = [name for name in own if name not in single and name.startswith("bias")]
        mode = module.parallel_mode
        return table.grouped_linear_rules(weights, biases, mode) | table.single_grouped_rules(single, mode)
    if kind in ("LayerNorm", "RMSNorm"):
        return table.norm_rules(sequence_parallel=sequence_parallel, per_head=per_head)
    if kind == "DotProductAttention":
        return {"softmax_offset": ParameterRule(0)}  # one value per local head
    return dict.fromkeys(own if kind is None else (), ParameterRule(None))


def _fused_projection(attention: Any) -> tuple[Any, tuple[int, ...]] | None:
    """An attention's fused projection and the relative heights of what it stacks; ``None`` where it has none."""
    if attention.attention_type == "self":
        projection = attention.layernorm_qkv if attention.input_layernorm else attention.qkv
        heads, groups = attention.num_attention_heads, attention.num_gqa_groups
        blocks: tuple[int, ...] = (heads, groups, groups)
    else:
        projection, blocks = attention.key_value, (1, 1)
    # Split projections are one plain parameter each.
    return (projection, blocks) if len(projection.weight_names) == 1 else None


def _fused_layouts(attention: Any) -> Iterator[tuple[int, Layout]]:
    """Stacked layouts of an attention's fused, non-interleaved projections, by ``id`` of the projection."""
    fused = None if attention.qkv_weight_interleaved else _fused_projection(attention)
    if fused is not None:
        yield id(fused[0]), Layout("stacked", fused[1])


def fused_matrices(root: nn.Module) -> dict[tuple[int, str], tuple[int, tuple[int, ...]]]:
    """Weights of TE modules whose rows are those of several matrices: fused QKV or KV, gated fc1. Local operation.

    Returns:
        Per ``id`` of a module and name of a weight: how often the matrices take turns along the rows, and how many
        rows each has in a turn, in relation to the others: ``(1, (1, 1))`` is gate over up, ``(2, (4, 1, 1))`` an
        interleaved QKV of two groups of four query heads.
    """
    found = {}
    modules: list[Any] = list(root.modules())
    for module in modules:
        kind = _te.kind_of(module)
        fused = _fused_projection(module) if kind == "MultiheadAttention" else None
        if fused is not None:
            (projection, blocks), turns = fused, 1
            if module.qkv_weight_interleaved:
                turns = int(module.num_gqa_groups)
                blocks = (blocks[0] // turns, 1, 1) if len(blocks) == 3 else blocks
            found[id(projection), projection.weight_names[0]] = turns, blocks
        if kind == "LayerNormMLP" and module.activation in table.GATED_ACTIVATIONS:
            found[id(module), "fc1_weight"] = 1, (1, 1)
    return found


def original_layouts(root: nn.Module) -> dict[int, dict[str, Layout]]:
    """Layouts of the own parameters of TE modules, bound or not, cut by tp or not, by ``id`` of the module. Local.

    What the rows of a fused projection mean does not depend on a mesh: query, key and value one under the other, or
    interleaved by heads. Rules know it only where tp cuts the rows.
    """
    fused: dict[int, Layout] = {}
    found: dict[int, dict[str, Layout]] = {}
    modules: list[Any] = list(root.modules())
    for module in modules:
        kind = _te.kind_of(module)
        if kind == "MultiheadAttention":
            fused.update(_fused_layouts(module))
        if kind in (None, "unknown"):
            continue
        layouts = dict.fromkeys(module._parameters, PLAIN)
        if kind in ("Linear", "LayerNormLinear"):
            names = {*module.weight_names, *module.bias_names} & layouts.keys()
            layouts.update(dict.fromkeys(names, fused.get(id(module), PLAIN)))
        elif kind == "LayerNormMLP":
            rules = table.mlp_rules(module.activation)
            layouts = {name: rules[name].layout if name in rules else PLAIN for name in layouts}
        found[id(module)] = layouts
    return found


def _check_tp_size(module: Any, kind: str, label: str, tp_size: int) -> None:
    """The module must have been built for this tensor-parallel size; unsplit linears may be replicated."""
    built_for = int(module.tp_size)
    unsplit = kind in _LINEARS and module.parallel_mode is None
    if built_for == tp_size or (unsplit and built_for == 1):
        return
    got = f"tp_mesh=None or of size 1, but tp_size={built_for}"
    fix = "pass the tensor-parallel mesh as tp_mesh"
    if tp_size > 1:
        got = f"tp_size={built_for}"
        fix = f"build the module with tp_size={tp_size} (or tp_group of that size) and its parallel mode"
    raise MeshError(
        f"{label} ({kind}): tp_mesh of size {tp_size}",
        expected=f"a module built with tp_size={tp_size}",
        got=got,
        why="Sizes were divided by tp_size when the module was built",
        fix=fix,
    )


def _check_options(module: Any, kind: str, label: str, tp_size: int) -> None:
    """Refuse options under which gradients or outputs would be silently wrong."""
    problem = why = ""
    unsplit = kind == "GroupedLinear" or (kind in _LINEARS and module.parallel_mode is None)
    if getattr(module, "fuse_wgrad_accumulation", False):
        problem = "fuse_wgrad_accumulation=True"
        why = "TE then adds weight gradients to main_grad and returns none, so that FSDP2 reduces nothing"
    elif _te.delays_weight_gradients(module):
        problem = "delay_wgrad_compute=True"
        why = "TE then writes .grad itself after FSDP2 has reduced"
    elif tp_size > 1 and unsplit and module.sequence_parallel:
        problem = "sequence_parallel=True"
        why = "This module communicates nothing over tp: it neither gathers its input nor adds up weight gradients"
    elif tp_size > 1 and kind == "LayerNormMLP" and not module.set_parallel_mode:
        problem = f"set_parallel_mode=False with tp_size={tp_size}"
        why = "TE cuts the weights but never sums the partial outputs"
    elif tp_size > 1 and kind == "MultiheadAttention" and module.proj.parallel_mode is None:
        problem = f"set_parallel_mode=False with tp_size={tp_size}"
        why = "TE divides the heads but not the projections"
    if problem:
        fix = "set_parallel_mode=True" if "parallel_mode" in problem else f"leave {problem.split('=')[0]} off"
        raise PlacementError(f"{label} ({kind}): {problem} is not supported", why=why, fix=fix)
    if tp_size > 1 and torch.nn.utils.parametrize.is_parametrized(module):
        raise PlacementError(
            f"{label}: a parametrization of {', '.join(module.parametrizations)} with tensor parallelism",
            expected="weights of TransformerEngine's modules as they are",
            got=f"tp_size={tp_size}",
            why="Norms and other functions of a whole weight would see the part of one rank",
            fix="leave the parametrization away, or shard the model without tp, over dp_shard",
        )


def check_multiple(label: str, name: str, size: int, tp_size: int) -> None:
    """Raise ``PlacementError`` unless ``tp_size`` divides what TE cuts by it: ``size`` of the argument ``name``."""
    if size % tp_size:
        fitting = next(n for n in range(tp_size - 1, 0, -1) if size % n == 0)
        raise PlacementError(
            f"{label}: {name}={size} over tp_size={tp_size}",
            expected=f"a multiple of {tp_size}",
            got=size,
            why="Each tensor-parallel rank has as many of them",
            fix=f"tp={fitting}, or {name}={-(-size // tp_size) * tp_size}",
        )
