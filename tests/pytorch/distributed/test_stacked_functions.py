"""Functions of a stacked weight under tp. They return what they return for the unsharded weight, or raise.

The rows were in the order of the ranks in 105 of 203 cases, among them ``p.T``, ``p[:, 2:4]`` and ``p.cumsum(0)``.
"""

from __future__ import annotations

import pytest
import torch
from plain_dcp import row_functions

#: torch 2.11 has fewer functions for DTensors.
LEAST = 150 if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13) else 140
CASES = [
    ("gated MLP", {"dp_shard": 2, "tp": 2}, "te_fsdp"),
    ("fused attention", {"dp_shard": 2, "tp": 2}, "torch"),
    ("fused attention", {"dp_shard": 1, "tp": 4}, "te_fsdp"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "axes", "sharder"), CASES)
def test_functions_equal_the_unsharded_weight(pool, kind, axes, sharder):
    for found in pool.run(row_functions.outcomes, 4, kind=kind, axes=axes, sharder=sharder):
        outcomes = {name: set(by_tensor.values()) for name, by_tensor in found.items()}
        assert [name for name, seen in outcomes.items() if "WRONG" in seen] == []
        # Functions that torch has not for DTensors raise, as without te_fsdp.
        assert [name for name, seen in outcomes.items() if any(s.startswith("invalid") for s in seen)] == []
        assert sum(seen == {"equal"} for seen in outcomes.values()) > LEAST
        for name in row_functions.REFUSED:
            assert all(
                "a write to some rows of a stacked weight" in text or text.startswith("torch: RuntimeError")
                for text in outcomes[f"write: {name}"]
            )


@pytest.mark.ranks(2)
def test_gradients_of_autograd_equal_those_of_backward(pool):
    """Check ``torch.autograd.grad(loss, weights)`` of a stacked weight among others."""
    assert pool.run(row_functions.gradients_of_autograd, 2) == [[], []]
