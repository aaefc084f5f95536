"""Which rules a module gets: from TE's attributes to the placement table, with every check before anything changes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from te_fsdp import _te
from te_fsdp import layout as table
from te_fsdp.errors import MeshError, PlacementError, message
from te_fsdp.layout import PLAIN, ExpertRange, Layout, ParameterRule, expert_index
from te_fsdp.modules.grouped import check_single, single_parameters
from te_fsdp.parameters import binding_of
from te_fsdp.quantized.alignment import Grid

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

#: Kinds whose constructors divide sizes by ``tp_size``.
PARALLEL_KINDS = frozenset(
    {
        "Linear",
        "LayerNormLinear",
        "LayerNormMLP",
        "GroupedLinear",
        "DotProductAttention",
        "MultiheadAttention",
    }
)
_NORMS = ("layer_norm_weight", "layer_norm_bias")
_HEADS = ("num_attention_heads", "num_gqa_groups")
#: Arguments of TE's constructors that are divided by ``tp_size``. Those of linears depend on ``parallel_mode``.
_DIVIDED = {
    "TransformerLayer": (*_HEADS, "ffn_hidden_size"),
    "MultiheadAttention": _HEADS,
    "DotProductAttention": _HEADS,
    "LayerNormMLP": ("ffn_hidden_size",),
}
_BY_MODE = {"column": ("out_features",), "row": ("in_features",)}


@dataclass(frozen=True)
class Meshing:
    """The meshes that a module is bound to.

    Attributes:
        tp_mesh: 1-D tensor-parallel mesh.
        weight_mesh: 1-D mesh of the ranks that hold pieces of one weight.
        ep_mesh: 1-D expert-parallel mesh, of experts.
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
    """One module of the tree and what it will be bound with.

    Attributes:
        name: Name in the tree (``""`` for the root).
        module: The module.
        kind: TE kind, or ``None`` for modules that TE does not know.
        rules: Rule of each own parameter.
        experts: Which experts it holds, for a module that expert parallelism deals out.
        meshes: The meshes that it is bound to.
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


def quantizable(planned: Iterable[ModulePlan]) -> Iterator[tuple[str, nn.Module, str, ParameterRule]]:
    """Label, owner, name and rule of every parameter that TE may hold quantized and that is not bound yet."""
    for item in planned:
        if binding_of(item.module) is None:
            for name, rule in item.rules.items():
                if rule.quantizable and not rule.layout.is_grouped:  # experts may lie on different ranks
                    yield f"{item.name}.{name}" if item.name else name, item.module, name, rule


def plan_tree(root: nn.Module, tp_size: int) -> list[ModulePlan]:
    """Plan every module of the tree that has parameters, or that TE cuts by tp, or that the user constructs.

    Local operation; changes nothing.

    Args:
        root: Any tree of modules.
        tp_size: Size of the tp mesh, 1 when there is none.

    Raises:
        MeshError: A module was built for another tensor-parallel size.
        PlacementError: A TE module without rules, or with options that te_fsdp cannot make right.
    """
    layouts: dict[int, Layout] = {}
    per_head: set[int] = set()
    planned = []
    module: Any
    for name, module in root.named_modules():
        kind = _te.kind_of(module)
        label = name or type(module).__name__
        if kind == "DotProductAttention":
            _check_heads(module, label)
        if kind in PARALLEL_KINDS:
            _check_tp_size(module, kind, label, tp_size)
            _check_options(module, kind, label, tp_size)
            _refuse_computed_weights(module, label, tp_size)
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


def _refuse_computed_weights(module: Any, label: str, tp_size: int) -> None:
    """Raise for parametrized weights under tp: each rank would compute its part from parts that nobody cuts."""
    if tp_size > 1 and torch.nn.utils.parametrize.is_parametrized(module):
        raise PlacementError(
            f"{label}: a parametrization of {', '.join(module.parametrizations)} with tensor parallelism",
            expected="weights of TransformerEngine's modules as they are",
            got=f"tp_size={tp_size}",
            why="Norms and other functions of a whole weight would see the part of one rank",
            fix="leave the parametrization away, or shard the model without tp, over dp_shard",
        )


def _marked(rule: ParameterRule, parameter: object) -> ParameterRule:
    """A rule for a parameter that may be marked as TE and Megatron mark those that see a part of the sequence."""
    partial = rule.shard_dim is None and bool(getattr(parameter, "sequence_parallel", False))
    return replace(rule, partial_grad=True) if partial else rule


def _rules(
    module: Any, kind: str | None, own: dict[str, object], layout: Layout, per_head: bool
) -> dict[str, ParameterRule]:
    """Look the module's parameters up in the table."""
    sequence_parallel = bool(getattr(module, "sequence_parallel", False))
    if kind in ("Linear", "LayerNormLinear"):
        return table.linear_rules(
            [n for n in module.weight_names if n in own],
            [n for n in module.bias_names if n in own],
            module.parallel_mode,
            sequence_parallel=sequence_parallel,
            norm_names=[n for n in _NORMS if n in own],
            layout=layout,
        )
    if kind == "LayerNormMLP":
        names = (*_NORMS, "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        return table.mlp_rules(
            [n for n in names if n in own], module.activation, sequence_parallel=sequence_parallel
        )
    if kind == "GroupedLinear":
        # By local indices, or by global ones once it is bound.
        names = [name for name in own if expert_index(name) is not None]
        weights = [name for name in names if name.startswith("weight")]
        biases = [name for name in names if name.startswith("bias")]
        single = [name for name in own if name not in names]
        mode = module.parallel_mode
        return table.grouped_linear_rules(weights, biases, mode) | table.single_grouped_rules(single, mode)
    if kind in ("LayerNorm", "RMSNorm"):
        names = [n for n in ("weight", "bias") if n in own]
        return table.norm_rules(names, sequence_parallel=sequence_parallel, per_head=per_head)
    if kind == "DotProductAttention":
        return dict.fromkeys(own.keys() & {"softmax_offset"}, ParameterRule(0))  # one value per local head
    if kind is None:
        return dict.fromkeys(own, ParameterRule(None))
    return {}


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
    """Layouts of the original parameters of TE modules, bound or not, cut by tp or not. Local operation.

    What the rows of a fused projection mean does not depend on a mesh: query, key and value one under the other, or
    interleaved by heads. Rules know it only where tp cuts the rows.

    Returns:
        Per ``id`` of a module: layout of each own parameter.
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
            names = {"fc1_weight", "fc1_bias"} & layouts.keys()
            layouts.update({n: rule.layout for n, rule in table.mlp_rules(names, module.activation).items()})
        found[id(module)] = layouts
    return found


def _check_tp_size(module: Any, kind: str, label: str, tp_size: int) -> None:
    """The module must have been built for this tensor-parallel size; unsplit linears may be replicated."""
    built_for = int(module.tp_size)
    unsplit = kind in ("Linear", "LayerNormLinear", "GroupedLinear") and module.parallel_mode is None
    if built_for == tp_size or (unsplit and built_for == 1):
        return
    if tp_size == 1:
        got, fix = (
            f"tp_mesh=None or of size 1, but tp_size={built_for}",
            "pass the tensor-parallel mesh as tp_mesh",
        )
    else:
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
    if getattr(module, "fuse_wgrad_accumulation", False):
        problem = "fuse_wgrad_accumulation=True"
        why = "TE then adds weight gradients to main_grad and returns none, so that FSDP2 reduces nothing"
    elif _te.delays_weight_gradients(module):
        problem = "delay_wgrad_compute=True"
        why = "TE then writes .grad itself after FSDP2 has reduced"
    elif tp_size > 1 and _useless_sequence_parallel(module, kind):
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


def _useless_sequence_parallel(module: Any, kind: str) -> bool:
    """Whether TE takes ``sequence_parallel=True`` and then does nothing with it."""
    alone = kind == "GroupedLinear" or (
        kind in ("Linear", "LayerNormLinear") and module.parallel_mode is None
    )
    return alone and bool(module.sequence_parallel)


def check_divisible(kind: str, stock: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if ``tp_size`` does not divide what a module of TE would cut by it. Local operation.

    Args:
        kind: Name of the class.
        stock: TE's class.
        args: Positional arguments of its constructor.
        kwargs: Keywords of it; ``tp_group`` decides over ``tp_size``, as in TE.

    Raises:
        PlacementError: Names the argument.
    """
    try:
        given = inspect.signature(stock.__init__).bind_partial(None, *args, **kwargs).arguments
    except TypeError:
        return  # TE says which argument is wrong
    given = {**given, **given.get("kwargs", {})}
    group = given.get("tp_group")
    tp_size = group.size() if group is not None else given.get("tp_size", 1)
    names = _DIVIDED.get(kind, ())
    if kind in ("Linear", "LayerNormLinear", "GroupedLinear"):
        names = _BY_MODE.get(str(given.get("parallel_mode")), ())
    for name in names:
        size = given.get(name)
        if isinstance(size, int) and isinstance(tp_size, int) and tp_size > 1 and size % tp_size:
            raise PlacementError(_indivisible(kind, name, size, tp_size))


def _check_heads(module: Any, label: str) -> None:
    """The same of a ``DotProductAttention`` that is there: TE's rounds the number of local heads down in silence.

    Raises:
        PlacementError: Names the module.
    """
    for name in _HEADS:
        size = getattr(module, name)
        if size % module.tp_size:
            raise PlacementError(_indivisible(label, name, size, module.tp_size))


def _indivisible(label: str, name: str, size: int, tp_size: int) -> str:
    fitting = [n for n in range(tp_size - 1, 0, -1) if size % n == 0]
    return message(
        f"{label}: {name}={size} over tp_size={tp_size}",
        expected=f"a multiple of {tp_size}",
        got=size,
        why="Each tensor-parallel rank has as many of them",
        fix=f"tp={fitting[0]}, or {name}={-(-size // tp_size) * tp_size}",
    )
