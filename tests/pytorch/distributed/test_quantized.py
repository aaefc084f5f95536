"""Quantized training on meshes, within a derived tolerance of one process."""

from __future__ import annotations

import pytest
from harness import devices
from quantization import bodies

# (dp_replicate, tp, ranks); 2 ranks are for machines with 2 GPUs
DP2_TP2, DP4, TP4, HSDP, HSDP_TP, DP2, TP2 = (
    (1, 2, 4),
    (1, 1, 4),
    (1, 4, 4),
    (2, 1, 4),
    (2, 2, 8),
    (1, 1, 2),
    (1, 2, 2),
)
EVERY_MESH = [DP2_TP2, DP4, TP4, HSDP, HSDP_TP, DP2, TP2]
KINDS = ["linear", "layernorm_linear", "mlp_gelu", "mlp_swiglu", "attention", "transformer"]
NAMES = {
    DP2_TP2: "dp2xtp2",
    DP4: "dp4",
    TP4: "tp4",
    HSDP: "hsdp2x2",
    HSDP_TP: "hsdp2x2xtp2",
    DP2: "dp2",
    TP2: "tp2",
}


def _cases() -> list:
    """Return every kind and mesh with both formats, quantized and bf16 weights in turn; the rest is test_matrix's."""
    cases = []
    for index, kind in enumerate(KINDS):
        for recipe in ("current", "mxfp8"):
            cases.append((kind, recipe, index % 2 == 0, EVERY_MESH[index % 4]))
    for mesh in EVERY_MESH if devices.device_type() == "cuda" else EVERY_MESH[:5]:
        for recipe in ("current", "mxfp8"):
            cases += [("transformer", recipe, True, mesh), ("transformer", recipe, False, mesh)]
    unique = list(dict.fromkeys(cases))
    return [
        pytest.param(
            *case,
            id=f"{case[0]}-{case[1]}-{'quantized' if case[2] else 'bf16'}-{NAMES[case[3]]}",
            marks=pytest.mark.ranks(case[3][2]),
        )
        for case in unique
    ]


def _meshes(*meshes: tuple[int, int, int]) -> list:
    return [pytest.param(mesh, id=NAMES[mesh], marks=pytest.mark.ranks(mesh[2])) for mesh in meshes]


def check(results: list[dict], recipe: str, quantized: bool) -> None:
    """Check the results of every run on every rank."""
    for outcome in results:
        rows = zip(outcome["losses"], outcome["reference"], outcome["tolerances"], strict=True)
        assert all(abs(loss - expected) <= bound * expected for loss, expected, bound in rows), outcome
        wanted = outcome["expected_quantized"] if quantized else 0
        assert (outcome["expected_quantized"] > 0) == quantized
        assert outcome["quantized"] == [wanted] * bodies.STEPS, "weights did not stay quantized"
        assert outcome["bytes_at_init"] == wanted
        if quantized and recipe == "current":
            assert outcome["scales_equal"] == [True] * bodies.STEPS
        assert outcome["losses"][-1] < 0.97 * outcome["losses"][0], (
            "nothing was learned, so nothing was compared"
        )


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize(("kind", "recipe", "quantized", "mesh"), _cases())
def test_training_equals_one_process(pool, kind, recipe, quantized, mesh):
    dp_replicate, tp, ranks = mesh
    results = pool.run(
        bodies.training,
        ranks,
        kind=kind,
        recipe=recipe,
        quantized=quantized,
        dp_replicate=dp_replicate,
        tp=tp,
    )
    check(results, recipe, quantized)


@pytest.mark.covering(always=[{"recipe": "current", "reshard": False}], strength=1)
@pytest.mark.arch("9.0")
@pytest.mark.parametrize("mesh", _meshes(DP2_TP2, *((DP2, TP2) if devices.device_type() == "cuda" else ())))
@pytest.mark.parametrize(("reshard", "quantized"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_training_with_hopper_transposes(pool, recipe, quantized, reshard, mesh):
    """Check that the first backward reads no scrambled transpose, also without resharding."""
    dp_replicate, tp, ranks = mesh
    options = {
        "kind": "mlp_gelu",
        "recipe": recipe,
        "quantized": quantized,
        "dp_replicate": dp_replicate,
        "tp": tp,
    }
    hidden = {"current": 128, "block": 512}[recipe]
    results = pool.run(bodies.training, ranks, hidden=hidden, reshard_after_forward=reshard, **options)
    check(results, recipe, quantized)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_weights_kept_unsharded_until_backward(pool, recipe):
    """Check that both directions are gathered once. With tp4 the FSDP axis has size 1."""
    for tp in (2, 4):
        options = {"kind": "mlp_swiglu", "recipe": recipe, "quantized": True, "dp_replicate": 1, "tp": tp}
        check(pool.run(bodies.training, 4, reshard_after_forward=False, **options), recipe, True)


@pytest.mark.ranks(4)
def test_negative_control_scale_per_rank(pool):
    """Negative control: without the weight mesh the scales of ranks differ."""
    errors = pool.run_expect_error(
        bodies.training,
        4,
        kind="mlp_gelu",
        recipe="current",
        quantized=True,
        dp_replicate=1,
        tp=2,
        drop_shared_scale=True,
    )
    for error in errors:
        assert error.type_name == "MeshError" and "weight_mesh" in error.message, error


@pytest.mark.ranks(4)
def test_negative_control_doubled_updates(pool):
    """Negative control: doubled updates exceed the tolerance."""
    options = {"kind": "mlp_gelu", "recipe": "current", "quantized": True, "dp_replicate": 1, "tp": 2}
    results = pool.run(bodies.training, 4, learning_rate=2 * bodies.LEARNING_RATE, **options)
    with pytest.raises(AssertionError, match="losses"):
        check(results, "current", True)


@pytest.mark.ranks(4)
def test_hsdp_step_slices_no_mesh(pool):
    """It is the host that a small batch waits for, and FSDP2 of torch 2.11 and 2.12 slices a mesh at every gather."""
    assert pool.run(bodies.meshes_sliced_in_a_step, 4, mended=True) == [0] * 4
    stock = pool.run(bodies.meshes_sliced_in_a_step, 4, mended=False)
    assert all(stock) or not any(stock)
