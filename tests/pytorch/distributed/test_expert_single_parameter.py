"""Experts in a single parameter. Training on each mesh equals one process with one parameter per expert.

By default a pairwise covering runs; `--matrix full` runs the product. Delayed scaling is not in it:
TE has no grouped kernels for it (tests/unit/test_grouped_single.py). Nor is fp32, for the same reason.
"""

from __future__ import annotations

from typing import Any

import pytest
from experts import bodies, single_parameter
from experts.cases import MESHES, allowed, parametrize, ranks
from harness import BodyFailed
from matrix.covering import all_cases, covering

SINGLE = {"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
OURS = ["ep2", "ep4", "ep2_dp2", "ep2_tp2", "dp4", "hsdp_ep2", "ep2_dp2_tp2"]
BLACKWELL = [
    ("none", "bf16"),
    ("mxfp8", "bf16"),
    ("mxfp8", "quantized"),
    ("current", "bf16"),
    ("current", "quantized"),
    ("nvfp4", "quantized"),
]
HOPPER = [("none", "bf16"), ("current", "quantized"), ("block", "bf16"), ("block", "quantized")]
#: Seven: ranks of ep have four and three, or two, two, two and one; none of these numbers divides among their ranks.
EXPERTS = {"every": 4, "some": 7, "uneven": 7}


def factors(forms: list[tuple[str, str]]) -> dict[str, list[Any]]:
    return {"mesh": OURS, "form": forms, "bias": [False, True], "route": list(EXPERTS)}


def _default(case: dict[str, Any]) -> bool:
    """Return four ranks at most, but for one format."""
    return allowed(case) and (ranks(case["mesh"]) <= 4 or case["form"] == ("mxfp8", "quantized"))


def name_of(case: dict[str, Any]) -> str:
    form = "-".join(case["form"])
    return f"{case['mesh']}-{form}-{'bias' if case['bias'] else 'no_bias'}-{case['route']}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    forms = {
        "test_training_equals_one_process": BLACKWELL,
        "test_training_on_hopper_equals_one_process": HOPPER,
    }.get(metafunc.definition.name)
    if forms is None:
        return
    if metafunc.config.getoption("--matrix", "covering") == "full":
        cases = list(all_cases(factors(forms), allowed))
    else:
        cases = covering(factors(forms), _default, lambda case: ranks(case["mesh"]))
    parametrize(metafunc, cases, name_of)


def train(pool, case: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    recipe, weights = case["form"]
    options = {"axes": MESHES[case["mesh"]], "recipe": recipe, "weights": weights, "bias": case["bias"]}
    options |= {"experts": EXPERTS[case["route"]], "route": case["route"], "single": True}
    return pool.run(bodies.training, ranks(case["mesh"]), env=SINGLE, **options, **more)


def check(outcomes: list[dict[str, Any]], case: dict[str, Any]) -> None:
    for outcome in outcomes:
        assert outcome["ranks"] == ranks(case["mesh"])
        assert {"output", "input", "loss", "gradient", "norm", "update"} <= outcome["shares"].keys()
        assert max(outcome["shares"].values()) <= 1


@pytest.mark.single_grouped
@pytest.mark.covering(strength=1)
def test_training_equals_one_process(pool, recipe, case):
    check(train(pool, case), case)


@pytest.mark.single_grouped
@pytest.mark.covering(strength=1)
@pytest.mark.arch("9.0")
def test_training_on_hopper_equals_one_process(pool, recipe, case):
    check(train(pool, case), case)


@pytest.mark.single_grouped
@pytest.mark.ranks(4)
def test_negative_control_2d_placements(pool):
    case = {"mesh": "ep2_tp2", "form": ("none", "bf16"), "bias": False, "route": "uneven"}
    with pytest.raises(BodyFailed, match=r"initial mixture\.(up|down)\.weight"):
        train(pool, case, broken="placement", steps=0)


@pytest.mark.single_grouped
@pytest.mark.covering(
    # Experts of which no rank has its own weight copy, and unquantized experts whose gather is not shared.
    always=[{"recipe": "mxfp8", "how": {"strategy": "no_shard"}}, {"recipe": "none"}],
    strength=0,
)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "recipe", "how"),
    [
        ("dp4", "current", {"strategy": "optim_grads"}),
        ("ep2_dp2", "mxfp8", {"strategy": "optim"}),
        ("hsdp_ep2", "nvfp4", {"strategy": "optim_grads"}),
        ("hsdp_ep2", "mxfp8", {"strategy": {"mixture": "no_shard"}}),
        ("ep2_tp2", "mxfp8", {"strategy": "no_shard"}),
        ("dp4", "mxfp8", {"strategy": "optim_grads", "units": "mixture"}),
        ("dp4", "none", {"strategy": "optim"}),
    ],
)
def test_training_under_every_strategy(pool, mesh, recipe, how):
    """Check clipped steps, quantized and not."""
    weights = "bf16" if recipe == "none" else "quantized"
    case = {"mesh": mesh, "form": (recipe, weights), "bias": False, "route": "uneven"}
    check(train(pool, case, **how), case)


