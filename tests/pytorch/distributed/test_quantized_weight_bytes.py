"""Quantized weights, whose bytes equal one process on every mesh."""

from __future__ import annotations

import pytest
from checkpointing.selection import is_full
from quantization import weight_bytes, weight_writes
from quantization.models import why_no_hybrid_linear
from quantization.weight_bytes import steps_of

from te_fsdp.layout import STRATEGIES

# (dp_replicate, tp, ranks)
MESHES = {
    "dp2xtp2": (1, 2, 4),
    "dp4": (1, 1, 4),
    "tp4": (1, 4, 4),
    "hsdp2x2": (2, 1, 4),
    "hsdp2x2xtp2": (2, 2, 8),
}


def meshes(*names: str) -> list:
    return [pytest.param(MESHES[n], id=n, marks=pytest.mark.ranks(MESHES[n][2])) for n in names]


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("mesh", meshes(*MESHES))
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_bytes_and_scales_equal_one_process(pool, recipe, mesh):
    """Check initial bytes against stock TE, and each step against the quantized full main weight."""
    dp_replicate, tp, ranks = mesh
    results = pool.run(
        weight_bytes.training, ranks, kind="mlp_swiglu", recipe=recipe, dp_replicate=dp_replicate, tp=tp
    )
    # fc1 and fc2, bytes and scale of each
    assert results == [{"init": 4, "steps": 4 * steps_of(recipe), "gathered": 2}] * ranks


@pytest.mark.covering(strength=1)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("mesh", meshes("dp2xtp2", "tp4"))
@pytest.mark.parametrize(("recipe", "reshard_after_forward"), [("delayed", True), ("current", False)])
def test_bytes_and_scales_equal_one_process_on_hopper(pool, recipe, reshard_after_forward, mesh):
    """Check the transposes that Hopper keeps. A valid transpose matches the bytes."""
    dp_replicate, tp, ranks = mesh
    options = {"kind": "mlp_gelu", "recipe": recipe, "dp_replicate": dp_replicate, "tp": tp}
    results = pool.run(weight_bytes.training, ranks, reshard_after_forward=reshard_after_forward, **options)
    assert results == [{"init": 4, "steps": 4 * steps_of(recipe), "gathered": 2}] * ranks


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("tp", "fsdp", "reshard_after_forward"), [(2, True, True), (2, True, False), (4, False, True)]
)
def test_amax_history_of_a_different_length(pool, tp, fsdp, reshard_after_forward):
    """Check a model that was built with a longer amax history than in training."""
    options = {"kind": "mlp_gelu", "dp_replicate": 1, "tp": tp, "fsdp": fsdp}
    results = pool.run(
        weight_bytes.training,
        4,
        recipe="delayed, longer",
        reshard_after_forward=reshard_after_forward,
        **options,
    )
    assert results == [{"init": 4, "steps": 4 * weight_bytes.STEPS, "gathered": 2}] * 4


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("mesh", meshes("dp2xtp2", "hsdp2x2"))
@pytest.mark.parametrize(("recipe", "buffers"), [("block", 8), ("mxfp8", 8), ("nvfp4", 12)])
def test_block_formats_equal_one_process(pool, recipe, buffers, mesh):
    """Check rowwise and columnwise bytes and scales, and for NVFP4 the amaxes of the full weight."""
    dp_replicate, tp, ranks = mesh
    results = pool.run(
        weight_bytes.training, ranks, kind="mlp_gelu", recipe=recipe, dp_replicate=dp_replicate, tp=tp
    )
    assert results == [{"init": buffers, "steps": buffers * steps_of(recipe), "gathered": 2}] * ranks


FORMATS = ["e4m3", "e5m2", "block", "mxfp8", "bf16"]
# Hopper has no MXFP8, and no column-wise float8 alone (TE 2.20.2).
ON_HOPPER = {"rowwise": ["e4m3", "e5m2", "block", "bf16"], "columnwise": ["block", "bf16"]}


