"""Parameters without values, under torch's fully_shard."""

from __future__ import annotations

import pytest
from strategies import emptied


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("recipe", "initialize"),
    [
        ("none", "no"),
        ("none", "data"),
        ("current", "no"),
        ("none", "reset"),
        ("none", "written"),
        ("current", "reset"),
    ],
)
def test_forward_after_to_empty(pool, recipe, initialize):
    """Check that each rank raises for a module that nothing initialized, and names its parameters."""
    for text in pool.run(emptied.forward, 2, recipe=recipe, initialize=initialize):
        if initialize in ("no", "data"):
            assert text.startswith("0.layer_norm_weight, 0.layer_norm_bias") and "not initialized" in text, (
                text
            )
        else:
            assert text == ""
