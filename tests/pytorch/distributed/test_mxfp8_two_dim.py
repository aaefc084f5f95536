"""2-D MXFP8 weights. They train as in one process, with half the bytes of weights with two buffers."""

from __future__ import annotations

import pytest
import torch
from quantization import two_dim

DP2_TP2, DP2 = {"dp_shard": 2, "tp": 2}, {"dp_shard": 2}
#: Kind of model, mesh, whether weights stay gathered, whether the forward runs again, bytes relative to two planes.
#: With resharding both send one direction in forward and one in backward. Recomputation needs both directions of two
#: planes in backward. Shards along columns are packed in multiples of a weight's bytes: three, and two for one plane.
CASES = {
    "transformer": ("transformer", DP2_TP2, False, False, 1),
    "gathered once": ("linear", DP2, True, False, 1 / 2),
    "recomputed": ("linear", DP2, False, True, 2 / 3),
    "experts": ("grouped", DP2, False, False, 1),
    "columns": ("columns", DP2, True, False, None),
}


@pytest.mark.recipe("mxfp8_2d")
@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_training_with_shared_buffer_is_bitwise_equal(pool, tmp_path, case):
    """Check losses and weights bit for bit against two buffers, and against one process within MXFP8's tolerance.

    Negative control: blocks of one row have different losses.
    """
    kind, axes, kept, recompute, share = CASES[case]
    ranks = 4 if axes is DP2_TP2 else 2
    options = {"kind": kind, "axes": axes, "reshard": not kept, "recompute": recompute}
    one = pool.run(two_dim.training, ranks, **options, directory=tmp_path / "one")
    two = pool.run(two_dim.training, ranks, **options, planes=2, directory=tmp_path / "two")
    for ours, full in zip(one, two, strict=True):
        assert ours["weights"] == ours["compared"] > 0
        assert ours["losses"] == full["losses"]
        assert all(torch.equal(a, b) for a, b in zip(ours["values"], full["values"], strict=True))
        assert ours["stored"] * 2 == full["stored"]
        # Of the checkpoint, names and norms have the same bytes.
        assert 0.5 <= ours["files"] / full["files"] < 0.51
        assert ours["sent"] == full["sent"] * share if share else 0 < ours["sent"] < full["sent"]
        assert all(usages == {"rowwise": True, "columnwise": False} for usages in ours["usages"])
        rows = zip(ours["losses"], ours["reference"], ours["tolerances"], strict=True)
        assert all(abs(loss - expected) <= bound * expected for loss, expected, bound in rows), ours
        assert ours["losses"][-1] < ours["losses"][0]
    if case == "gathered once":
        rows = pool.run(two_dim.training, ranks, **options, recipe="mxfp8")
        assert rows[0]["losses"] != one[0]["losses"]


@pytest.mark.recipe("mxfp8_2d")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recipes", [("mxfp8", "mxfp8_2d"), ("nvfp4_rows", "nvfp4_squares")])
def test_writes_of_1d_scaled_weights_are_requantized(pool, tmp_path, recipes):
    """Check that weights with one scale per row are requantized when written, not copied as bytes."""
    for found in pool.run(two_dim.write_1d_into_2d, 2, recipes=recipes, directory=str(tmp_path)):
        assert found == {"wrong": [], "control": []}
