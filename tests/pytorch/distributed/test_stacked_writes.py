"""Writes to a stacked weight under tp. They change the same elements as in the unsharded weight, or raise."""

from __future__ import annotations

import pytest
from plain_dcp import stacked_writes

CASES = [
    ("gated MLP", {"dp_shard": 2, "tp": 2}, "te_fsdp"),
    ("fused attention", {"dp_shard": 2, "tp": 2}, "torch"),
]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "axes", "sharder"), CASES)
def test_writes_equal_the_unsharded_weight(pool, kind, axes, sharder):
    """Check ``weight.add_(delta)`` with a DTensor in the order of the unsharded module.

    Under ``implicit_replication`` a plain tensor is such a DTensor. Other rows of it were added without an error.
    """
    assert pool.run(stacked_writes.compare_writes, 4, kind=kind, axes=axes, sharder=sharder) == [[]] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "axes", "sharder"), CASES)
def test_writes_to_local_tensors_of_slices_raise(pool, kind, axes, sharder):
    """Check ``weight.chunk(2)[0].to_local()``, a copy in which a write would be lost."""
    assert pool.run(stacked_writes.writes_without_error, 4, kind=kind, axes=axes, sharder=sharder) == [[]] * 4


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("kind", "axes", "sharder"), CASES)
def test_steps_with_assigned_gradients(pool, kind, axes, sharder):
    """Check that ``weight.grad = replicated`` reaches the rows of the unsharded module."""
    assert (
        pool.run(
            stacked_writes.compare_steps_with_assigned_gradients, 4, kind=kind, axes=axes, sharder=sharder
        )
        == [[]] * 4
    )
