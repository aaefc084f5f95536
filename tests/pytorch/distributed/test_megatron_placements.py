"""Megatron-FSDP's second interface: placements per axis, module by module."""

from __future__ import annotations

import pytest
from bridge import placements

# Sums of a few numbers in a different order, two steps of SGD.
RTOL = 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("row", ["RPR", "RPF", "RFF", "FFF"])
def test_training_by_placements(pool, row):
    for found in pool.run(placements.trained, 2, rows=[row]):
        assert found["worst"] < RTOL and found["lr"] == [0.2, 0.1]
        assert found["units"] == (0 if row == "RPR" else 3)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("outer", ["RPR", "RPF"])
def test_training_by_placements_on_two_axes(pool, outer):
    for found in pool.run(placements.trained, 4, rows=[outer, "FFF"], nested=False):
        assert found["worst"] < RTOL and found["units"] == 1


@pytest.mark.ranks(2)
def test_unsupported_placements_raise(pool):
    for found in pool.run(placements.refusals, 2):
        assert "PlacementError Placements: parameter: expected 1 placements" in found["length"]
        assert (
            "near: (Flat, Partial, Replicate)" in found["row"] and "far: (Flat, Flat, Flat)" in found["axes"]
        )
        assert "OrderError" in found["twice"] and "fully_shard_optimizer(optimizer)" in found["forward"]
        assert "the mesh, outer placements and policy of the model" in found["policy"]
        assert found["foreign"].startswith("OrderError") and found["unsharded"].startswith("OrderError")
