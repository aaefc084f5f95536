"""Compare the placement table with TE: sharded dims, parameter marks, rejected options."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_fsdp
from te_fsdp import layout as table
from te_fsdp.errors import MeshError, PlacementError
from te_fsdp.layout import GATED_ACTIVATIONS
from te_fsdp.modules.plan import plan_tree

TP = 2
_PARALLEL = {"set_parallel_mode": True}
_GQA = {"num_gqa_groups": 4, **_PARALLEL}

# name: class, positional arguments, keywords, layouts of the parameters that are not plain
CASES: dict[str, tuple[str, tuple, dict, dict]] = {
    "linear": ("Linear", (16, 8), {}, {}),
    "linear_column": ("Linear", (16, 8), {"parallel_mode": "column"}, {}),
    "linear_row": ("Linear", (16, 8), {"parallel_mode": "row"}, {}),
    "linear_row_no_bias": ("Linear", (16, 8), {"parallel_mode": "row", "bias": False}, {}),
    "linear_split": ("Linear", (16, 8), {"parallel_mode": "column", "parameters_split": ("a_", "b_")}, {}),
    "layernorm_linear": ("LayerNormLinear", (16, 8), {"parallel_mode": "column"}, {}),
    "rmsnorm_linear": ("LayerNormLinear", (16, 8), {"parallel_mode": "column", "normalization": "RMSNorm"}, {}),
    "mlp": ("LayerNormMLP", (16, 8), _PARALLEL, {}),
    "mlp_no_bias": ("LayerNormMLP", (16, 8), {**_PARALLEL, "bias": False}, {}),
    "mlp_swiglu": (
        "LayerNormMLP",
        (16, 8),
        {**_PARALLEL, "activation": "swiglu"},
        {"fc1_weight": "stacked(1, 1)", "fc1_bias": "stacked(1, 1)"},
    ),
    "grouped_column": ("GroupedLinear", (3, 16, 8), {"parallel_mode": "column", "bias": False}, {}),
    "grouped_row": ("GroupedLinear", (3, 16, 8), {"parallel_mode": "row", "bias": False}, {}),
    "layer_norm": ("LayerNorm", (16,), {}, {}),
    "rms_norm": ("RMSNorm", (16,), {}, {}),
    "core_attention": ("DotProductAttention", (8, 4), {"softmax_type": "learnable"}, {}),
    "attention": ("MultiheadAttention", (32, 8), _GQA, {}),
    "attention_fused": (
        "MultiheadAttention",
        (32, 8),
        {**_GQA, "fuse_qkv_params": True, "qkv_weight_interleaved": False, "input_layernorm": True},
        {"layernorm_qkv.weight": "stacked(8, 4, 4)", "layernorm_qkv.bias": "stacked(8, 4, 4)"},
    ),
    "attention_fused_no_norm": (
        "MultiheadAttention",
        (32, 8),
        {**_GQA, "fuse_qkv_params": True, "qkv_weight_interleaved": False},
        {"qkv.weight": "stacked(8, 4, 4)", "qkv.bias": "stacked(8, 4, 4)"},
    ),
    "attention_interleaved": ("MultiheadAttention", (32, 8), {**_GQA, "fuse_qkv_params": True}, {}),
    "cross_attention": (
        "MultiheadAttention",
        (32, 8),
        {**_PARALLEL, "attention_type": "cross", "fuse_qkv_params": True, "qkv_weight_interleaved": False},
        {"key_value.weight": "stacked(1, 1)", "key_value.bias": "stacked(1, 1)"},
    ),
    "attention_qk_norm": ("MultiheadAttention", (32, 8), {**_PARALLEL, "qk_norm_type": "RMSNorm"}, {}),
    "layer": ("TransformerLayer", (32, 64, 8), {**_GQA, "activation": "geglu"}, dict.fromkeys(
        ("layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias"), "stacked(1, 1)"
    )),
    "decoder": ("TransformerLayer", (32, 64, 8), {**_PARALLEL, "layer_type": "decoder"}, {}),
}  # fmt: skip
NO_TP = ("LayerNorm", "RMSNorm")
# TE 2.20.2 marks these too: every rank adds the same values, but each to its own part of the sequence.
PER_HEAD = ("q_norm.weight", "k_norm.weight")


@pytest.fixture
def build(te, fake_world):
    """Build a case at a tensor-parallel size, on the device, as rank 0."""
    fake_world(TP)
    group = torch.distributed.new_group([0, 1])

    def make(case: str, tp_size: int, **more: object) -> nn.Module:
        kind, args, options, _ = CASES[case]
        tp = {} if kind in NO_TP or tp_size == 1 else {"tp_group": group, "tp_size": tp_size}
        device = {} if kind == "DotProductAttention" else {"device": "cpu"}
        return getattr(te, kind)(*args, **options, **tp, **device, **more)

    return make


def rules_of(module: nn.Module, tp_size: int) -> dict:
    return {
        f"{item.name}.{name}" if item.name else name: rule
        for item in plan_tree(module, tp_size)
        for name, rule in item.rules.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_shard_dim_equals_the_dim_that_te_divides(build, case):
    whole = dict(build(case, 1).named_parameters())
    module = build(case, TP)
    rules = rules_of(module, TP)
    parts = dict(module.named_parameters())
    assert rules.keys() == parts.keys() == whole.keys()
    for name, rule in rules.items():
        expected = list(whole[name].shape)
        if rule.shard_dim is not None:
            expected[rule.shard_dim] //= TP
        assert list(parts[name].shape) == expected, (name, rule)
    assert {n: str(r.layout) for n, r in rules.items() if r.layout.is_stacked} == CASES[case][3]
    assert all(rules[name].quantizable == (part.dim() == 2) for name, part in parts.items())


@pytest.mark.parametrize("case", CASES)
def test_shard_dim_equals_te_partition_dim(build, case):
    """Compare with TE's tensor-parallel marks. GroupedLinear sets them only on request (2.20.2)."""
    module = build(case, TP)
    if CASES[case][0] == "GroupedLinear":
        module.set_tensor_parallel_attributes()
    rules = rules_of(module, TP)
    marked = {
        name: parameter.partition_dim
        for name, parameter in module.named_parameters()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    sharded = {name: rule.shard_dim for name, rule in rules.items() if rule.shard_dim is not None}
    if case == "linear":
        marked.pop("weight")  # marked too, although nothing is cut without a parallel mode
    assert marked == {name: dim for name, dim in sharded.items() if not name.endswith("softmax_offset")}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_partial_gradients_match_te_sequence_parallel_marks(build, case, sequence_parallel):
    """TE marks parameters to sum over tp with `sequence_parallel`, except q/k norms."""
    kind = CASES[case][0]
    if kind == "DotProductAttention" or (kind == "GroupedLinear" and sequence_parallel):
        pytest.skip("has no sequence parallelism")
    if sequence_parallel and case == "linear":
        pytest.skip("TE forbids it without a parallel mode")
    module = build(case, TP, sequence_parallel=sequence_parallel)
    marked = {n for n, p in module.named_parameters() if getattr(p, "sequence_parallel", False)}
    for name in marked:  # te_fsdp's data without TE's marks
        module.get_parameter(name).sequence_parallel = False
    partial = {n for n, rule in rules_of(module, TP).items() if rule.partial_grad}
    assert partial - set(PER_HEAD) == marked - set(PER_HEAD)
    assert partial & set(PER_HEAD) == {n for n, _ in module.named_parameters() if n in PER_HEAD}
    if sequence_parallel and case not in ("linear_column", "linear_split", "linear_row_no_bias"):
        assert marked  # the comparison is not one of nothing with nothing


def test_gated_activations_match_te(te):
    from transformer_engine.pytorch.module import layernorm_mlp

    activations = set(layernorm_mlp._get_act_func_supported_list())
    rows = {a: te.LayerNormMLP(8, 4, activation=a, device="meta").fc1_weight.shape[0] for a in activations}
    assert {a for a, n in rows.items() if n == 8} == set(GATED_ACTIVATIONS)
    assert {n for a, n in rows.items() if a not in GATED_ACTIVATIONS} == {4}


def test_qkv_layout_is_taken_from_the_attention_module(build):
    """The projection planned alone is plain. Only its attention module determines that its rows are stacked."""
    attention = build("attention_fused", TP)
    alone = plan_tree(attention.layernorm_qkv, TP)[0].rules["weight"]
    within = rules_of(attention, TP)["layernorm_qkv.weight"]
    assert (str(alone.layout), str(within.layout)) == ("plain", "stacked(8, 4, 4)")


def test_plain_torch_modules_are_replicated(te):
    """They are replicated, partial if the user marks them, and not planned without parameters."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0].bias.sequence_parallel = True
    planned = plan_tree(model, TP)
    assert [(item.name, item.kind) for item in planned] == [("0", None)]
    rules = planned[0].rules
    assert {n: (r.shard_dim, r.partial_grad) for n, r in rules.items()} == {
        "weight": (None, False),
        "bias": (None, True),
    }


# ---------------------------------------------------------------------------------------------------- refusals


def refusal(error: type[Exception], model: nn.Module, tp_size: int) -> str:
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(error) as caught:
        plan_tree(model, tp_size)
    assert {n: id(p) for n, p in model.named_parameters()} == before
    return str(caught.value)


def test_modules_built_for_a_different_tp_size_are_rejected(build, te):
    assert refusal(MeshError, build("linear_column", 1), TP) == (
        "Linear (Linear): tp_mesh of size 2: expected a module built with tp_size=2, got tp_size=1. "
        "Sizes were divided "
        "by tp_size when the module was built. Fix: build the module with tp_size=2 (or tp_group of that "
        "size) and its "
        "parallel mode."
    )
    assert refusal(MeshError, nn.ModuleDict({"up": build("mlp", TP)}), 1) == (
        "up (LayerNormMLP): tp_mesh of size 1: expected a module built with tp_size=1, got tp_mesh=None "
        "or of size 1, "
        "but tp_size=2. Sizes were divided by tp_size when the module was built. Fix: pass the "
        "tensor-parallel mesh as "
        "tp_mesh."
    )
    # A linear without a parallel mode is replicated, whatever the size.
    assert plan_tree(te.Linear(4, 4, device="meta"), TP)[0].rules["weight"].shard_dim is None


def test_unsupported_te_options_are_rejected(build, te):
    def up(module: nn.Module) -> nn.Module:
        return nn.ModuleDict({"up": module})

    fused = te.Linear(4, 4, device="meta", fuse_wgrad_accumulation=True)
    assert refusal(PlacementError, up(fused), 1) == (
        "up (Linear): fuse_wgrad_accumulation=True is not supported. TE then adds weight gradients to "
        "main_grad and returns none, so FSDP2 reduces nothing. Fix: leave fuse_wgrad_accumulation off."
    )
    delayed = te.Linear(4, 4, device="meta", delay_wgrad_compute=True)
    assert refusal(PlacementError, up(delayed), 1) == (
        "up (Linear): delay_wgrad_compute=True is not supported. TE then writes .grad itself after FSDP2 "
        "has reduced. "
        "Fix: leave delay_wgrad_compute off."
    )
    tp = {"tp_group": torch.distributed.group.WORLD, "tp_size": TP}
    unsplit = te.LayerNormMLP(8, 8, device="meta", **tp)
    assert refusal(PlacementError, up(unsplit), TP) == (
        "up (LayerNormMLP): set_parallel_mode=False with tp_size=2 is not supported. TE shards the "
        "weights but never "
        "sums the partial outputs. Fix: set_parallel_mode=True."
    )

    attention = te.MultiheadAttention(32, 8, device="cpu", **tp)
    assert refusal(PlacementError, attention, TP) == (
        "MultiheadAttention (MultiheadAttention): set_parallel_mode=False with tp_size=2 is not "
        "supported. TE divides "
        "the heads but not the projections. Fix: set_parallel_mode=True."
    )


@pytest.mark.parametrize("mode", ["column", "row", None])
def test_grouped_weight_shard_dims_are_shifted_by_one(mode):
    """A grouped weight has one leading dim for the experts."""
    each = table.grouped_linear_rules(["weight0"], ["bias0"], mode)
    whole = table.single_grouped_rules(["weight", "bias"], mode)
    for name, rule in whole.items():
        dim = each[f"{name}0"].shard_dim
        assert rule.shard_dim == (None if dim is None else dim + 1)
        assert rule.layout.is_grouped and rule.quantizable == (name == "weight")


def test_single_grouped_weight_without_grouped_kernels_is_rejected(te):
    module = te.GroupedLinear(2, 4, 4, device="meta")
    module.single_grouped_weight = True  # as the constructor's option of that name leaves it
    assert refusal(PlacementError, module, 1) == (
        "GroupedLinear (GroupedLinear): single_grouped_weight=True with use_grouped_tensor=False is not "
        "supported. "
        "TransformerEngine supports one parameter for all experts only with its grouped kernels. "
        "Fix: GroupedLinear(..., use_grouped_tensor=True)."
    )


def test_user_parameters_on_a_te_module_are_rejected(te):
    class Scaled(te.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4, device="meta")
            self.gain = nn.Parameter(torch.ones(4))

    assert refusal(PlacementError, nn.ModuleDict({"up": Scaled()}), 1) == (
        "up: no placement rule for parameter(s) gain: expected the parameters of Linear. "
        "Fix: register additional parameters in a module of your own."
    )


def test_te_modules_without_placement_rules_are_rejected_under_tp(te):
    """They are rejected under tensor parallelism. Without it, FSDP2 alone is correct."""
    operation = te.ops.Bias(4, device="cpu")
    message = refusal(PlacementError, nn.ModuleDict({"shift": operation}), TP)
    assert message == (
        "shift: transformer_engine.pytorch.ops.basic.bias.Bias has no placement rule: expected one of "
        "te.LayerNormLinear, te.LayerNormMLP, te.GroupedLinear, te.Linear, te.LayerNorm, te.RMSNorm, "
        "te.DotProductAttention, te.MultiheadAttention, te.TransformerLayer. Its parameters "
        "would be saved and reduced incorrectly under tensor parallelism. Fix: use one of these modules, "
        "or no tensor parallelism."
    )
    assert plan_tree(operation, 1) == []
    assert te_fsdp.PlacementError is PlacementError
