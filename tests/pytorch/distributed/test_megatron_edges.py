"""Forms of Megatron-FSDP's scripts that the bridge refused, or answered with a raw error (docs/megatron.md)."""

from __future__ import annotations

import pytest
from bridge import edges

#: Sums of fp32 in another order: as test_megatron_placements.py's.
CLOSE = 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("row", ["FFF", "RPF", "RPR"])
def test_several_roots(pool, row, named):
    """One optimizer over several models, and axes by number of a mesh without names."""
    for found in pool.run(edges.several_roots, 2, rows=[row], named=named):
        assert found["worst"] < CLOSE < found["apart"], found


@pytest.mark.ranks(4)
@pytest.mark.parametrize("rows", [["RPR", "FFF"], ["RPF", "FFF"]])
def test_two_axes_without_names(pool, rows):
    for found in pool.run(edges.several_roots, 4, rows=rows, named=False):
        assert found["worst"] < CLOSE < found["apart"], found


@pytest.mark.ranks(2)
def test_no_policy(pool):
    """``mixed_precision_policy=None``."""
    assert pool.run(edges.no_policy, 2) == [0.0, 0.0]


@pytest.mark.ranks(2)
def test_nan_of_replicated_weights(pool):
    """The parameters are named, and those without such a gradient are not."""
    for text in pool.run(edges.nan_of_replicated_weights, 2):
        assert "parameters that are not sharded (2.weight, 2.bias): rank 1 (microbatch 1)" in text, text


@pytest.mark.ranks(2)
def test_no_name_of_an_axis(pool):
    """A hint that names the axis."""
    for text in pool.run(edges.no_name_of_an_axis, 2):
        assert text.endswith("Fix: dp_shard_dim='near'."), text


@pytest.mark.ranks(2)
def test_placements_of_torch(pool):
    """Newer scripts pass torch's ``Shard``: the error names the classes of the bridge."""
    for listed, wrapped in pool.run(edges.placements_of_torch, 2):
        assert "expected Placements(dp_axes, parameter, gradient, optimizer), got list" in listed, listed
        assert "(Flat, Flat, Flat)" in wrapped and "got 0: (Shard, Shard, Shard)" in wrapped, wrapped
