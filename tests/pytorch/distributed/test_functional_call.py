"""``torch.func.functional_call`` before the first forward."""

from __future__ import annotations

import pytest
from parity import functional_call


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("values", "by"), [("tensors", "te_fsdp"), ("parameters", "te_fsdp"), ("tensors", "torch")]
)
def test_functional_call_before_first_forward_raises(pool, values, by):
    """Check values that FSDP2 would adopt as its shards. The model would compute with them from then on."""
    for result in pool.run(functional_call.error_of_functional_call, 2, values=values, by=by):
        text = (
            "values of torch.func.functional_call"
            if by == "te_fsdp"
            else "a parameter replaced by torch.func.functional_call"
        )
        assert "OrderError: " in result["text"] and text in result["text"], result
        assert result["own"], result


@pytest.mark.ranks(2)
def test_assigned_parameters_pass(pool):
    assert pool.run(functional_call.assign_parameters, 2) == [True, True]
