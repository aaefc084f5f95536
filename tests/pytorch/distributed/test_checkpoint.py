"""Round trips of checkpoints.

On the same mesh values are equal bit for bit, on other meshes by logical value. Unsupported uses
of DCP raise.

All kinds of modules between all meshes: test_reshard_matrix.py. Quantized weights: test_checkpoint_formats.py.
"""

from __future__ import annotations

import math

import pytest
from checkpointing import bodies
from checkpointing.models import Case

DP2_TP2 = {"dp_shard": 2, "tp": 2}
DP4 = {"dp_shard": 4}
TP4 = {"dp_shard": 1, "tp": 4}
ONE = {"dp_shard": 1}
# For machines with two GPUs.
TP2, DP2 = {"dp_shard": 1, "tp": 2}, {"dp_shard": 2}
HSDP_TP = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}

PLAIN, STACKED = Case(), Case(stacked=True)
# torch's set_state_dict cannot load an optimizer that has no state for a parameter that nothing uses.
PLAIN_USED, STACKED_USED = Case(unused=False), Case(stacked=True, unused=False)
FUSED = Case(stacked=True, optimizer="fused")


def _quantized(recipe: str, stacked: bool = False) -> Case:
    return Case(stacked=stacked, optimizer="fused", recipe=recipe, quantized=True)


def run_body(pool, body, ranks, **kwargs):
    """Run a body; on GPUs with kernels that always add in the same order."""
    environment = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    return pool.run(body, ranks, env=environment, **kwargs)


def check_same(results: list[dict]) -> None:
    """Check that nothing differs after the load and one more step, and that both differ without the load."""
    for rank, outcome in enumerate(results):
        assert outcome["wrong"] == [], f"rank {rank}"
        assert outcome["tensors"] > 30
        assert outcome["fresh"] > 20, "the other model must be different before the load"
        assert outcome["loaded"] == outcome["losses"] and outcome["trained"] == [], f"rank {rank}"
        assert outcome["unloaded"] != outcome["losses"][0]
        assert [group["lr"] for group in outcome["options"]] in ([3e-3, 2e-3], [3e-3, 0.02])


SAME = [
    (STACKED, DP2_TP2, "te_fsdp"),
    (STACKED_USED, DP2_TP2, "plain"),
    (FUSED, DP2_TP2, "te_fsdp"),
    (FUSED, DP2_TP2, "plain"),
    (STACKED, DP4, "te_fsdp"),
    (FUSED, DP4, "plain"),
    (Case(optimizer="sgd"), DP4, "te_fsdp"),
    (Case(optimizer="fused bf16"), DP4, "te_fsdp"),
    (Case(optimizer="remainders"), DP4, "te_fsdp"),
    (STACKED, HSDP_TP, "te_fsdp"),
    (FUSED, HSDP_TP, "plain"),
    (STACKED, TP2, "te_fsdp"),
    (FUSED, TP2, "plain"),
    (FUSED, DP2, "te_fsdp"),
]
IDS = {id(DP2_TP2): "dp2xtp2", id(DP4): "dp4", id(HSDP_TP): "hsdp2x2xtp2", id(TP2): "tp2", id(DP2): "dp2"}


def _ranks(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("case", "axes", "route"),
    [
        pytest.param(
            *row,
            id=f"{row[0].optimizer}-{IDS[id(row[1])]}-{row[2]}",
            marks=pytest.mark.ranks(_ranks(row[1])),
        )
        for row in SAME
    ],
)
def test_round_trip_on_the_same_mesh(pool, tmp_path, case, axes, route):
    where = {"axes": axes, "directory": str(tmp_path)}
    check_same(run_body(pool, bodies.same_mesh, _ranks(axes), case=case, route=route, **where))


@pytest.mark.covering(strength=1)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("route", ["te_fsdp", "plain"])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_round_trip_of_quantized_weights(pool, tmp_path, recipe, route):
    case = _quantized(recipe, stacked=True)
    check_same(
        run_body(pool, bodies.same_mesh, 4, case=case, axes=DP2_TP2, route=route, directory=str(tmp_path))
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["delayed"])
@pytest.mark.parametrize("quantized", [False, True])
def test_round_trip_of_delayed_scaling(pool, tmp_path, recipe, quantized):
    case = Case(stacked=True, optimizer="fused", recipe=recipe, quantized=quantized)
    check_same(
        run_body(pool, bodies.same_mesh, 4, case=case, axes=DP2_TP2, route="te_fsdp", directory=str(tmp_path))
    )


