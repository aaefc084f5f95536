"""HFSDP states in DCP's ``full_state_dict=True``, which have the shapes of the parameters.

Where several axes shard rows unevenly, they had the padded shapes of one mesh.
"""

from __future__ import annotations

import pytest
from hfsdp import full_states
from plain_dcp import uneven_shards

CASES = [({"dp_replicate": 2, "dp_shard": 2}, 4, False), ({"dp_replicate": 2, "dp_shard": 2}, 4, True)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("axes", "ranks", "flat"), CASES, ids=["nested", "flat"])
def test_full_state_dict_has_parameter_shapes(pool, axes, ranks, flat):
    assert pool.run(full_states.round_trip, ranks, axes=axes, flat=flat) == [[]] * ranks


@pytest.mark.ranks(6)
def test_full_state_dict_of_stacked_weights(pool):
    """Check that rows of a gated weight are those of the unsharded module."""
    axes = {"dp_replicate": 3, "dp_shard": 1, "tp": 2}
    assert pool.run(full_states.round_trip, 6, axes=axes, flat=False) == [[]] * 6


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("copies", "outer"), [(4, "optim"), (1, "no_shard")])
def test_full_state_dict_loads_on_a_different_mesh(pool, copies, outer):
    results = pool.run(uneven_shards.resumed, 4, copies=copies, outer=outer, full=True)
    assert all(result["text"] == "" and result["equal"] for result in results), results


@pytest.mark.ranks(4)
def test_padded_states_of_earlier_versions_raise(pool):
    """Check full states of earlier versions on a different mesh."""
    for result in pool.run(full_states.padded, 4, copies=1, outer="no_shard"):
        assert "CheckpointE" in result["text"] and "2, 2, 5, 9" in result["text"], result
        assert ("te_fsdp.checkpoint" in result["text"]) and result["unchanged"], result
