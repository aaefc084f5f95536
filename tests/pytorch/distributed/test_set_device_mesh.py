"""Effects of `set_device_mesh`.

Parameters that it does not change or rejects are tested, too.
"""

from __future__ import annotations

import pytest
from parity import binding as bodies, lifetime, mistakes
from parity.placements import PLACEMENTS

DP2_TP2 = {"dp_shard": 2, "tp": 2}
DP4 = {"dp_shard": 4}
TP2 = {"dp_shard": 1, "tp": 2}
HSDP = {"dp_replicate": 2, "dp_shard": 2}
HSDP_TP = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [DP2_TP2, DP4, HSDP], ids=["dp2_tp2", "dp4", "hsdp"])
@pytest.mark.parametrize("case", list(PLACEMENTS))
def test_placements_of_parameters(pool, case, axes):
    on_device = case in ("core_attention", "row", "layer_output_norm") or len(axes) == 1
    counts = pool.run(bodies.placements, 4, case=case, axes=axes, device="real" if on_device else "meta")
    assert min(counts) >= 1


@pytest.mark.ranks(8)
@pytest.mark.parametrize("case", ["layer", "mlp_swiglu_no_bias"])
def test_placements_with_replicas_and_tp(pool, case):
    pool.run(bodies.placements, 8, case=case, axes=HSDP_TP, device="meta")


_ROWS, _COLUMNS, _COPIES = "Shard(dim=0)", "Shard(dim=1)", "Replicate()"
_COLUMN = {"parallel_mode": "column"}
_PARALLEL = {"set_parallel_mode": True}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "args", "options", "expected"),
    [
        ("Linear", (32, 64), _COLUMN, {"weight": _ROWS, "bias": _ROWS}),
        ("LayerNormLinear", (32, 64), _COLUMN, {"layer_norm_weight": _COPIES, "weight": _ROWS}),
        ("LayerNormMLP", (32, 64), _PARALLEL, {"fc1_weight": _ROWS, "fc2_weight": _COLUMNS}),
        ("GroupedLinear", (2, 32, 64), {"parallel_mode": "row", "bias": False}, {"weight1": _COLUMNS}),
        ("LayerNorm", (32,), {}, {"weight": _COPIES, "bias": _COPIES}),
        ("RMSNorm", (32,), {}, {"weight": _COPIES}),
        ("DotProductAttention", (8, 4), {"softmax_type": "learnable"}, {"softmax_offset": _ROWS}),
        ("MultiheadAttention", (32, 8), _PARALLEL, {"qkv.key_weight": _ROWS, "proj.weight": _COLUMNS}),
        ("TransformerLayer", (32, 64, 8), _PARALLEL, {"layernorm_mlp.fc2_bias": _COPIES}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mesh_keywords_of_constructors(pool, device_type, name, args, options, expected):
    if name != "DotProductAttention":
        options = {**options, "device": device_type}
    pool.run(bodies.keywords, 2, name=name, args=args, options=options, expected=expected)


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("device", ["meta", "real"])
@pytest.mark.parametrize(
    ("axes", "wrap"),
    [(DP2_TP2, "te_fsdp"), (DP2_TP2, "torch"), (HSDP, "te_fsdp"), (HSDP, "torch"), (TP2, "copy")],
)
def test_attributes_of_parameters_are_kept(pool, axes, wrap, device):
    counts = pool.run(bodies.attributes, 2 if axes is TP2 else 4, axes=axes, wrap=wrap, device=device)
    assert min(counts) > 15


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axes", "wrap"), [(TP2, "tp"), (DP2_TP2, "reshard"), (DP2_TP2, "keep")])
def test_forward_reads_the_tensor_that_fsdp_manages(pool, axes, wrap):
    assert pool.run(bodies.identity, 2 if axes is TP2 else 4, axes=axes, wrap=wrap)[0] == 6


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [DP2_TP2, HSDP], ids=["dp2_tp2", "hsdp"])
def test_frozen_parameters(pool, axes):
    pool.run(bodies.frozen, 4, axes=axes)


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", ["mlp", "layer_norm", "rms_norm", "attention", "layer"])
@pytest.mark.parametrize(("axes", "wrap"), [(TP2, "tp"), (DP2_TP2, "te_fsdp"), (DP4, "te_fsdp")])
def test_no_grad_forward_equals_training_forward(pool, case, axes, wrap):
    pool.run(bodies.without_gradients, 2 if axes is TP2 else 4, case=case, axes=axes, wrap=wrap)


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("axes", "wrap"), [(TP2, "tp"), (DP2_TP2, "te_fsdp"), (HSDP, "te_fsdp")])
def test_te_checkpoint_equals_no_checkpoint(pool, axes, wrap, reentrant):
    pool.run(bodies.recomputed, 2 if axes is TP2 else 4, axes=axes, wrap=wrap, reentrant=reentrant)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axes", "wrap"), [(TP2, "tp"), (DP2_TP2, "te_fsdp"), (DP4, "te_fsdp")])
def test_deleted_model_is_freed(pool, axes, wrap):
    assert min(pool.run(lifetime.check_freed, 2 if axes is TP2 else 4, axes=axes, wrap=wrap)) > 30


