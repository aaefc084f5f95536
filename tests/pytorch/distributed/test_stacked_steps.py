"""Optimizer steps on stacked weights under tp, compiled or without foreach."""

from __future__ import annotations

import pytest
from plain_dcp import stacked_steps
from test_compiled_steps import TRACES_VIEWS


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "foreach", "way"),
    [("SGD", False, "function"), ("SGD", True, "method"), ("AdamW", False, "method")],
    ids=["sgd", "sgd foreach", "adamw"],
)
@TRACES_VIEWS
def test_compiled_optimizer_step(pool, name, foreach, way):
    """AOTAutograd raised AssertionError: expected DTensor, got BoxedDTensor."""
    assert pool.run(stacked_steps.compiled, 2, name=name, foreach=foreach, way=way, timeout=200) == [[]] * 2


@pytest.mark.ranks(2)
@TRACES_VIEWS
def test_compiled_functions(pool):
    """Check that a trace has the weight's row order."""
    for found in pool.run(stacked_steps.traced, 2, timeout=200):
        assert set(found.values()) == {"equal"}, found


@pytest.mark.ranks(2)
def test_elementwise_functions_skip_the_row_order_search(pool):
    """Check AdamW, which searched ten times per parameter and step."""
    assert pool.run(stacked_steps.calls_in_order, 2) == [0, 0]
