"""Megatron-FSDP script variants that the bridge rejected or failed on (docs/megatron.md)."""

from __future__ import annotations

import pytest
from bridge import edge_cases

#: Sums of fp32 in a different order: as test_megatron_placements.py's.
CLOSE = 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("row", ["FFF", "RPF", "RPR"])
def test_several_models_in_one_optimizer(pool, row, named):
    """Check one optimizer over several models, and axis numbers of an unnamed mesh."""
    for found in pool.run(edge_cases.several_models, 2, rows=[row], named=named):
        assert found["worst"] < CLOSE < found["apart"], found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [["RPR", "FFF"], ["RPF", "FFF"]])
def test_two_unnamed_mesh_axes(pool, rows):
    for found in pool.run(edge_cases.several_models, 4, rows=rows, named=False):
        assert found["worst"] < CLOSE < found["apart"], found


@pytest.mark.ranks(2)
def test_mixed_precision_policy_none(pool):
    """Check ``mixed_precision_policy=None``."""
    assert pool.run(edge_cases.mixed_precision_policy_none, 2) == [0.0, 0.0]


@pytest.mark.ranks(2)
def test_nan_report_names_replicated_weights(pool):
    """Check that parameters without such a gradient are not named."""
    for text in pool.run(edge_cases.nan_of_replicated_weights, 2):
        assert "parameters that are not sharded (2.weight, 2.bias): rank 1 (microbatch 1)" in text, text


@pytest.mark.ranks(2)
def test_missing_axis_name_raises(pool):
    """Check that the error suggests the axis name."""
    for text in pool.run(edge_cases.missing_axis_name, 2):
        assert text.endswith("Fix: dp_shard_dim='near'."), text


@pytest.mark.ranks(2)
def test_torch_placements_raise(pool):
    """Check torch's ``Shard``, as newer scripts pass it. The error names the bridge's classes."""
    for listed, wrapped in pool.run(edge_cases.torch_placements, 2):
        assert "expected Placements(dp_axes, parameter, gradient, optimizer), got list" in listed, listed
        assert "(Flat, Flat, Flat)" in wrapped and "got 0: (Shard, Shard, Shard)" in wrapped, wrapped
