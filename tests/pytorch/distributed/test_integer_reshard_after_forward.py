"""torch's fully_shard with an integer reshard_after_forward, which FSDP2 does not support for quantized weights."""

from __future__ import annotations

import pytest
from parity import integer_reshard


@pytest.mark.ranks(4)
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_integer_reshard_of_quantized_weights_raises(pool, recipe):
    """Check te_fsdp's error in place of torch's about a dtype that cannot require gradients."""
    assert all(pool.run(integer_reshard.forward, 4, recipe=recipe, fewer=False))
    for error in pool.run_expect_error(integer_reshard.forward, 4, recipe=recipe, fewer=True):
        assert error.type_name == "PlacementError" and "integer reshard_after_forward" in error.message
