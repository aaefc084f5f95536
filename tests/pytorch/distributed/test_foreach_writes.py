"""Writes of ``torch._foreach_`` functions to weights after an evaluation. The next evaluation uses them.

Under ``optim`` and ``optim_grads`` it used the weights that the earlier evaluation had all-gathered.
"""

from __future__ import annotations

import bodies_weight_averaging
import pytest
import torch

#: torch 2.11 has fewer functions for DTensors.
LEAST = 40 if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13) else 30


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_evaluation_uses_foreach_writes(pool, strategy):
    for found in pool.run(bodies_weight_averaging.foreach_writes_between_evaluations, 2, strategy=strategy):
        assert found["unequal"] == []
        assert len(found["equal"]) > LEAST, found


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
def test_training_installs_no_foreach_handlers(pool, strategy):
    """Check that training has no handlers, which would slow down torch's optimizers."""
    assert pool.run(bodies_weight_averaging.has_foreach_handlers, 2, strategy=strategy) == [[True, False]] * 2
