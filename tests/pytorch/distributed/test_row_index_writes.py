"""Writes to indexed rows of a sharded tensor. torch gathers these rows, so that the write is lost."""

from __future__ import annotations

import pytest
from plain_dcp import row_index_writes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["torch", "optim_grads_params"])
def test_writes_to_indexed_rows_raise(pool, by):
    for found in pool.run(row_index_writes.outcomes, 2, by=by):
        assert found == {"accepted": [], "wrong": []}


@pytest.mark.ranks(2)
def test_writes_raise_after_the_end_of_a_model_with_an_equal_mesh(pool):
    for text in pool.run(row_index_writes.write_after_an_earlier_model, 2):
        assert "a write to some rows of a sharded tensor" in text
