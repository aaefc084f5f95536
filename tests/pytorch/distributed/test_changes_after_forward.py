"""Changes to weights that a strategy keeps unsharded after a forward: applied to the shards, or an error."""

from __future__ import annotations

import pytest
from strategies import changes_after_forward


@pytest.mark.ranks(2)
@pytest.mark.parametrize("between", ["nothing", "evaluation", "release"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_weights_frozen_after_forward_stay_frozen(pool, strategy, between):
    """Kind: a flag on unsharded weights, which the next step drops."""
    for outcome in pool.run(
        changes_after_forward.freeze_after_forward, 2, strategy=strategy, between=between
    ):
        assert outcome["worst"] < 1e-5 and outcome["flags"] == [] and outcome["control"], outcome


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_writes_after_forward_raise_in_the_step(pool, strategy):
    """Kind: a write that the step drops."""
    for error in pool.run_expect_error(changes_after_forward.write_after_forward, 2, strategy=strategy):
        assert error.type_name == "OrderError" and "head.weight was written to" in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_writes_between_evaluation_and_microbatches(pool, strategy):
    """Kind: a write that is taken for one between microbatches."""
    # fp32: gradients summed in another order.
    assert (
        max(pool.run(changes_after_forward.write_between_evaluation_and_microbatches, 2, strategy=strategy))
        < 1e-5
    )
