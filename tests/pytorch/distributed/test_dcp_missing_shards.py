"""``dcp.load`` of a directory that one rank has saved alone (``no_dist=True``)."""

from __future__ import annotations

import pytest
from plain_dcp import missing_shards


@pytest.mark.parametrize("sharder", ["torch", "te_fsdp"])
@pytest.mark.parametrize("axes", [{"dp_shard": 2}, {"tp": 2}], ids=["dp_shard", "tp"])
def test_shards_that_no_file_contains_raise(pool, tmp_path, axes, sharder):
    """torch leaves them as they are. Negative control: each rank loads what it has saved alone, and not a new entry."""
    options = {"axes": axes, "sharder": sharder, "directory": str(tmp_path)}
    for rank, errors in enumerate(pool.run(missing_shards.load_own_shards, 2, **options)):
        assert errors.pop(f"own {rank}") == ""
        for error in (errors["first"], errors["plain"]):
            assert "1: dcp.load: model." in error, errors
            assert " elements in the files, got " in error and " dcp.save(no_dist=True) writes only" in error