@pytest.mark.single_grouped
@pytest.mark.covering(
    # Four experts divide among the ranks: state that is sharded within experts.
    always=[{"recipe": "current"}],
    strength=0,
)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("recipe", "weights", "experts"),
    [("mxfp8", "quantized", 3), ("none", "bf16", 4), ("current", "quantized", 4)],
)
def test_training_under_hfsdp(pool, recipe, weights, experts):
    """Check optimizer state that replicas shard, for experts that divide among the ranks and others."""
    axes = {"dp_replicate": 2, "dp_shard": 2}
    options = {"axes": axes, "recipe": recipe, "weights": weights, "experts": experts}
    first, *others = pool.run(single_parameter.compare_hfsdp, 4, env=SINGLE, **options)
    assert all(max(outcome["shares"].values()) <= 1 for outcome in (first, *others))
    # Once for each reason, on one rank.
    assert not any(outcome["warned"] for outcome in others)
    assert len(first["warned"]) == (weights == "quantized")
    for line in first["warned"]:
        assert "mixture.up.weight" in line and "mixture.down.weight" in line
        assert (
            "one tensor of all experts" in line
            and "Fix: use GroupedLinear(single_grouped_weight=False)" in line
        )


@pytest.mark.single_grouped
@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "experts"), [("mxfp8", 3)])
def test_main_weights_in_fp32_and_inference(pool, recipe, experts):
    pool.run(single_parameter.train_with_fp32_main_weights, 2, env=SINGLE, recipe=recipe, experts=experts)


@pytest.mark.single_grouped
@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(
    ("mesh", "recipe", "experts", "scales"),
    [
        pytest.param(mesh, recipe, experts, scales, marks=pytest.mark.ranks(ranks(mesh)))
        for mesh, recipe, experts, scales in (
            ("dp4", "mxfp8", 3, 1 / 32),
            ("ep2_dp2", "mxfp8", 4, 1 / 32),
            ("dp4", "nvfp4", 3, 1 / 8),
            ("ep2_tp2", "mxfp8", 7, 1 / 32),
            ("dp4", "current", 5, 0.0),
            ("ep2_dp2_tp2", "mxfp8", 6, 1 / 32),
        )
    ],
)
def test_memory_per_rank_of_quantized_experts(pool, mesh, recipe, experts, scales):
    """Check a rank's share of values in each direction and of states, plus scales with padding."""
    for outcome in pool.run(
        single_parameter.memory_per_rank,
        ranks(mesh),
        env=SINGLE,
        axes=MESHES[mesh],
        recipe=recipe,
        experts=experts,
    ):
        # Seven experts over two ranks of ep: four on one of them.
        share = outcome["data"] if mesh != "ep2_tp2" else outcome["data"] * 7 / 8
        assert share <= 1.05 and outcome["states"] == outcome["data"], outcome
        # Scales of MXFP8 and NVFP4 are stored in full tiles of 128 x 4, of which small shards fill a part.
        assert 0.95 * scales <= outcome["scales"] / outcome["data"] <= 4 * scales + 0.01, outcome
        assert outcome["reported"] == 1, outcome
