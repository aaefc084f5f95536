"""A ``GroupedLinear`` with a single parameter, compared with one parameter per expert on any mesh."""

from __future__ import annotations

import pytest
from grouping import bodies

DP2, DP4, TP2 = {"dp_shard": 2}, {"dp_shard": 4}, {"dp_shard": 1, "tp": 2}
DP2_TP2, EP2, EP2_DP2, EP2_TP2 = (
    {"dp_shard": 2, "tp": 2},
    {"dp_shard": 1, "ep": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_shard": 1, "ep": 2, "tp": 2},
)


def ranks_of(mesh: dict[str, int]) -> int:
    count = 1
    for size in mesh.values():
        count *= size
    return count


def case(mesh, experts, splits, recipe="none", *, quantized=False, **options):
    name = "x".join(f"{axis.split('_')[0]}{size}" for axis, size in mesh.items() if size > 1)
    words = [
        name,
        f"{experts}experts",
        recipe,
        *(["quantized"] if quantized else []),
        *map(str, options.values()),
    ]
    return pytest.param(
        mesh,
        experts,
        splits,
        recipe,
        quantized,
        options,
        id="-".join(words),
        marks=pytest.mark.ranks(ranks_of(mesh)),
    )


@pytest.mark.single_grouped
@pytest.mark.covering(
    # A rank without experts; an expert without tokens whose weights are quantized.
    always=[{"experts": 1}, {"mesh": DP2, "quantized": True, "experts": 3}],
    strength=1,
)
@pytest.mark.parametrize(
    ("mesh", "experts", "splits", "recipe", "quantized", "options"),
    [
        case(DP2, 2, (1, 2)),
        case(DP2, 3, (1, 0, 2), "mxfp8"),
        case(TP2, 2, (1, 1), "mxfp8"),
        case(DP2_TP2, 2, (1, 0)),
        case(EP2, 3, (1, 0), "mxfp8"),
        case(EP2_DP2, 4, (0, 1)),
        case(EP2_TP2, 4, (2, 0), "mxfp8"),
        case(DP2, 3, (1, 0, 2), "mxfp8", quantized=True, optimizer="fused"),
        case(DP2_TP2, 2, (1, 0), "mxfp8", quantized=True),
        case(EP2_DP2, 2, (1,), "nvfp4", quantized=True),
        case(DP2, 1, (1,), "current", quantized=True, optimizer="fused"),
    ],
)
def test_single_parameter_equals_one_per_expert(pool, mesh, experts, splits, recipe, quantized, options):
    kwargs = {"mesh": mesh, "experts": experts, "splits": splits, "recipe": recipe, "quantized": quantized}
    for outcome in pool.run(bodies.both_forms, ranks_of(mesh), **kwargs, **options):
        assert outcome["checked"]["real"] >= 4 * bodies.STEPS


@pytest.mark.single_grouped
@pytest.mark.arch("9.0")
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "quantized"), [("block", True), ("current", False)])
def test_single_parameter_equals_one_per_expert_on_hopper(pool, recipe, quantized):
    """Check weights gathered once for forward and backward, and uneven shards."""
    kwargs = {"mesh": DP2, "experts": 3, "splits": (1, 0, 2), "recipe": recipe, "quantized": quantized}
    for outcome in pool.run(bodies.both_forms, 2, fsdp={"reshard_after_forward": False}, **kwargs):
        assert outcome["checked"]["real"] >= 4 * bodies.STEPS


@pytest.mark.single_grouped
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("mesh", "unused"), [(DP2, 1), (TP2, 2)], ids=["dp2", "tp2"])
def test_training_equals_one_process(pool, mesh, unused):
    """Check against stock TE. Some experts get no token on any rank."""
    for outcome in pool.run(bodies.one_process, 2, mesh=mesh, experts=3, splits=(1, 0, 0)):
        assert outcome["checked"]["real"] >= 4 and outcome["unused"] == unused


@pytest.mark.single_grouped
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("experts", "quantized"), [(3, False), (1, True)])
def test_torch_fully_shard_of_single_parameter(pool, experts, quantized):
    outcomes = pool.run(bodies.torchs_fully_shard, 2, experts=experts, quantized=quantized)
    assert [outcome["held"] for outcome in outcomes] == {3: [2, 1], 1: [1, 0]}[experts]


@pytest.mark.single_grouped
@pytest.mark.ranks(2)
def test_negative_control_2d_placements(pool):
    """Check the fault of TransformerEngine PR #2713: 2-D placements of the 3-D weight shard the experts."""
    assert pool.run(bodies.placed, 2, flat=False) == [2, 2]
    for error in pool.run_expect_error(bodies.placed, 2, flat=True):
        assert (
            error.type_name == "AssertionError"
            and "fc1.weight: shape: expected (2, 256, 128)" in error.message
        )


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "single",
    [pytest.param(True, id="single", marks=pytest.mark.single_grouped), pytest.param(False, id="discrete")],
)
@pytest.mark.parametrize(
    ("mesh", "experts"), [(DP4, 2), (DP2_TP2, 2), (EP2_DP2, 4)], ids=["dp4", "dp2xtp2", "dp2xep2"]
)
def test_memory_per_rank(pool, mesh, experts, single):
    """Check each rank's share of weights and optimizer state: logical values / (ep x dp_shard x tp)."""
    for shares in pool.run(bodies.bytes_per_rank, 4, mesh=mesh, experts=experts, single=single):
        assert all(abs(share - 1) <= 0.05 for share in shares), shares
