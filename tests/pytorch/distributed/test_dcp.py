"""DCP of te_fsdp's models by torch's own functions, from any mesh to any mesh.

The functions are full_tensor, state dicts, ``dcp.save`` and ``dcp.load``.

In a chain, each mesh loads by ``dcp.load`` what the previous one saved by ``dcp.save``, with optimizer states.
Each case uses two meshes of the chain, different ones each day. A named case, and `--matrix full`, uses all.
Values are compared bit for bit with those of the mesh that trained them, and before training with the unsharded module.
"""

from __future__ import annotations

import math

import pytest
from checkpointing.selection import is_full
from harness import bodies
from plain_dcp import round_trip

ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
DENSE = [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}, {"tp": 4}, {"dp_shard": 2}, {"dp_shard": 1}]
WITH_EXPERTS = [
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 4},
    {"ep": 2, "tp": 2},
    {"dp_shard": 2},
    {"dp_shard": 1},
]
#: Parameters that GroupedLinear registers on each mesh of a chain, in turn.
FORMS = {
    "each": ["experts"],
    "one": ["one parameter"],
    "one, each": ["one parameter", "experts"],
    "each, one": ["experts", "one parameter"],
}
KINDS = [
    "Linear",
    "row",
    "LayerNormLinear",
    "MLP",
    "gated MLP",
    "attention",
    "fused attention",
    "TransformerLayer",
]
# TE does not split a quantized weight into the parameters of query, key and value.
QUANTIZED = [kind for kind in KINDS if kind != "attention"]
# One step of AdamW from the same state, with gradients summed in a different order: ten chained sums of up to 512
# products in fp32, on updates of at most the learning rate.
NEXT_STEP = {"none": 1e-5, "bf16": 2**-8}  # bf16: a unit in the last place of weights below 1
NEXT_STEP["remainders"] = 2**16  # all values of remainders, whose weights in bf16 may differ by such a unit
# Quantized: activations, whose scales belong to other parts of the batch, move a weight by one step of its format; of
# weights below 1/8 that is 1/64 in E4M3 and 1/24 in E2M1.
NEXT_STEP |= {"delayed": 1 / 64, "current": 1 / 64, "block": 1 / 64, "mxfp8": 1 / 64, "nvfp4": 1 / 24}


@pytest.fixture
def some(request, matrix_seed):
    """Return two consecutive meshes of a cycle, or all. ``case`` distinguishes the cases of one day."""

    def chosen(meshes: list[dict[str, int]], case: int) -> list[dict[str, int]]:
        if is_full(request.config) or any("[" in argument for argument in request.config.args):
            return meshes
        return [meshes[(matrix_seed + case + step) % len(meshes)] for step in (0, 1)]

    return chosen


def skip_one_parameter(pool, recipe):
    """Skip, with TE's reason, where the device cannot train one parameter for all experts under a recipe."""
    if recipe in ("none", "delayed"):
        pytest.skip("TransformerEngine has no grouped kernels for it")
    pool.arch = "9.0" if recipe == "block" else "10.0"  # GPUs have one
    name = "none" if recipe in round_trip.BF16 else recipe
    (problem,) = pool.run(bodies.single_grouped_problem, 1, recipe=name, init_group=False)
    if problem:
        pytest.skip(problem)


def check_chain(pool, tmp_path, kinds, recipe, sharder, keep, chain, **options):
    pool.arch = "9.0" if recipe == "block" else "10.0"  # GPUs have one
    where = {"recipe": recipe, "sharder": sharder, "keep": keep, "directory": str(tmp_path)}
    kinds = [kinds] if isinstance(kinds, str) else kinds
    ranks = math.prod(chain[0].values())
    first = pool.run(round_trip.train_and_save, ranks, kind=kinds[0], axes=chain[0], env=ENVIRONMENT, **where)
    assert [found["unsharded"] for found in first] == [[]] * len(first)
    assert first[0]["exported"] == [] and first[0]["trained"] > 0
    for place, axes in enumerate(chain[1:], 1):
        ranks, kind = math.prod(axes.values()), kinds[place % len(kinds)]
        case = {"kind": kind, "axes": axes, "place": place, **where, **options}
        for found in pool.run(round_trip.load_and_continue, ranks, env=ENVIRONMENT, **case):
            assert found["control"] > 0 and found["wrong"] == [] and found["full"] == [], (axes, found)
            assert found["after"] <= NEXT_STEP[recipe], (axes, found)


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1, always=[{"kind": "gated MLP", "sharder": "torch", "keep": False}])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_high_precision_weights_through_a_chain_of_meshes(pool, tmp_path, kind, sharder, keep, some):
    """Check the row order of stacked weights and their optimizer states over all tp and dp sizes."""
    chain = [{"dp_shard": 2, "tp": 2}, *some(DENSE, KINDS.index(kind))]
    check_chain(pool, tmp_path, kind, "none", sharder, keep, chain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
def test_fused_adam_state_through_a_chain_of_meshes(pool, tmp_path, sharder):
    """Check the row order of main weights and moments of bf16 weights."""
    check_chain(pool, tmp_path, "gated MLP", "bf16", sharder, False, [{"dp_shard": 2, "tp": 2}, {"tp": 4}])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("broadcast", [False, True], ids=["each", "broadcast"])
def test_fused_adam_remainders_through_a_chain_of_meshes(pool, tmp_path, broadcast):
    """Check main weights in int16, which Gloo and NCCL do not communicate."""
    chain = [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4}, {"tp": 4}]
    check_chain(pool, tmp_path, "gated MLP", "remainders", "te_fsdp", False, chain, broadcast=broadcast)


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_through_a_chain_of_meshes(pool, tmp_path, kind, recipe, sharder, keep, some):
    """Check bytes and scales bit for bit over all tp and dp sizes. DCP alone cannot slice these weights."""
    chain = [{"dp_shard": 2, "tp": 2}, *some(DENSE, QUANTIZED.index(kind))]
    check_chain(pool, tmp_path, kind, recipe, sharder, keep, chain)


