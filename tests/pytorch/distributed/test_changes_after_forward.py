"""Changes to weights that stay unsharded after a forward. They apply to the shards or raise an error."""

from __future__ import annotations

import pytest
from strategies import changes_after_forward


@pytest.mark.ranks(2)
@pytest.mark.parametrize("between", ["nothing", "evaluation", "release"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_weights_frozen_after_forward_stay_frozen(pool, strategy, between):
    """Check `requires_grad` of unsharded weights, which the next step dropped."""
    for outcome in pool.run(
        changes_after_forward.freeze_after_forward, 2, strategy=strategy, between=between
    ):
        assert outcome["worst"] < 1e-5 and outcome["flags"] == [] and outcome["control"], outcome


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_writes_after_forward_raise_in_the_step(pool, strategy):
    """Check a write that the step would drop."""
    for error in pool.run_expect_error(changes_after_forward.write_after_forward, 2, strategy=strategy):
        assert error.type_name == "OrderError" and "head.weight was written to" in error.message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_writes_between_evaluation_and_microbatches(pool, strategy):
    """Check a write before the first microbatch, which was taken for a write between microbatches."""
    # fp32: gradients summed in a different order.
    assert (
        max(pool.run(changes_after_forward.write_between_evaluation_and_microbatches, 2, strategy=strategy))
        < 1e-5
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_manual_unshard_after_a_load(pool, strategy, tmp_path):
    """Check that it all-gathers the loaded weights. The forward raised."""
    options = {"strategy": strategy, "path": str(tmp_path / "saved")}
    assert pool.run(changes_after_forward.unshard_after_a_load, 2, **options) == [(True, False)] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_write_after_manual_unshard_raises(pool, strategy):
    """Check that a forward does not use weights from before a write, as it did under optim_grads_params."""
    for error in pool.run_expect_error(changes_after_forward.write_after_unshard, 2, strategy=strategy):
        assert error.type_name == "OrderError"
        assert "forward with an unsharded weight from before the last update" in error.message
