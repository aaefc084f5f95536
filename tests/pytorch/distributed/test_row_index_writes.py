"""Writes to indexed rows of a sharded tensor. torch gathers these rows, so that the write is lost."""

from __future__ import annotations

import pytest
from plain_dcp import row_index_writes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["torch", "optim_grads_params"])
def test_writes_to_indexed_rows_raise(pool, by):
    for found in pool.run(row_index_writes.outcomes, 2, by=by):
        assert found == {"accepted": [], "wrong": []}