@pytest.mark.ranks(2)
def test_deepcopy_of_a_bound_model(pool):
    pool.run(lifetime.check_deepcopy, 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tp_mesh", ["none", "one"])
def test_bound_model_without_tp_equals_stock_te(pool, tp_mesh):
    pool.run(lifetime.no_tensor_parallelism, 2, tp_mesh=tp_mesh)


@pytest.mark.ranks(2)
def test_binding_submodules_before_the_model(pool):
    pool.run(lifetime.bind_submodules_first, 2)


# --- errors: which module or parameter, expected, got, fix -----------------------------------------------------------

ERRORS = {
    "larger_mesh": (
        "MeshError",
        "up (Linear): tp_mesh of size 4: expected a module built with tp_size=4, got tp_size=2.",
        "Fix: build the module with tp_size=4",
    ),
    "no_tp_mesh": (
        "MeshError",
        "up (Linear): tp_mesh of size 1: expected a module built with tp_size=1, got tp_mesh=None or of "
        "size 1, but "
        "tp_size=2.",
        "Fix: pass the tensor-parallel mesh as tp_mesh.",
    ),
    "not_built_for_tp": (
        "MeshError",
        "up (Linear): tp_mesh of size 2: expected a module built with tp_size=2, got tp_size=1.",
        "Fix: build the module with tp_size=2",
    ),
    "two_axes_tp": (
        "MeshError",
        "set_device_mesh(Model): tp_mesh: expected a 1-D DeviceMesh, got 2-D mesh of shape (2, 2) with axes "
        "('dp', 'tp').",
        'Fix: pass one axis, for example tp_mesh=mesh["tp"]',
    ),
    "two_axes_weight": (
        "MeshError",
        "set_device_mesh(Model): weight_mesh: expected a 1-D DeviceMesh, got 2-D mesh of shape (2, 2)",
        "the flattened weight mesh of te_fsdp.Meshes.",
    ),
    "keyword": (
        "MeshError",
        "Linear: tp_mesh: expected a 1-D DeviceMesh, got 2-D mesh of shape (2, 2)",
        "Fix: ",
    ),
    "a_group": (
        "MeshError",
        "set_device_mesh(Model): tp_mesh: expected a 1-D DeviceMesh or None, got ProcessGroup.",
        "",
    ),
    "weight_without_tp": (
        "MeshError",
        "set_device_mesh(Model): weight_mesh: expected a mesh that contains the tp ranks [",
        "Fix: pass te_fsdp.Meshes(...).weight, the flattened (dp_shard, tp) mesh.",
    ),
    "other_ranks": ("MeshError", "up: tp_mesh: expected the ranks of tp_group, [", "Fix: "),
    "after_torch_fully_shard": (
        "OrderError",
        "up.weight: set_device_mesh after the parameter became a DTensor: expected a plain parameter, as "
        "TE creates it, or a DTensor on tp_mesh with TE's placement, got DTensor with placements "
        "(Shard(dim=0),).",
        "Fix: call set_device_mesh before fully_shard",
    ),
    "after_our_fully_shard": (
        "OrderError",
        "up: set_device_mesh after fully_shard: expected tp_mesh=None",
        "Fix: call set_device_mesh before fully_shard.",
    ),
    "our_fully_shard_after_torchs": (
        "OrderError",
        "FSDPModel: fully_shard on a module that is already sharded: expected a model without FSDP2, got "
        "FSDPModel.",
        "Fix: call te_fsdp.fully_shard once",
    ),
    "other_meshes": (
        "OrderError",
        "up: set_device_mesh with different meshes than before: expected tp_mesh=",
        "Fix: ",
    ),
    "world_too_small": (
        "MeshError",
        "Meshes.build: dp_replicate(1) * dp_shard(3) * tp(2) = 6: expected a product equal to WORLD_SIZE "
        "= 4, got 6.",
        "Fix: dp_shard=2, or dp_shard=-1 to infer it.",
    ),
    "world_not_divisible": (
        "MeshError",
        "Meshes.build: dp_replicate(1) * dp_shard(-1) * tp(3) = 3 * ?: expected a product equal to "
        "WORLD_SIZE = 4, "
        "got 3, which does not divide 4.",
        "Fix: sizes whose product is WORLD_SIZE.",
    ),
    "without_hooks_tp": (
        "OrderError",
        "up: forward with 'weight' on mesh axes ('dp_shard', 'tp'): expected the unsharded parameter, got "
        "a shard of it",
        "Fix: call the sharded module itself (not .forward or another method), or call unshard() first.",
    ),
    "without_hooks_dp": (
        "OrderError",
        "up: forward with 'weight' on mesh axes ('dp_shard',): expected the unsharded parameter, got a "
        "shard of it",
        "Fix: call the sharded module itself",
    ),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("which", list(ERRORS))
def test_mesh_mistakes_raise(pool, which):
    kind, start, fix = ERRORS[which]
    for error in pool.run_expect_error(mistakes.make, 4, which=which):
        assert error.type_name == kind, error
        assert error.message.startswith(start), error.message
        assert fix in error.message


@pytest.mark.ranks(4)
@pytest.mark.parametrize("which", ["two_axes", "other_ranks"])
def test_rejected_mesh_leaves_the_model_unchanged(pool, which):
    pool.run(mistakes.still_works_after, 4, which=which)
