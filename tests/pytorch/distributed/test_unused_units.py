"""Units that a backward does not reach.

Units that run alone are tested, too. Gradients and hooks are those of one process.
"""

from __future__ import annotations

import pytest
import torch
from strategies import unused_units

#: Sums over two ranks in fp32, in a different order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", unused_units.PLANS)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads"])
def test_optimizer_in_backward(pool, strategy, kind):
    """Check that the hook of an unused parameter is not called, so that no step decays it. Others are called once."""
    for found in pool.run(unused_units.steps_in_hooks, 2, strategy=strategy, kind=kind):
        for have, want in found.values():
            torch.testing.assert_close(have, want, **CLOSE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["loop", "zero_grad"])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_backward_of_an_inner_unit_after_zero_grad(pool, strategy, how):
    """Check that every backward drops cleared gradients first, not only one that starts in the root."""
    for found in pool.run(unused_units.backward_of_inner_unit, 2, strategy=strategy, how=how):
        assert {name for name, (have, _) in found.items() if have is not None} == {
            "layers.1.weight",
            "layers.1.bias",
        }
        for have, want in found.values():
            torch.testing.assert_close(have, want, **CLOSE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["clear", "freeze", "write"])
@pytest.mark.parametrize("event", ["inner", "raise", "raise without gradients"])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim"])
def test_changes_after_forwards_without_backward(pool, strategy, event, change):
    """Check that ``model.parameters()`` are the optimizer's parameters after a forward without a backward."""
    for found in pool.run(unused_units.change_after, 2, strategy=strategy, event=event, change=change):
        for name, (have, want) in found.items():
            assert (have is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(have, want, **CLOSE)


@pytest.mark.ranks(2)
def test_skipped_prefetched_unit_uses_later_writes(pool):
    """Check that the next forward uses weights written after the evaluation, not those of its all-gather."""
    for have, want in pool.run(unused_units.write_after_prefetch, 2):
        torch.testing.assert_close(have, want, **CLOSE)
