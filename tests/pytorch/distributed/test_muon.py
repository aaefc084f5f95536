"""`te_fsdp.Muon` on every mesh against torch's optimizers in one process.

Its results have the bits of torch's Muon and AdamW.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from parity import muon

CASES = {
    "dp2": ({"dp_shard": 2}, {"interleaved": True}),
    "tp2": ({"dp_shard": 1, "tp": 2}, {}),
    "dp2_tp2": ({"dp_shard": 2, "tp": 2}, {"frozen": True}),
    "dp2_tp2 interleaved": ({"dp_shard": 2, "tp": 2}, {"interleaved": True}),
    "dp4 as one matrix": ({"dp_shard": 4}, {"split": False}),
    "ep2": ({"dp_shard": 2, "ep": 2}, {"experts": True}),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, {"strategy": "optim"}),
    "hfsdp": ({"dp_replicate": 2, "dp_shard": 2}, {"outer_strategy": "optim"}),
    "no_shard": ({"dp_shard": 2}, {"strategy": "no_shard"}),
}


@pytest.mark.covering(days=2)
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.ranks(math.prod(CASES[c][0].values()))) for c in CASES]
)
def test_muon_is_bitwise_equal_to_one_process(pool, case):
    axes, how = CASES[case]
    pool.run(muon.bitwise_equal, math.prod(axes.values()), axes=axes, **how)


@pytest.mark.ranks(2)
def test_negative_control_fused_weights_as_one_matrix(pool):
    """Negative control: QKV and gated fc1 differ if each is orthogonalized as one matrix."""
    for error in pool.run_expect_error(muon.bitwise_equal, 2, axes={"dp_shard": 2}, spoil="fused"):
        assert "layernorm_qkv.weight" in error.message and "fc1_weight" in error.message
        assert "fc2_weight" not in error.message


@pytest.mark.ranks(4)
def test_checkpoints_load_on_a_different_mesh(pool, tmp_path):
    """Check both algorithms with fused layouts. The next steps have the bits of an uninterrupted run."""
    path = str(tmp_path / "step-1")
    pool.run(muon.bitwise_equal, 4, axes={"dp_shard": 2, "tp": 2}, save=path)
    pool.run(muon.bitwise_equal, 4, axes={"dp_shard": 4}, load=path)
    pool.run(muon.bitwise_equal, 1, axes={"dp_shard": 1}, load=path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("recipe", "hidden"), [("current", 64), ("mxfp8", 128)])
def test_main_weights_of_quantized_weights(pool, recipe, hidden):
    pool.run(muon.quantized, 2, recipe=recipe, hidden=hidden)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_update_does_not_overwrite_momentum(pool, dtype, nesterov):
    """Check that the update is not computed in the memory of the optimizer's state."""
    for strategy in ("optim_grads_params", "no_shard"):
        pool.run(muon.momentum, 2, dtype=dtype, nesterov=nesterov, strategy=strategy)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "error", "texts"),
    [
        pytest.param(
            "no matrix",
            "PlacementError",
            ("0.bias of shape (48,)", "adamw={...} updates all other parameters"),
            id="no matrix",
        ),
        pytest.param("early", "OrderError", ("1 of 1 parameters are not the model's",), id="early"),
        pytest.param(
            "copy", "OrderError", ("te_fsdp.Muon(model, ...)", "an optimizer without a model"), id="copy"
        ),
        pytest.param("option", "PlacementError", ("lr, betas, eps, weight_decay", "amsgrad"), id="option"),
    ],
)
def test_unsupported_usage_raises(pool, case, error, texts):
    for raised in pool.run_expect_error(muon.errors_of_muon, 2, case=case):
        assert raised.type_name == error and all(text in raised.message for text in texts), raised.message


@pytest.mark.ranks(4)
def test_documented_table_of_torch_optimizers(pool):
    """Check that docs/optimizers.md lists every optimizer of torch and its behavior."""
    page = (Path(__file__).parents[3] / "docs/optimizers.md").read_text()
    shared = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|[^|]*\| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    rows = [(name, *cells) for names, *cells in shared for name in re.findall(r"`(\w+)`", names)]
    cases = (
        {"axes": {"dp_shard": 2, "tp": 2}},
        {
            "axes": {"dp_replicate": 2, "dp_shard": 2},
            "outer_strategy": "optim",
        },
    )
    for column, how in enumerate(cases, 1):
        for outcomes in pool.run(muon.torch_optimizers, 4, **how):
            assert outcomes == {row[0]: row[column] for row in rows}
    # With a rank that has none of 3 rows.
    outcomes = pool.run(muon.torch_optimizers, 4, axes={"dp_shard": 4}, only=("Muon", "SGD"))
    assert outcomes[0] == {"Muon": "refused", "SGD": "same bits"}
