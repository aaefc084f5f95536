"""DCP between sharded weights on one side, replicated weights on the other."""

from __future__ import annotations

import pytest
from plain_dcp import replicated_weights

SHARDED, REPLICATED = "optim_grads_params", "no_shard"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("source", "target"), [(SHARDED, REPLICATED), (REPLICATED, SHARDED), (REPLICATED, REPLICATED)]
)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "mxfp8_2d", "nvfp4_squares"])
def test_dcp_between_sharded_and_replicated_weights(pool, tmp_path, recipe, source, target):
    """Check that the loaded model has the saved model's outputs. DCP wrote into temporary copies."""
    pool.arch = "9.0" if recipe == "block" else "10.0"
    where = {"recipe": recipe, "source": source, "target": target, "directory": str(tmp_path)}
    for found in pool.run(replicated_weights.loads, 2, **where):
        assert found == {"control": True, "same": True}