# One scale for a tensor, in the one part or the other, is what a gather must hand over.
@pytest.mark.covering(
    always=[{"rowwise": "e4m3", "columnwise": way} for way in ("e5m2", "block")]
    + [{"rowwise": "mxfp8", "columnwise": "e4m3"}],
    strength=1,
)
@pytest.mark.parametrize("mesh", meshes("dp2xtp2"))
@pytest.mark.parametrize("columnwise", FORMATS)
@pytest.mark.parametrize("rowwise", FORMATS)
def test_hybrid_weights_of_every_pair_of_formats(pool, arch, rowwise, columnwise, mesh):
    """Check custom recipes with different forward and backward formats over several steps."""
    if arch.startswith("9") and not (
        rowwise in ON_HOPPER["rowwise"] and columnwise in ON_HOPPER["columnwise"]
    ):
        pytest.skip(f"no {rowwise}/{columnwise} on {arch}")
    _pair(pool, rowwise, columnwise, mesh)


@pytest.mark.cpu
@pytest.mark.covering(always=[{"rowwise": "e4m3", "columnwise": "block"}], strength=1)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("mesh", meshes("dp2xtp2"))
@pytest.mark.parametrize("columnwise", ON_HOPPER["columnwise"])
@pytest.mark.parametrize("rowwise", ON_HOPPER["rowwise"])
def test_hybrid_weights_of_every_pair_of_formats_on_hopper(pool, rowwise, columnwise, mesh):
    _pair(pool, rowwise, columnwise, mesh)


def _pair(pool, rowwise, columnwise, mesh) -> None:
    dp_replicate, tp, ranks = mesh
    buffers = {f"{rowwise}/{columnwise}": 2 * sum(1 if way == "bf16" else 2 for way in (rowwise, columnwise))}
    options = {"kind": "mlp_gelu", "dp_replicate": dp_replicate, "tp": tp}
    assert pool.run(weight_bytes.trainings, ranks, recipes=list(buffers), **options) == [buffers] * ranks


@pytest.mark.covering(always=[{"mesh": MESHES["dp4"], "reshard_after_forward": True}], strength=1)
@pytest.mark.parametrize("mesh", meshes("dp4", "tp4", "hsdp2x2", "hsdp2x2xtp2"))
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_hybrid_weights_on_every_mesh(pool, arch, mesh, reshard_after_forward):
    dp_replicate, tp, ranks = mesh
    options = {"kind": "mlp_swiglu", "dp_replicate": dp_replicate, "tp": tp}
    options |= {"reshard_after_forward": reshard_after_forward}
    buffers = {"e4m3/bf16": 6, "e4m3/block" if arch.startswith("9") else "block/e4m3": 8}
    results = pool.run(weight_bytes.trainings, ranks, recipes=list(buffers), **options)
    assert results == [buffers] * ranks


