"""``dcp.load`` of quantized weights that only some ranks call.

One test uses ``no_dist=True``, others load in groups of some ranks.
"""

from __future__ import annotations

import math

import pytest
from plain_dcp import load_on_some_ranks, round_trip
from test_dcp import ENVIRONMENT

KINDS = {
    "Linear": {"dp_shard": 2, "tp": 2},
    "gated MLP": {"dp_shard": 2, "tp": 2},
    "experts": {"dp_shard": 2, "ep": 2},
    "one parameter": {"dp_shard": 2, "ep": 2},
}


@pytest.mark.ranks(4)
@pytest.mark.covering(strength=1, always=[{"kind": "Linear", "recipe": "current", "how": "no_dist"}])
@pytest.mark.parametrize("how", ["no_dist", "no_dist in turns", "group", "group in turns"])
@pytest.mark.parametrize("saved", ["bytes", "values"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_load_of_quantized_weights_on_some_ranks(pool, tmp_path, kind, recipe, saved, how):
    """Check weights with one scale, which need the amax of all ranks. Loads kept old bytes or hung."""
    if kind == "one parameter" and recipe == "delayed":
        pytest.skip("TransformerEngine has no grouped kernels for it")
    pool.arch = "9.0" if recipe == "block" else "10.0"
    where = {"kind": kind, "recipe": recipe, "sharder": "torch", "keep": False, "directory": str(tmp_path)}
    if saved == "bytes":
        pool.run(round_trip.train_and_save, 4, axes={"dp_shard": 4}, env=ENVIRONMENT, **where)
    else:
        pool.run(round_trip.save_values, 1, axes={"dp_shard": 1}, env=ENVIRONMENT, **where)
    axes = KINDS[kind]
    for found in pool.run(
        load_on_some_ranks.load, math.prod(axes.values()), axes=axes, how=how, env=ENVIRONMENT, **where
    ):
        assert found == {"control": True, "same output": True, "wrong": [], "wrong after a step": []}
