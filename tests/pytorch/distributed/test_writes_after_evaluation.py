"""Writes to weights after an evaluation. They changed a copy that the next step or evaluation dropped."""

from __future__ import annotations

import pytest
from parity import writes_after_evaluation


@pytest.mark.ranks(2)
@pytest.mark.parametrize("by", ["torch", "method", "2", "optim", "optim_grads", "optim_grads_params"])
def test_writes_after_evaluation_equal_one_process(pool, by):
    for found in pool.run(
        writes_after_evaluation.compare_changes_after_evaluation, 4 if by == "2" else 2, by=by
    ):
        assert max(found.values()) < 1e-5, found  # relative norms; FP32 sums in a different order


@pytest.mark.ranks(2)
def test_unchanged_weights_are_not_gathered_again(pool):
    """Check that units of ``reshard_after_forward=False`` keep unchanged weights for the next evaluation."""
    for counts in pool.run(writes_after_evaluation.count_all_gathers, 2, by="torch"):
        assert counts == [3, 0, 0]


@pytest.mark.ranks(2)
def test_assignment_to_data_raises(pool):
    """Check an assignment to `.data` of a weight that is not the first of its unit. torch drops the value."""
    for text in pool.run(writes_after_evaluation.error_of_data_assignment, 2, by="optim_grads_params"):
        assert "blocks.1.fc2_weight: parameter.data was assigned" in text
