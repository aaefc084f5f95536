"""DCP of HFSDP states in uneven shards."""

from __future__ import annotations

import pytest
from plain_dcp import uneven_shards


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("copies", "outer"), [(4, "optim"), (1, "no_shard")])
def test_load_on_a_different_mesh_raises(pool, copies, outer):
    """Check that no shape error of torch is raised after a part of the state was loaded."""
    for result in pool.run(uneven_shards.resumed, 4, copies=copies, outer=outer, full=False):
        assert "CheckpointE" in result["text"] and "2, 2, 5, 9" in result["text"], result
        assert ("te_fsdp.checkpoint" in result["text"]) and result["unchanged"], result


@pytest.mark.ranks(4)
@pytest.mark.parametrize("full", [False, True])
def test_load_on_the_same_mesh_resumes(pool, full):
    results = pool.run(uneven_shards.resumed, 4, copies=2, outer="optim", full=full)
    assert all(result["text"] == "" and result["equal"] for result in results), results
