"""torch.compile of an optimizer's step, and of functions of te_fsdp between two backwards."""

from __future__ import annotations

import pytest
from strategies import compiled_steps


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axes", "way", "optimizer", "dtype"),
    [
        ({}, "step", "SGD", "float32"),
        ({"tp": 2}, "update", "SGD", "float32"),
        ({}, "update", "SGD", "bfloat16"),
        ({}, "step", "FusedAdam", "bfloat16"),
    ],
    ids=["dp", "tp", "main_weights", "fused_adam"],
)
def test_compiled_update_is_the_same(pool, axes, way, optimizer, dtype):
    given = {"axes": axes, "way": way, "optimizer": optimizer, "dtype": dtype}
    assert min(pool.run(compiled_steps.updated, 2, **given, timeout=200)) == 14
