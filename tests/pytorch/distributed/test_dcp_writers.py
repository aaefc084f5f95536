"""Other writers of torch for state dicts. A rank has several rectangles of a gated fc1."""

from __future__ import annotations

import pytest
from plain_dcp import writers


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "recipe"),
    [
        ("another process", "none"),
        ("another process", "current"),
        ("another process", "mxfp8"),
        ("safetensors", "none"),
        ("safetensors, joined", "none"),
    ],
)
def test_writers_keep_rows_of_stacked_weights(pool, tmp_path, way, recipe):
    """Check that no row is lost or stored in rank order without an error."""
    for found in pool.run(writers.read_by, 2, way=way, recipe=recipe, directory=str(tmp_path)):
        assert found["control"] > 0 and found["wrong"] == [], found