@pytest.mark.ranks(4)
@pytest.mark.covering(
    strength=0, always=[{"forms": "one, each", "recipe": "mxfp8", "keep": True, "sharder": "torch"}]
)
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("recipe", ["none", "bf16", "delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("forms", FORMS)
def test_experts_through_a_chain_of_meshes(pool, tmp_path, forms, recipe, sharder, keep):
    """Check experts with one parameter each and with a single parameter, whose names differ, loaded into each other."""
    if "one" in forms:
        skip_one_parameter(pool, recipe)
    # TE's GroupedLinear takes current scaling without tp only.
    chain = [axes for axes in WITH_EXPERTS if recipe != "current" or "tp" not in axes]
    check_chain(pool, tmp_path, FORMS[forms], recipe, sharder, keep, chain)


@pytest.mark.ranks(2)
@pytest.mark.single_grouped
@pytest.mark.parametrize("axis", ["dp_shard", "ep"])
@pytest.mark.parametrize(("source", "target"), [("experts", "one parameter"), ("one parameter", "experts")])
def test_full_state_dicts_between_expert_forms(pool, tmp_path, source, target, axis):
    """Check unsharded tensors and optimizer groups, whose names differ between both forms.

    A single parameter has one step, so that experts with different steps raise.
    """
    where = {"source": source, "target": target, "axes": {axis: 2}, "directory": str(tmp_path)}
    for found in pool.run(round_trip.load_into_other_form, 2, env=ENVIRONMENT, **where):
        refused = found.pop("refused", "")
        assert ("one value for all experts" in refused) == (source == "experts"), refused
        for broadcast in (False, True):
            assert found.pop(f"control {broadcast}") == 4
            assert [found.pop(f"{what} {broadcast}") for what in ("wrong", "states", "steps")] == [
                [],
                [],
                [4],
            ]
        assert found == {"lr": 0.5}


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("saved", ["bytes", "values"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_load_without_load_state_dict(pool, tmp_path, recipe, saved, sharder):
    """Check scripts whose ``dcp.load`` writes into the model itself. It kept old weights without an error.

    Values need the amax of all ranks. Bytes make derived data of the old ones invalid.
    """
    pool.arch = "9.0" if recipe == "block" else "10.0"
    where = {
        "kind": "Linear",
        "recipe": recipe,
        "sharder": sharder,
        "keep": False,
        "directory": str(tmp_path),
    }
    if saved == "bytes":
        pool.run(round_trip.train_and_save, 4, axes={"dp_shard": 4}, env=ENVIRONMENT, **where)
    else:
        pool.run(round_trip.save_values, 1, axes={"dp_shard": 1}, env=ENVIRONMENT, **where)
    for axes in ({"dp_shard": 2, "tp": 2}, {"dp_shard": 1}):
        for found in pool.run(
            round_trip.load_only, math.prod(axes.values()), axes=axes, env=ENVIRONMENT, **where
        ):
            assert found == {"control": True, "wrong": [], "same output": True}, (axes, found)


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=0, always=[{"kind": "one parameter", "recipe": "mxfp8", "sharder": "torch"}])
@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["gated MLP", "TransformerLayer", "experts", "one parameter"])
def test_checkpoint_load_reads_dcp_shards_of_quantized_weights(pool, tmp_path, kind, recipe, sharder):
    """Check that ``te_fsdp.checkpoint.load`` reads every directory that ``dcp.load`` reads.

    Components of the pieces are joined bit for bit.
    """
    pool.arch = "9.0" if recipe == "block" else "10.0"
    if kind == "one parameter":
        skip_one_parameter(pool, recipe)
    if kind == "experts" and recipe == "current":
        pytest.skip("TransformerEngine's GroupedLinear takes current scaling without tp only")
    where = {"recipe": recipe, "sharder": sharder, "keep": True, "directory": str(tmp_path), "kind": kind}
    axes = (
        {"ep": 2, "tp": 2}
        if kind in round_trip.EXPERT_KINDS and recipe != "current"
        else {"dp_shard": 2, "tp": 2}
    )
    axes = {"dp_shard": 2, "ep": 2} if kind == "one parameter" and recipe == "current" else axes
    pool.run(round_trip.train_and_save, 4, axes=axes, env=ENVIRONMENT, **where)
    for target in ({"dp_shard": 4}, {"dp_shard": 2}, {"dp_shard": 1}):
        ranks = math.prod(target.values())
        for found in pool.run(round_trip.load_checkpoint, ranks, axes=target, env=ENVIRONMENT, **where):
            assert found["control"] > 0 and found["wrong"] == [] and found["converted"] == [], (target, found)
            assert found["after"] <= NEXT_STEP[recipe], (target, found)


@pytest.mark.recipe("mxfp8")
@pytest.mark.ranks(2)
def test_copied_state_dicts_of_quantized_weights(pool, tmp_path):
    """Check values loaded into copies of a state dict, and every reader of these copies. Some read old bytes."""
    for found in pool.run(round_trip.load_into_copies, 2, env=ENVIRONMENT, directory=str(tmp_path)):
        assert found == {"wrong": [], "control": []}
