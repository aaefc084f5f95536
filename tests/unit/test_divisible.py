"""Check that sizes that tensor parallelism does not divide are rejected before TE builds a module."""

from __future__ import annotations

import pytest

import te_fsdp
from te_fsdp.errors import PlacementError

CASES = [
    ("TransformerLayer", (24, 48, 8), {}, "num_attention_heads=8"),
    ("TransformerLayer", (24, 48, 6), {"num_gqa_groups": 2}, "num_gqa_groups=2"),
    ("TransformerLayer", (24, 50, 6), {}, "ffn_hidden_size=50"),
    ("MultiheadAttention", (24, 8), {}, "num_attention_heads=8"),
    ("DotProductAttention", (8, 4), {}, "num_attention_heads=8"),
    ("DotProductAttention", (6, 4), {"num_gqa_groups": 2}, "num_gqa_groups=2"),
    ("LayerNormMLP", (24, 50), {"set_parallel_mode": True}, "ffn_hidden_size=50"),
    ("Linear", (24, 50), {"parallel_mode": "column"}, "out_features=50"),
    ("Linear", (50, 24), {"parallel_mode": "row"}, "in_features=50"),
    ("LayerNormLinear", (24, 50), {"parallel_mode": "column"}, "out_features=50"),
    ("GroupedLinear", (2, 24, 50), {"parallel_mode": "column", "bias": False}, "out_features=50"),
]


@pytest.mark.parametrize(("kind", "args", "kwargs", "words"), CASES)
def test_sizes_that_tp_does_not_divide_are_rejected(te, kind, args, kwargs, words):
    with pytest.raises(PlacementError) as caught:
        getattr(te_fsdp, kind)(*args, tp_size=3, **kwargs)
    assert f"{kind}: {words} over tp_size=3: expected a multiple of 3" in str(caught.value)
    assert "Fix: tp=2, or " in str(caught.value)


@pytest.mark.parametrize(("kind", "args", "kwargs", "words"), CASES)
def test_divisible_sizes_are_built(te, kind, args, kwargs, words):
    getattr(te_fsdp, kind)(*args, tp_size=2, **kwargs)


def test_stock_te_attention_with_indivisible_heads_is_rejected(te):
    """Stock TE rounds the number of local groups down and continues."""
    attention = te.DotProductAttention(8, 4, tp_size=3)
    assert attention.num_gqa_groups_per_partition == 2
    with pytest.raises(PlacementError, match="DotProductAttention: num_attention_heads=8 over tp_size=3"):
        te_fsdp.set_device_mesh(attention)


def test_unknown_te_arguments_raise_type_error(te):
    with pytest.raises(TypeError, match="features"):
        te_fsdp.Linear(8, 8, features=3, tp_size=3)
