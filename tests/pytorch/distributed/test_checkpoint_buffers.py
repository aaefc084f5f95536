"""Buffers that are DTensors in checkpoints.

Every element is loaded on any number of ranks. Copies that differ between replicas are found.
"""

from __future__ import annotations

import pytest
from checkpointing import buffers


@pytest.mark.ranks(2)
def test_dtensor_buffers_are_saved_and_loaded(pool, tmp_path):
    for found in pool.run(buffers.save_and_load, 2, directory=str(tmp_path)):
        assert found["wrong"] == [] and sorted(found["control"]) == sorted(buffers.PLACEMENTS)
        kind, text = found["drifted"]
        assert (
            kind == "CheckpointError"
            and "1 tensor(s) differ between ranks" in text
            and "model.copied" in text
        )
    assert pool.run(buffers.load_on_different_mesh, 1, directory=str(tmp_path), saved_on=2) == [[]]