MESHES = {"dp2xtp2": (DP2_TP2, 4), "dp4": (DP4, 4), "tp4": (TP4, 4), "one": (ONE, 1), "stock": (None, 1)}
MESHES |= {"tp2": (TP2, 2), "dp2": (DP2, 2)}
# fp32: as in the parity tests, ten chained sums of up to 256 products in a different order. bf16: activations are
# rounded to 8 bits, so that a loss may move by a unit in the last place.
TOLERANCE = {"adamw": 1e-5, "fused": 2**-8}


def _run(pool, body, mesh, case, directory, **kwargs):
    axes, ranks = MESHES[mesh]
    return run_body(pool, body, ranks, case=case, axes=axes, directory=str(directory), **kwargs)


def check_elsewhere(results: list[dict], losses: list[float], case: Case) -> None:
    for outcome in results:
        assert outcome["wrong"] == []
        assert outcome["tensors"] > 30
        assert outcome["losses"] == pytest.approx(losses, rel=TOLERANCE[case.optimizer], abs=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", [STACKED, FUSED], ids=["adamw", "fused"])
def test_stacked_layouts_between_two_rank_meshes(pool, tmp_path, case):
    losses = _run(pool, bodies.save_for_different_mesh, "tp2", case, tmp_path, routes=("te_fsdp",))[0]
    for mesh in ("dp2", "one"):
        results = _run(pool, bodies.load_on_different_mesh, mesh, case, tmp_path, route="te_fsdp")
        check_elsewhere(results, losses, case)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", [PLAIN_USED, Case(optimizer="fused")], ids=["adamw", "fused"])
def test_unstacked_layouts_onto_every_mesh(pool, tmp_path, case):
    losses = _run(
        pool, bodies.save_for_different_mesh, "dp2xtp2", case, tmp_path, routes=("te_fsdp", "plain")
    )[0]
    for mesh in ("dp4", "tp4", "one"):
        for route in ("te_fsdp", "plain"):
            train = mesh == "tp4"
            results = _run(
                pool, bodies.load_on_different_mesh, mesh, case, tmp_path, route=route, train=train
            )
            check_elsewhere(results, losses if train else [], case)


@pytest.mark.ranks(4)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_round_trip_of_quantized_weights_on_hopper(pool, tmp_path, recipe):
    """Check that Hopper's cached transpose of a float8 weight is not kept when the bytes change."""
    axes = {"dp_shard": 2, "tp": 2} if recipe == "current" else {"dp_shard": 1}
    case, ranks = _quantized(recipe), 4 if recipe == "current" else 1
    where = {"axes": axes, "directory": str(tmp_path)}
    results = run_body(pool, bodies.same_mesh, ranks, case=case, route="te_fsdp", **where)
    check_same(results)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_quantized_weights_through_other_meshes_and_back(pool, tmp_path, recipe):
    """Check bytes and scales of both directions through dp2xtp2 -> tp4 -> dp4 -> dp2xtp2."""
    case = _quantized(recipe, stacked=True)
    _run(pool, bodies.compare_after_round_trip, "dp2xtp2", case, tmp_path, name="", raw="raw")
    _run(pool, bodies.resave, "tp4", case, tmp_path, name="te_fsdp", to="second")
    _run(pool, bodies.resave, "dp4", case, tmp_path, name="second", to="third")
    assert (
        _run(pool, bodies.compare_after_round_trip, "dp2xtp2", case, tmp_path, name="third", raw="raw")
        == [[]] * 4
    )


@pytest.mark.ranks(4)
def test_delayed_scaling_loads_on_a_different_mesh(pool, tmp_path):
    case = _quantized("delayed")
    _run(pool, bodies.compare_after_round_trip, "dp2xtp2", case, tmp_path, name="", raw="raw")
    _run(pool, bodies.resave, "dp4", case, tmp_path, name="te_fsdp", to="second")
    assert (
        _run(pool, bodies.compare_after_round_trip, "dp2xtp2", case, tmp_path, name="second", raw="raw")
        == [[]] * 4
    )
