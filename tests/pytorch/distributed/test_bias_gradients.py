"""Trained biases whose weight is frozen: TransformerEngine computes no gradient for them in high precision."""

from __future__ import annotations

import pytest
from quantization import bias_gradients

WITHOUT = {
    "Linear": ["0.bias"],
    "LayerNormLinear": ["0.bias"],
    "LayerNormMLP": ["0.fc2_bias"],
    "GroupedLinear": ["0.bias0", "0.bias1"],
}


@pytest.mark.parametrize("kind", WITHOUT)
def test_stock_te_gives_no_bias_gradient_for_a_frozen_weight(pool, kind):
    """Control: fails when a release of TransformerEngine computes these gradients."""
    assert pool.run(bias_gradients.untrained_parameters_of_stock_te, 1, kind=kind, recipe="none") == [
        WITHOUT[kind]
    ]
    assert pool.run(bias_gradients.untrained_parameters_of_stock_te, 1, kind=kind, recipe="current") == [[]]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", WITHOUT)
def test_forward_raises_for_a_trained_bias_of_a_frozen_weight(pool, kind, late):
    """Check biases that are trained without their weight. TE left them unchanged without an error."""
    for found in pool.run(bias_gradients.sharded, 2, kind=kind, recipe="none", late=late):
        assert f"GradientError: {WITHOUT[kind][0]}: a trained bias of a frozen weight" in found["error"], (
            found
        )
        assert found["trained"] or not kind.startswith("LayerNorm")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", WITHOUT)
def test_quantized_forward_trains_the_bias_of_a_frozen_weight(pool, kind):
    for found in pool.run(bias_gradients.sharded, 2, kind=kind, recipe="current", late=False):
        assert found == {"error": "", "trained": True}


@pytest.mark.ranks(2)
def test_output_projection_bias_of_a_frozen_weight_is_trained(pool):
    """Check output projections, whose bias autograd adds. Only the bias of QKV has no gradient."""
    (missing,) = pool.run(
        bias_gradients.untrained_parameters_of_stock_te, 1, kind="TransformerLayer", recipe="none"
    )
    assert missing == [f"0.self_attention.layernorm_qkv.{name}_bias" for name in ("query", "key", "value")]
    for found in pool.run(bias_gradients.sharded, 2, kind="TransformerLayer", recipe="none", late=False):
        assert "GradientError: 0.self_attention.layernorm_qkv.key_bias: a trained bias" in found["error"], (
            found
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", ["parts", "evaluated", "trained again", "no gradients"])
def test_forward_passes_if_no_bias_gradient_is_missing(pool, case):
    """Check a partly frozen layer, a layer that runs later, and a forward without gradients."""
    assert pool.run(bias_gradients.errors_of_unneeded_gradients, 2, case=case) == [[], []]