@pytest.mark.parametrize("mesh", meshes("dp2xtp2"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hybrid_weights_under_every_strategy(pool, arch, strategy, mesh, request, matrix_seed):
    """Check bytes and scales of both parts, and the forward's weights, after steps."""
    dp_replicate, tp, ranks = mesh
    options = {"kind": "mlp_gelu", "dp_replicate": dp_replicate, "tp": tp, "strategy": strategy}
    hopper = arch.startswith("9")
    buffers = {"e4m3/block": 8, "bf16/block": 6} if hopper else {"e4m3/mxfp8": 8, "bf16/e5m2": 6}
    if not is_full(request.config):  # one of them with every other strategy, the other one the next day
        buffers = dict([list(buffers.items())[(matrix_seed + STRATEGIES.index(strategy)) % 2]])
    results = pool.run(weight_bytes.trainings, ranks, recipes=list(buffers), **options)
    assert results == [buffers] * ranks


@pytest.mark.parametrize("mesh", meshes("dp2xtp2"))
@pytest.mark.parametrize("recipe", ["current", "nvfp4"])
def test_bytes_and_scales_of_a_transformer_layer(pool, recipe, mesh):
    dp_replicate, tp, ranks = mesh
    results = pool.run(
        weight_bytes.training, ranks, kind="transformer", recipe=recipe, dp_replicate=dp_replicate, tp=tp
    )
    buffers = 4 * {"current": 2, "nvfp4": 6}[recipe]
    assert results == [{"init": buffers, "steps": buffers * steps_of(recipe), "gathered": 4}] * ranks


@pytest.mark.covering()
@pytest.mark.ranks(4)
@pytest.mark.arch("9.0", "10.0")
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize(("kind", "tp", "fsdp"), [("replicated", 2, True), ("mlp_swiglu", 4, False)])
def test_tp_replicated_weights_and_tp_without_fsdp(pool, kind, tp, fsdp, recipe):
    """Check weights that tp replicates under FSDP, and tp without FSDP."""
    options = {"kind": kind, "recipe": recipe, "dp_replicate": 1, "tp": tp, "fsdp": fsdp}
    results = pool.run(weight_bytes.training, 4, **options)
    assert results == [{"init": 4, "steps": 4 * steps_of(recipe), "gathered": 2}] * 4


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("group", "when"), [("fsdp", "init: "), ("fsdp after init", "step 1: ")])
@pytest.mark.parametrize("recipe", ["current", "nvfp4", "e4m3/block"])
def test_negative_control_amax_group_of_stock_te(pool, recipe, group, when):
    """Negative control: the amax group of stock TE's all-gather, which is FSDP2's axis only."""
    if group == "fsdp" and not pool.run(weight_bytes.draws_are_fp32, 1)[0]:
        pytest.skip("this torch draws initial bf16 weights whose parts all have one amax")
    options = {"kind": "mlp_gelu", "recipe": recipe, "dp_replicate": 1, "tp": 2, "group": group}
    errors = pool.run_expect_error(weight_bytes.training, 4, **options)
    for error in errors:
        assert error.type_name == "AssertionError" and when in error.message and "bits" in error.message, (
            error
        )


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    ("recipe", "buffers", "mesh"),
    [
        pytest.param(
            recipe,
            buffers,
            MESHES[mesh],
            id=f"{recipe.replace('/', '_')}-{mesh}",
            marks=pytest.mark.ranks(MESHES[mesh][2]),
        )
        for recipe, buffers, mesh in [
            ("delayed", 4, "dp2xtp2"),
            ("current", 4, "dp2xtp2"),
            ("nvfp4", 12, "dp2xtp2"),
            ("e4m3/block", 8, "dp2xtp2"),
            ("current", 4, "hsdp2x2xtp2"),
        ]
    ],
)
def test_every_write_uses_the_scale_of_the_unsharded_weight(pool, recipe, buffers, mesh):
    """Check copy_, quantize_ and state dicts."""
    if "/" in recipe and (reason := why_no_hybrid_linear()):
        pytest.skip(reason)
    dp_replicate, tp, ranks = mesh
    results = pool.run(weight_writes.writes, ranks, recipe=recipe, dp_replicate=dp_replicate, tp=tp)
    assert results == [buffers * len(weight_writes.WAYS)] * ranks


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["delayed", "current", "nvfp4", "e4m3/block"])
def test_copied_weights_reference_no_process_group(pool, recipe):
    if "/" in recipe and (reason := why_no_hybrid_linear()):
        pytest.skip(reason)
    for outcome in pool.run(weight_writes.copies, 4, recipe=recipe, dp_replicate=1, tp=2):
        assert outcome == {"marks": [True] * 14, "reachable": 0, "twins": [True] * 2}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("which", ["no tp", "no shards", "replicas", "one rank"])
def test_wrong_weight_mesh_raises(pool, which):
    for error in pool.run_expect_error(weight_writes.wrong_mesh, 4, which=which):
        assert error.type_name == "MeshError" and "weight_mesh" in error.message, error


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dp_replicate", [1, 2])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_user_fully_shard_without_weight_mesh(pool, recipe, dp_replicate):
    assert pool.run(weight_writes.user_fully_shard, 4, recipe=recipe, dp_replicate=dp_replicate) == [4] * 4
