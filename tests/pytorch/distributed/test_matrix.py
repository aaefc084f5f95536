"""Every recipe through every module, on every mesh, with every option, by value against stock TE in one process.

`matrix.definitions` has the supported and the rejected combinations, `matrix.tolerances` the tolerances.
By default a covering part runs, a different one each day. On 4 GPUs:
`pytest tests/pytorch/distributed/test_matrix.py --matrix subset`.
"""

from __future__ import annotations

import functools

import pytest
from harness import BodyFailed
from matrix import bodies, rotation
from matrix.definitions import MESHES, Case, Refusal, default, every_format, full, refused, subset
from quantization.models import why_no_hybrid_linear


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    arch = {"test_training_on_blackwell": "10.0", "test_training_on_hopper": "9.0"}.get(
        metafunc.definition.name
    )
    if arch is not None:
        today = functools.partial(default, rotation.seed_of(metafunc.config))
        wanted = {"covering": today, "formats": every_format, "full": full, "subset": subset}[
            metafunc.config.getoption("--matrix", "covering")
        ]
        cases = [_param(case) for case in wanted() if case.arch == arch]
        metafunc.parametrize(("recipe", "case"), cases)


def _param(case: Case) -> object:
    return pytest.param(case.recipe, case, id=str(case), marks=pytest.mark.ranks(MESHES[case.mesh].ranks))


@pytest.mark.arch("10.0")
def test_training_on_blackwell(pool, recipe, case):
    _train(pool, case)


@pytest.mark.arch("9.0")
def test_training_on_hopper(pool, recipe, case):
    _train(pool, case)


def _train(pool, case: Case, broken: str = "") -> None:
    ranks = MESHES[case.mesh].ranks
    holds_linear = case.module in ("linear", "layernorm_linear", "attention", "transformer")
    is_hybrid = case.recipe == "hybrid" and case.weights == "quantized"
    if holds_linear and is_hybrid and (reason := why_no_hybrid_linear()):
        pytest.skip(reason)
    for outcome in pool.run(bodies.training, ranks, broken=broken, **case.kwargs):
        assert outcome["ranks"] == ranks
        assert {"output", "input", "loss", "gradient", "update"} <= outcome["shares"].keys()
        assert max(outcome["shares"].values()) <= 1


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.arch("10.0")
@pytest.mark.parametrize(
    ("case", "refusal"), [pytest.param(*one, id=str(one[0])) for one in refused() if one[0].arch == "10.0"]
)
def test_unsupported_combinations_raise(pool, case, refusal):
    _raises(pool, case, refusal)


@pytest.mark.cpu
@pytest.mark.arch("9.0")
@pytest.mark.parametrize(
    ("case", "refusal"), [pytest.param(*one, id=str(one[0])) for one in refused() if one[0].arch == "9.0"]
)
def test_unsupported_combinations_raise_on_hopper(pool, case, refusal):
    _raises(pool, case, refusal)


def _raises(pool, case: Case, refusal: Refusal) -> None:
    for error in pool.run_expect_error(bodies.expect_error, MESHES[case.mesh].ranks, **case.kwargs):
        assert error.type_name == refusal.error, error
        assert refusal.text in error.message, error


@pytest.mark.cpu
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe_name", "text"),
    [
        ("hybrid_nvfp4", "hybrid weight with an NVFP4 part"),
        ("hybrid_untyped", "hybrid weight with an IdentityQuantizer without dtype"),
    ],
)
def test_unsupported_hybrid_weights_raise(pool, recipe_name, text):
    for error in pool.run_expect_error(bodies.shard_only, 2, recipe=recipe_name, weights="quantized"):
        assert error.type_name == "PrecisionError" and text in error.message, error


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_unsupported_sequence_parallelism_raises(pool, kind):
    for error in pool.run_expect_error(bodies.sequence_parallel_without_mode, 2, kind=kind):
        assert error.type_name == "PlacementError" and "sequence_parallel=True" in error.message, error


# --- negative controls: what the comparison must find ---------------------------------------------------------------


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block", "mxfp8", "nvfp4", "hybrid"])
def test_negative_control_lost_reduction_over_dp(pool, recipe):
    case = Case(recipe=recipe, weights="bf16", module="linear", mesh="dp4")
    with pytest.raises(BodyFailed, match=r"(?s)AssertionError.*gradient \d inner.*difference"):
        _train(pool, case, broken="reduction")


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["none", "current", "block", "mxfp8"])
def test_negative_control_lost_reduction_over_tp(pool, recipe):
    case = Case(recipe=recipe, weights="bf16", module="layernorm_linear", sequence_parallel=True)
    with pytest.raises(
        BodyFailed, match=r"(?s)AssertionError.*gradient \d inner.first.layer_norm_weight: difference"
    ):
        _train(pool, case, broken="partial_grad")


@pytest.mark.covering(strength=0)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4"])
def test_negative_control_wrong_scale_on_one_rank(pool, recipe):
    case = Case(recipe=recipe, weights="quantized", module="linear", mesh="dp4")
    with pytest.raises(BodyFailed, match=r"(?s)AssertionError.*output \d"):
        _train(pool, case, broken="scale")
