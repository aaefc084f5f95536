"""Main weights: fp32 under every optimizer, initialized from the unrounded values, quantized once per step."""

from __future__ import annotations

import pytest
from quantization import optimizers
from quantization.weight_bytes import STEPS

# (dp_replicate, tp, ranks)
MESHES = {"dp2xtp2": (1, 2, 4), "dp4": (1, 1, 4), "hsdp2x2": (2, 1, 4)}
#: fc1, fc2, their biases, the norm's weight and bias
PARAMETERS = 6


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("implementation", "recipe", "mesh"),
    [
        ("for each", "current", "hsdp2x2"),
        ("foreach", "mxfp8", "dp4"),
        ("fused", "current", "dp2xtp2"),
        ("fused", "delayed", "dp2xtp2"),
        ("foreach", "nvfp4", "dp2xtp2"),
    ],
)
def test_adamw_equals_fp32_training(pool, implementation, recipe, mesh):
    dp_replicate, tp, ranks = MESHES[mesh]
    options = {"implementation": implementation, "recipe": recipe, "dp_replicate": dp_replicate, "tp": tp}
    buffers = {"current": 4, "delayed": 4, "mxfp8": 8, "nvfp4": 12}[recipe]
    expected = {"buffers": buffers * STEPS, "main": PARAMETERS * STEPS}
    assert pool.run(optimizers.adamw, ranks, **options) == [expected] * ranks


@pytest.mark.ranks(2)
def test_main_weights_begin_at_unrounded_initial_values(pool):
    assert pool.run(optimizers.compare_initial_main_weights, 2, recipe="current") == [PARAMETERS] * 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("route", ["te_fsdp", "state_dict"])
def test_resume_equals_uninterrupted_training(pool, tmp_path, route):
    results = pool.run(optimizers.resumed, 4, route=route, path=str(tmp_path), dp_replicate=1, tp=2)
    assert results == [[]] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("adamw", "PrecisionError", "AdamW on a quantized weight"),
        ("sgd foreach", "PrecisionError", "call te_fsdp.main_weights(model, optimizer)"),
        ("no main weights", "PrecisionError", "master_weights=False"),
        ("half", "PrecisionError", "master_weight_dtype=torch.float16"),
        ("remainders", "PrecisionError", "store_param_remainders=True"),
        ("main_weights of it", "PrecisionError", "fc1_weight"),
        ("too late", "OrderError", "after its first step"),
        ("closure", "OrderError", "step(closure)"),
    ],
)
def test_wrong_usage_raises(pool, case, kind, words):
    for error in pool.run_expect_error(optimizers.error_of, 4, case=case):
        assert error.type_name == kind and words in error.message, error


@pytest.mark.ranks(4)
@pytest.mark.recipe("delayed")
@pytest.mark.parametrize("mesh", list(MESHES))
def test_delayed_state_in_state_dicts(pool, mesh):
    dp_replicate, tp, _ = MESHES[mesh]
    assert pool.run(optimizers.delayed_state_dict, 4, dp_replicate=dp_replicate, tp=tp) == [1] * 4
