"""``set_model_state_dict`` of modules without parameters, whose ``_extra_state`` may be absent."""

from __future__ import annotations

import pytest
from plain_dcp import missing_extra_state


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("norm", ["L2Normalization", "RMSNorm"])
def test_load_without_extra_state(pool, norm, broadcast):
    """Check that modules without parameters accept torch's placeholder. It ended in AttributeError."""
    options = {"qk_norm_type": norm, "broadcast": broadcast, "keep": False}
    assert pool.run(missing_extra_state.load, 2, **options) == [[], []]


def test_broadcast_of_a_module_with_two_names(pool):
    """Check the entry of one module for queries and keys. Ranks that pass ``{}`` raised RuntimeError (missing key)."""
    options = {"qk_norm_type": "L2Normalization", "broadcast": True, "keep": True}
    assert pool.run(missing_extra_state.load, 2, **options) == [[], []]
