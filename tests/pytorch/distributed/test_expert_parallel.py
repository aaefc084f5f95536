"""Expert parallelism against one process.

Outputs, gradients, norms and updates of three steps are compared by value.

By default a pairwise covering runs; `--matrix full` runs the product. Experts in one parameter:
test_expert_single_parameter.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from experts import binding, bodies
from experts.cases import MESHES, allowed, parametrize, ranks
from experts.model import DROPPED, ROUTES
from harness import BodyFailed
from matrix.covering import all_cases, covering

FACTORS: dict[str, list[Any]] = {
    "mesh": list(MESHES),
    "form": [
        ("none", "fp32"),
        ("none", "bf16"),
        ("delayed", "bf16"),
        ("delayed", "quantized"),
        ("block", "quantized"),
        ("mxfp8", "quantized"),
        ("current", "quantized"),
    ],
    "experts": [4, 7],  # seven: ranks of ep have four and three, or two, two, two and one
    "bias": [False, True],
    "route": list(ROUTES),
}


def _default(case: dict[str, Any]) -> bool:
    """Return every format on two ranks, one or two on four; the two meshes of eight have cases of their own."""
    kinds = [("delayed", "quantized"), ("mxfp8", "quantized")]
    if case["mesh"] in ("ep4", "ep2_dp2"):
        kinds = [("none", "fp32"), ("delayed", "quantized")]
    wide, uneven = ranks(case["mesh"]), case["experts"] != 4
    if wide > 4 or (wide == 4 and case["form"] not in kinds) or uneven != (case["route"] != "every"):
        return False
    return allowed(case)


LARGE = [
    {"mesh": "ep2_dp2_tp2", "form": ("mxfp8", "quantized"), "experts": 7, "bias": False, "route": "some"},
    {"mesh": "hsdp_ep2_dp2", "form": ("delayed", "quantized"), "experts": 7, "bias": True, "route": "uneven"},
]

#: bf16 gradients of experts over several shard ranks: NCCL's premultiplied sum made them zeros on GPUs.
SUMS = [
    {"mesh": "ep2_dp2", "form": ("none", "bf16"), "experts": 4, "bias": False, "route": "every"},
    {"mesh": "hsdp_ep2", "form": ("none", "bf16"), "experts": 4, "bias": False, "route": "every"},
]


def _name(case: dict[str, Any]) -> str:
    form = "-".join(case["form"])
    return f"{case['mesh']}-{form}-{case['experts']}-{'bias' if case['bias'] else 'no_bias'}-{case['route']}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.name != "test_training_equals_one_process":
        return
    if metafunc.config.getoption("--matrix", "covering") == "full":
        cases = list(all_cases(FACTORS, allowed))
    else:
        cases = [*_pairs(), *LARGE]
        cases += [case for case in SUMS if case not in cases]
    parametrize(metafunc, cases, _name)


def _pairs() -> list[dict[str, Any]]:
    return covering(FACTORS, _default, lambda case: ranks(case["mesh"]))


def _train(pool, case: dict[str, Any], broken: str = "") -> list[dict[str, Any]]:
    recipe, weights = case["form"]
    options = {key: case[key] for key in ("experts", "bias", "route")}
    return pool.run(
        bodies.training,
        ranks(case["mesh"]),
        axes=MESHES[case["mesh"]],
        recipe=recipe,
        weights=weights,
        broken=broken,
        **options,
    )


@pytest.mark.covering(always=[{"case": case} for case in SUMS], strength=1)
def test_training_equals_one_process(pool, recipe, case):
    outcomes = _train(pool, case)
    for outcome in outcomes:
        assert outcome["ranks"] == ranks(case["mesh"])
        assert {"output", "input", "loss", "gradient", "norm", "update"} <= outcome["shares"].keys()
        assert max(outcome["shares"].values()) <= 1
    # Weights of idle experts: gradients of three steps and the update, at least where all experts of a rank idle.
    assert (max(outcome["zeros"] for outcome in outcomes) > 0) == (case["route"] == "some")


@pytest.mark.covering(
    # Experts with their own strategy, which reduces their gradients, next to sharded modules.
    always=[{"how": {"strategy": {"mixture": "no_shard"}}}],
    strength=0,
)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "recipe", "weights", "how"),
    [
        ("ep2_dp2", "none", "fp32", {"units": "mixture"}),
        ("ep2_dp2", "none", "fp32", {"strategy": {"mixture": "no_shard"}}),
        ("ep2_tp2", "delayed", "quantized", {"strategy": "no_shard"}),
        ("ep2_dp2", "mxfp8", "quantized", {"strategy": "optim"}),
        ("hsdp_ep2", "delayed", "quantized", {"strategy": "optim_grads"}),
    ],
    ids=["units", "experts_no_shard", "no_shard", "optim", "optim_grads"],
)
def test_training_with_units_and_strategies(pool, mesh, recipe, weights, how):
    """Check experts inside other units, under every strategy."""
    options = {"experts": 5, "bias": "tp" not in mesh, "route": "uneven"}
    for outcome in pool.run(
        bodies.training,
        4,
        axes=MESHES[mesh],
        recipe=recipe,
        weights=weights,
        **options,
        **how,
    ):
        assert max(outcome["shares"].values()) <= 1


@pytest.mark.covering(always=[{"mesh": "ep2_dp2", "recipe": "none", "weights": "fp32"}], strength=0)
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=pytest.mark.ranks(ranks(mesh)))
        for mesh in ("ep2", "ep4", "ep2_dp2", "dp4", "hsdp_ep2", "ep2_tp2")
    ],
)
@pytest.mark.parametrize(("recipe", "weights"), [("none", "fp32"), ("none", "bf16"), ("mxfp8", "quantized")])
def test_dropped_tokens_weigh_as_in_one_process(pool, mesh, recipe, weights):
    """Check ranks whose tokens are all dropped. Gradients of experts are divided as those of dense weights."""
    options = {"experts": 7, "bias": "tp" not in mesh, "route": DROPPED}
    for outcome in pool.run(
        bodies.training, ranks(mesh), axes=MESHES[mesh], recipe=recipe, weights=weights, **options
    ):
        assert max(outcome["shares"].values()) <= 1


CONTROL = {"mesh": "ep2_dp2", "form": ("none", "fp32"), "experts": 4, "bias": True, "route": "every"}


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("broken", "found"),
    [("divide", r"gradient 0 mixture.up.weight\d: difference"), ("norm", r"norm \d: difference")],
)
def test_negative_control_missing_divisor_or_norm(pool, broken, found):
    with pytest.raises(BodyFailed, match=rf"(?s)AssertionError.*{found}"):
        _train(pool, CONTROL, broken)


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["ep4", "ep2_dp2", "hsdp_ep2"])
def test_gradients_in_fp16(pool, mesh):
    """Check gradients that FSDP2 divides before and after the sum, and once more over a single rank."""
    pool.run(binding.gradients_in_fp16, 4, axes=MESHES[mesh])


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("ep2_dp2", {}),
        ("hsdp_ep2", {"strategy": {"mixture": "no_shard"}}),
        ("hsdp_ep2", {}),
        ("hsdp_ep2", {"outer_strategy": "optim"}),
    ],
    ids=["sharded", "no_shard", "hsdp", "hfsdp"],
)
def test_sums_of_gradients(pool, mesh, how):
    """Check sums bit for bit against four times the mean over four ranks."""
    pool.run(binding.sums_of_gradients, 4, axes=MESHES[mesh], how=how)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_parameters_have_global_names(pool):
    first, second = (outcome["names"] for outcome in pool.run(binding.names, 2))
    assert [n for n in first if "mixture" in n and n in second] == []
    assert [n for n in second if n.startswith("mixture.up.")] == [
        f"mixture.up.{kind}{index}" for index in (3, 4) for kind in ("weight", "bias")
    ]


@pytest.mark.ranks(2)
def test_state_dicts_of_all_experts(pool):
    _, second = pool.run(binding.state_dicts, 2)
    assert "Missing key(s)" in second["refused"] and "mixture.up.weight3" in second["refused"]


@pytest.mark.ranks(2)
def test_local_names_collide(pool):
    """Check stock TE's names: 8 experts' weights have 4 names."""
    for outcome in pool.run(binding.count_colliding_names, 2):
        assert outcome == {"stock": (4, 4), "bound": (8, 0)}


# --- torch's fully_shard, called by the user ------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_torch_fully_shard_of_experts_equals_te_fsdp(pool):
    pool.run(binding.torch_fully_shard, 4, divide=True, mesh="experts")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        (
            {"divide": False, "mesh": "experts"},
            "OrderError",
            "set_gradient_divide_factor(number of data-parallel",
        ),
        (
            {"divide": True, "mesh": "dense"},
            "PlacementError",
            "mixture.up.weight0: fully_shard of an expert over",
        ),
    ],
    ids=["divide", "mesh"],
)
def test_torch_fully_shard_raises(pool, how, kind, text):
    errors = pool.run_expect_error(binding.torch_fully_shard, 4, **how)
    assert {error.type_name for error in errors} == {kind}, errors
    assert text in errors[0].message, errors[0]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        (
            "width",
            "MeshError",
            "expert module(s) 0 over ep=2: expected the same on rank 1 of ep as on rank 0",
        ),
        ("one fails", "PlacementError", "0 (GroupedLinear): delay_wgrad_compute=True is not supported"),
        (
            "weight mesh",
            "MeshError",
            "expert_weight_mesh: expected a mesh that shares only this rank with ep_mesh",
        ),
        ("unknown_module", "PlacementError", "experts 'encoder'"),
    ],
)
def test_errors_leave_the_model_unchanged(pool, mistake, kind, text):
    for error in pool.run_expect_error(binding.errors_of_binding, 4, mistake=mistake):
        assert error.type_name == kind and text in error.message, error


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("mistake", "kind", "text"),
    [
        ("unit", "PlacementError", "matches no module"),
        ("differs", "MeshError", "the ranks of the mesh have different models"),
        ("values", "InitError", "mixture.down.weight0: values differ between ranks"),
    ],
)
def test_fully_shard_raises_on_all_ranks(pool, mistake, kind, text):
    for error in pool.run_expect_error(binding.errors_of_fully_shard, 4, mistake=mistake):
        assert error.type_name == kind and text in error.message, error


@pytest.mark.ranks(4)
@pytest.mark.recipe("current")
@pytest.mark.parametrize("quantized", [False, True])
def test_current_scaling_with_tp_raises(pool, quantized):
    """Check TE's error when quantized weights are created, or else before the first step."""
    for error in pool.run_expect_error(binding.current_scaling, 4, quantized=quantized):
        assert error.type_name == ("ValueError" if quantized else "PrecisionError"), error
        assert "GroupedLinear" in error.message, error


# --- what a rank holds ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(8)
def test_memory_per_rank(pool):
    """Check that bytes of weights and optimizer state are divided by ep x dp_shard x tp."""
    axes = MESHES["ep2_dp2_tp2"]
    for rank, outcome in enumerate(pool.run(binding.memory, 8, axes=axes)):
        share = outcome["whole"] / math.prod(axes.values())
        assert outcome["weights"] == outcome["reported"] == share
        assert outcome["states"] == 2 * share
        held = "dp_shard:S(1) ep:S(0) tp:S(2)"
        assert outcome["rows"] == [
            ("mixture.up.weight", (8, 256, 128), (4, 64, 128), "dp_shard:_S(1, 2) ep:S(0) tp:S(1)"),
            ("mixture.down.weight", (8, 128, 256), (4, 64, 128), held),
        ], rank
